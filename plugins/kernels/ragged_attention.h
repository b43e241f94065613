//! Attention of packed query tokens over a paged cache, one ragged group of tokens per request.
#pragma once

#include "launch_status.h"

#include "dspark/hd.h"

namespace dspark {

//! Query head h reads key head h / (Hq / Hkv). The keys of a request are positions [0, kv_len), kv_len = position of its
//! last packed token + 1, read through the page table (see kv_append.h).
//!
//! causal != 0: a token at position p attends to positions <= p (verification). causal == 0: to all of [0, kv_len)
//! (a drafter block: the whole context and the whole block). Packed rows at or beyond cu_tokens[R] get zeros.
//!
//! The keys are cut into pieces of kv_split positions whose partial results are merged in ascending order, so a request's
//! result does not depend on its batch mates. Exactness: float32 softmax and accumulation; P is rounded to the element
//! type before P V.
struct RaggedAttentionParams {
    int32_t num_tokens;         // T, capacity of the packed rows
    int32_t num_requests;       // R
    int32_t num_heads;          // Hq, a multiple of Hkv
    int32_t num_kv_heads;       // Hkv
    int32_t head_dim;           // D: 64 or 128
    int32_t num_pages;          // N
    int32_t page_size;          // S
    int32_t pages_per_request;  // P
    int32_t kv_split;           // positions a piece, a multiple of 64
    int32_t causal;             // 0 or 1
    float scale;                // factor of q k^T, usually 1 / sqrt(D)
    ElementType type;           // of query, caches and output: float16 or bfloat16
    void const* query;                 // [T, Hq, D]
    void const* key_cache;             // [N, Hkv, S, D]
    void const* value_cache;           // [N, Hkv, S, D]
    int32_t const* cu_tokens;          // [R + 1]
    int32_t const* token_position;     // [T] absolute, ascending by one within a request
    int32_t const* page_table;         // [R, P]
    void* output;                      // [T, Hq, D]
    void* workspace;                   // raggedAttentionWorkspaceBytes(...)
};

//! Partial results of every piece: float32 [pieces, T, Hq, D] and [pieces, T, Hq, 2].
DSPARK_HD inline int64_t raggedAttentionPieces(int64_t positions, int64_t kv_split) {
    return (positions + kv_split - 1) / kv_split;
}
inline int64_t raggedAttentionWorkspaceBytes(int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                                             int64_t positions, int64_t kv_split) {
    int64_t const pieces = raggedAttentionPieces(positions, kv_split);
    return pieces <= 1 ? 0 : pieces * num_tokens * num_heads * (head_dim + 2) * int64_t{4};
}

LaunchStatus launchRaggedAttention(RaggedAttentionParams const& params, cudaStream_t stream) noexcept;

}  // namespace dspark
