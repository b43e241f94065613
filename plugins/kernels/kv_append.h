//! Writes the keys and values of packed tokens into a paged cache, in place.
#pragma once

#include "launch_status.h"

namespace dspark {

//! A cache of N pages of S positions. A slot cache [slots, Hkv, Smax, D] is the case S = Smax, P = 1, page_table = slots.
//!
//! Rows with token_request < 0 are padding and are skipped. A position at or beyond P * S, or a page outside [0, N), is
//! skipped as well: the caller checks capacity before the round, this only protects memory.
struct KvAppendParams {
    int32_t num_tokens;    // T, capacity of the packed rows
    int32_t num_requests;  // R, rows of page_table
    int32_t num_kv_heads;  // Hkv
    int32_t head_dim;      // D; D * element size is a multiple of 16 bytes
    int32_t num_pages;     // N
    int32_t page_size;     // S
    int32_t pages_per_request;  // P
    ElementType type;           // of key, value and both caches
    void const* key;            // [T, Hkv, D]
    void const* value;          // [T, Hkv, D]
    int32_t const* token_request;   // [T], -1 = padding
    int32_t const* token_position;  // [T] absolute
    int32_t const* page_table;      // [R, P]
    void* key_cache;                // [N, Hkv, S, D]
    void* value_cache;              // [N, Hkv, S, D]
};

LaunchStatus launchKvAppend(KvAppendParams const& params, cudaStream_t stream) noexcept;

}  // namespace dspark
