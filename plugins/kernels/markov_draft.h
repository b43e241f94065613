//! The sequential (Markov) head: drafts gamma tokens per request, left to right.
//! Source: DSpark paper, section 3.1, equations 4-6.
#pragma once

#include "launch_status.h"

#include "dspark/hd.h"

namespace dspark {

//! Two ways: dense (num_candidates = 0; one pass over W2 a step for all requests, two launches a step) and the candidate
//! walk (num_candidates = C; the C largest base logits of every position are selected once, then one block per request
//! walks its block; q is truncated to the candidates exactly).
//!
//! Exactness: tokens, rows, laws and totals have the bits of dspark::draftStep with SerialTeam for equal inputs.
//! Grid: R, gamma, V and C only. Launches: 1 + 2 gamma (dense), 2 (candidates).
struct MarkovDraftParams {
    int32_t num_requests;    // R
    int32_t draft_len;       // gamma
    int32_t vocab;           // V, target ids
    int32_t draft_vocab;     // Vd
    int32_t rank;            // r, 0 only for head_kind none
    int32_t hidden_size;     // d, 0 unless gated or rnn
    int32_t head_kind;       // HeadKind: 0 none, 1 vanilla, 2 gated, 3 rnn
    int32_t acceptance;      // Acceptance: 0 greedy, 1 rejection, 2 coupled
    int32_t num_candidates;  // C, 0 = dense; at most 256
    ElementType logits_type;   // of base_logits
    ElementType weight_type;   // of w1 and w2; int8 needs the scales
    ElementType hidden_type;   // of hidden
    void const* base_logits;   // [R, gamma, Vd]
    void const* hidden;        // [R, gamma, d] or null
    int32_t const* anchors;    // [R] target ids
    int32_t const* positions;  // [R] absolute position of the anchor
    float const* temperature;  // [R], below 1e-5 = greedy
    int32_t const* top_k;      // [R], 0 = off
    float const* top_p;        // [R], 1 = off
    int64_t const* seed;       // [R], the bits are unsigned
    void const* w1;            // [V, r]
    void const* w2;            // [Vd, r]
    float const* w1_scale;     // [V], int8 only
    float const* w2_scale;     // [Vd], int8 only
    float const* gate_weight;  // [r, d + r], gated only
    float const* gate_bias;    // [r] or null
    float const* rnn_weight;   // [3r, 2r + d], rnn only
    float const* rnn_bias;     // [3r] or null
    int32_t const* target_of_draft;  // [Vd] or null = identity
    int32_t const* draft_of_target;  // [V], -1 = not in the draft vocabulary; needed when target_of_draft is set
    int32_t* draft_tokens;     // [R, gamma] target ids; all -1 when status is not 0
    int32_t* draft_entries;    // [R, gamma] entry of the token in its row
    float* draft_logits;       // [R, gamma, W] corrected logits, W = C or Vd; null only when acceptance is greedy
    float* draft_laws;         // [R, gamma, 4]: max, scale, pivot, 0
    int64_t* draft_totals;     // [R, gamma] total mass; 0 = a point mass
    int32_t* candidates;       // [R, gamma, C] draft ids, ascending; null when dense
    int32_t* status;           // [R] RowStatus of the first bad row, 0 = ok
    void* workspace;           // markovDraftWorkspaceBytes(...), 16-byte aligned
};

//! Byte offsets of the scratch arrays and their total size.
struct MarkovDraftLayout {
    int64_t top_key;       // u64 [R] argmax key of the current step, 0 between steps
    int64_t tile_mass;     // u64 [R, tiles]
    int64_t latent;        // [R] rows of latent_bytes: float32, or int8 at the front
    int64_t latent_scale;  // float32 [R]
    int64_t state;         // float32 [R, r] rnn state
    int64_t pre;           // float32 [R, 3r] gate (and rnn) pre-activations
    int64_t counter;       // i32 [R] blocks that have finished a request's masses, 0 between steps
    int64_t total;
    int64_t tiles;
    int64_t latent_bytes;
};

DSPARK_HD inline int64_t roundUp16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

DSPARK_HD inline MarkovDraftLayout markovDraftLayout(int64_t num_requests, int64_t vocab, int64_t draft_vocab,
                                                     int64_t rank) {
    MarkovDraftLayout layout;
    layout.tiles = ((vocab > draft_vocab ? vocab : draft_vocab) + 1023) / 1024;
    layout.latent_bytes = roundUp16(rank * 4);
    layout.top_key = 0;
    layout.tile_mass = layout.top_key + roundUp16(num_requests * 8);
    layout.latent = layout.tile_mass + roundUp16(num_requests * layout.tiles * 8);
    layout.latent_scale = layout.latent + num_requests * layout.latent_bytes;
    layout.state = layout.latent_scale + roundUp16(num_requests * 4);
    layout.pre = layout.state + roundUp16(num_requests * rank * 4);
    layout.counter = layout.pre + roundUp16(num_requests * rank * 12);
    layout.total = layout.counter + roundUp16(num_requests * 4);
    return layout;
}

inline int64_t markovDraftWorkspaceBytes(int64_t num_requests, int64_t vocab, int64_t draft_vocab, int64_t rank) {
    return markovDraftLayout(num_requests, vocab, draft_vocab, rank).total;
}

LaunchStatus launchMarkovDraft(MarkovDraftParams const& params, cudaStream_t stream) noexcept;

}  // namespace dspark
