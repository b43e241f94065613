//! What a round on the device needs between its passes: who drafts, the index tensors of the target pass, the commit.
//!
//! State of slot r, all int32: `anchors` the last token emitted, `positions` the tokens cached (= the anchor's position),
//! `remaining` the tokens it may still emit. A row is live when it is one of the first `active[0]` rows and has tokens
//! left; every other row rides along: it verifies nothing, its state does not move, and what it writes lies behind the
//! end of its cache row.
#pragma once

#include "launch_status.h"

#include <cstdint>

namespace dspark {

//! Beginning of a round: inputs of the block pass. One launch.
struct RoundBeginParams {
    int32_t num_requests;  // R, rows of the round
    int32_t block_size;    // tokens of a block, anchor first; 0 = no block
    int32_t mask_token;    // id behind the anchor
    int32_t const* anchors;    // [R]
    int32_t const* positions;  // [R]
    int64_t* starts;           // [R] positions, as the passes take them
    int64_t* block_ids;        // [R, block_size] anchor and masks
};

//! How many drafts of each row may be verified, and which rows emit. One launch.
struct RoundCapsParams {
    int32_t num_requests;  // R
    int32_t const* active;       // [1]
    int32_t const* max_drafts;   // [R] most drafts a request wants
    int32_t const* remaining;    // [R]
    int32_t const* draft_status;  // [R] of markov_draft
    int32_t* caps;  // [R] min(max_drafts, remaining - 1); 0 for rows that are not live or whose draft failed
    int32_t* live;  // [R] 1 for live rows, failed drafts or not; 0 for those that ride along
};

//! Packed rows -> inputs of a target pass with a padded attention view. One launch.
struct RoundRowsParams {
    int32_t num_requests;  // R
    int32_t num_tokens;    // T of the pass, at least cu_tokens[R]
    int32_t row_len;       // S, at least the longest row
    int32_t const* cu_tokens;       // [R + 1]
    int32_t const* token_ids;       // [T]
    int32_t const* token_request;   // [T], -1 = padding
    int32_t const* token_position;  // [T]
    int64_t* input_ids;             // [T], padding 0
    int64_t* positions;             // [T], padding 0
    int64_t* pack_index;            // [T] place in the flattened padded view, padding 0
    int64_t* pad_index;             // [R, S] packed row of each place; places behind a row's end repeat its last token
};

//! Forbids tokens of rows whose output is still too short. One launch.
struct RoundBanParams {
    int32_t num_requests;  // R
    int32_t num_tokens;    // T, rows of logits
    int32_t vocab;         // V
    int32_t max_banned;    // tokens of a row of `banned`
    int32_t const* cu_tokens;  // [R + 1]
    int32_t const* positions;  // [R] position of the anchor
    int32_t const* ban_until;  // [R] tokens at positions below it cannot be the banned ones; 0 = nothing is banned
    int32_t const* banned;     // [R, max_banned] ids, -1 = none
    float* logits;             // [T, V], float32; banned entries become -inf
};

//! End of a round: anchors, positions and remaining tokens move on. One launch.
struct RoundCommitParams {
    int32_t num_requests;  // R
    int32_t draft_len;     // gamma
    int32_t const* active;       // [1]
    int32_t const* out_tokens;   // [R, gamma + 1] of ragged_accept
    int32_t const* emitted_len;  // [R] of ragged_accept; 0 = the row failed and stays where it is
    int32_t* anchors;            // [R]
    int32_t* positions;          // [R]
    int32_t* remaining;          // [R]
};

LaunchStatus launchRoundBegin(RoundBeginParams const& params, cudaStream_t stream) noexcept;
LaunchStatus launchRoundCaps(RoundCapsParams const& params, cudaStream_t stream) noexcept;
LaunchStatus launchRoundRows(RoundRowsParams const& params, cudaStream_t stream) noexcept;
LaunchStatus launchRoundBan(RoundBanParams const& params, cudaStream_t stream) noexcept;
LaunchStatus launchRoundCommit(RoundCommitParams const& params, cudaStream_t stream) noexcept;

}  // namespace dspark
