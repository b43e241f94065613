#pragma once
//! Packing ragged rounds into rows of one pass. Padding rows carry request -1 and position -1, so they never name slot 0.

#include "dspark/team.h"

namespace dspark {

template <class Index>
struct PackInput {
    int32_t num_requests;         // R
    int32_t draft_stride;         // gamma
    int64_t num_rows;             // T_pad >= sum(1 + verify_len)
    Index const* anchors;       // [R]
    Index const* draft_tokens;  // [R, gamma]
    Index const* verify_len;    // [R] in 0..gamma
    Index const* positions;     // [R]
};

template <class Index>
struct PackOutput {
    Index* cu_tokens;       // [R + 1]
    Index* token_ids;       // [T_pad]
    Index* token_request;   // [T_pad]
    Index* token_position;  // [T_pad]
};

DSPARK_TEAM template <class Team, class Index>
DSPARK_HD void packTokens(Team const& team, PackInput<Index> const& in, PackOutput<Index> const& out) {
    Span const span = chunkOf(team, in.num_requests);
    uint64_t mine = 0;
    for (int request = span.begin; request < span.end; ++request) {
        mine += 1 + static_cast<uint64_t>(in.verify_len[request]);
    }
    uint64_t total = 0;
    int64_t at = static_cast<int64_t>(team.exclusiveAddU64(mine, &total));
    for (int request = span.begin; request < span.end; ++request) {
        out.cu_tokens[request] = static_cast<Index>(at);
        Index const* const drafts = in.draft_tokens + static_cast<int64_t>(request) * in.draft_stride;
        for (Index step = 0; step <= in.verify_len[request]; ++step, ++at) {
            out.token_ids[at] = step == 0 ? in.anchors[request] : drafts[step - 1];
            out.token_request[at] = static_cast<Index>(request);
            out.token_position[at] = in.positions[request] + step;
        }
    }
    if (team.rank() == 0) out.cu_tokens[in.num_requests] = static_cast<Index>(total);
    for (int64_t row = static_cast<int64_t>(total) + team.rank(); row < in.num_rows; row += team.size()) {
        out.token_ids[row] = 0;
        out.token_request[row] = -1;
        out.token_position[row] = -1;
    }
    team.sync();  // outputs visible to all ranks
}

}  // namespace dspark
