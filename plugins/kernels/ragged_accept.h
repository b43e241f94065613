//! Verify-time acceptance of ragged draft prefixes, and the token that follows them.
//! Source: Leviathan et al. 2023, Algorithm 1; coupled mode: Daliri et al. 2024; docs/core_numerics.md, section 9.
#pragma once

#include "launch_status.h"

#include "dspark/hd.h"

namespace dspark {

//! No probability is materialised: a row leaves its argmax key, its total mass and one integer per 1,024 ids; masses are
//! recomputed where a token is picked. One or two launches for the rows (two when there are too few rows to fill the
//! device), one for the requests.
//!
//! Exactness: every output has the bits of acceptRequest with SerialTeam for equal logits and proposals.
struct RaggedAcceptParams {
    int32_t num_tokens;      // T, capacity of the packed rows
    int32_t num_requests;    // R
    int32_t draft_len;       // gamma
    int32_t vocab;           // V
    int32_t draft_vocab;     // Vd
    int32_t num_candidates;  // C of the draft, 0 = dense
    int32_t acceptance;      // Acceptance: 0 greedy, 1 rejection, 2 coupled
    ElementType logits_type;  // of target_logits
    int64_t logits_stride;    // elements between rows, >= V
    void const* target_logits;        // [T, logits_stride]
    int32_t const* cu_tokens;         // [R + 1]; row cu_tokens[r] + k follows k draft tokens
    int32_t const* draft_tokens;      // [R, gamma] target ids
    int32_t const* draft_entries;     // [R, gamma] from launchMarkovDraft
    float const* draft_logits;        // [R, gamma, W], W = C or Vd; null = every draft token is a point mass
    float const* draft_laws;          // [R, gamma, 4]
    int64_t const* draft_totals;      // [R, gamma]
    int32_t const* candidates;        // [R, gamma, C] or null
    int32_t const* draft_of_target;   // [V] or null = identity
    float const* temperature;         // [R]
    int32_t const* top_k;             // [R]
    float const* top_p;               // [R]
    int64_t const* seed;              // [R]
    int32_t const* positions;         // [R] absolute position of the anchor
    int32_t* out_tokens;              // [R, gamma + 1], unused tail -1
    int32_t* emitted_len;             // [R] 1..verify_len + 1; 0 when status is not 0
    int32_t* status;                  // [R] RowStatus
    void* workspace;                  // raggedAcceptWorkspaceBytes(...), 16-byte aligned
};

//! Byte offsets of the scratch arrays; [0, cleared) is set to zero at the beginning of each launch.
struct RaggedAcceptLayout {
    int64_t top_key;        // u64 [T]
    int64_t row_total;      // u64 [T]
    int64_t counter;        // i32 [R] blocks that have finished a request's residual
    int64_t cleared;
    int64_t pivot;          // float32 [T]
    int64_t tile_mass;      // u64 [T, tiles]
    int64_t residual_mass;  // u64 [R, tiles]
    int64_t total;
    int64_t tiles;
};

DSPARK_HD inline RaggedAcceptLayout raggedAcceptLayout(int64_t num_tokens, int64_t num_requests, int64_t vocab) {
    RaggedAcceptLayout layout;
    layout.tiles = (vocab + 1023) / 1024;
    layout.top_key = 0;
    layout.row_total = num_tokens * 8;
    layout.counter = layout.row_total + num_tokens * 8;
    layout.cleared = layout.counter + (num_requests * 4 + 15) / 16 * 16;
    layout.pivot = layout.cleared;
    layout.tile_mass = layout.pivot + (num_tokens * 4 + 15) / 16 * 16;
    layout.residual_mass = layout.tile_mass + num_tokens * layout.tiles * 8;
    layout.total = layout.residual_mass + num_requests * layout.tiles * 8;
    return layout;
}

inline int64_t raggedAcceptWorkspaceBytes(int64_t num_tokens, int64_t num_requests, int64_t vocab) {
    return raggedAcceptLayout(num_tokens, num_requests, vocab).total;
}

LaunchStatus launchRaggedAccept(RaggedAcceptParams const& params, cudaStream_t stream) noexcept;

}  // namespace dspark
