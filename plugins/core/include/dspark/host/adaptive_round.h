#pragma once
//! What mode adaptive decides about the requests of one round (docs/adaptive.md).
//!
//! Requests are rows of BlockStatistics and Standings. Arguments are checked by the caller.

#include "dspark/host/block_statistics.h"
#include "dspark/host/standings.h"
#include "dspark/schedule.h"

namespace dspark::host {

//! The requests of a round.
struct RoundRequests {
    int64_t count;        // R
    int64_t const* rows;  // [R]
    int64_t const* caps;  // [R] drafts of each that may be verified
};

//! Who rests in a round, and what the others' drafts bring together.
struct RoundVerdict {
    int64_t num_judged;  // requests that may draft
    int64_t num_resting;
    bool entered;         // whether one that had speculated rests now
    bool fresh;           // whether one that rests is new and loses little
    int64_t span;         // rows from the first to the last that drafts
    double extra_tokens;  // of those that draft
    double more_us;       // of those that draft
};

//! Judge the requests that may draft, each evaluated before; `allowed` [R] gets caps without those that rest.
inline RoundVerdict judgeRound(RoundRequests const& round, BlockStatistics const& blocks, Standings* standings,
                               int64_t* allowed) {
    RoundVerdict verdict = {};
    int64_t first = -1;
    for (int64_t i = 0; i < round.count; ++i) {
        allowed[i] = 0;
        if (round.caps[i] <= 0) continue;
        ++verdict.num_judged;
        int64_t const row = round.rows[i];
        Worth const& worth = blocks.worth(row);
        Ruling const ruling = standings->judge(row, worth.gain, blocks.blocks(row) == 0.0);
        if (ruling.rests) {
            ++verdict.num_resting;
            verdict.entered = verdict.entered || ruling.entered;
            verdict.fresh = verdict.fresh || ruling.fresh;
            continue;
        }
        allowed[i] = round.caps[i];
        if (first < 0) first = i;
        verdict.span = i - first + 1;
        verdict.extra_tokens += worth.extra_tokens;
        verdict.more_us += worth.more_us;
    }
    return verdict;
}

//! Drafts of a round that may be verified.
struct RoundDrafts {
    float const* confidence;  // [R, gamma]
    float unknown;            // threshold of requests that were not evaluated yet, or have no row: -1
    int64_t budget;           // drafts of all that may be verified
    int64_t probed;           // row of the request that is probed, -1 = none
};

//! Choose how many drafts of each request are verified: while the survival is at least its own threshold.
inline void verifyLens(RoundRequests const& round, BlockStatistics const& blocks, RoundDrafts const& drafts,
                       int64_t* lengths) {
    int const gamma = blocks.gamma();
    int64_t sum = 0;
    for (int64_t i = 0; i < round.count; ++i) {
        int64_t const row = round.rows[i];
        float const threshold = row < 0 ? drafts.unknown : blocks.threshold(row, drafts.unknown);
        int const cap = static_cast<int>(std::min<int64_t>(round.caps[i], gamma));
        lengths[i] = prefixAbove(drafts.confidence + i * gamma, cap, floorOf(static_cast<double>(threshold)));
        sum += lengths[i];
    }
    if (sum > drafts.budget) {
        cutToBudget(SerialTeam{}, static_cast<int>(round.count), gamma, drafts.budget, lengths);
        sum = drafts.budget;
    }
    // A confidence nobody tests could be wrong for ever.
    for (int64_t i = 0; i < round.count && drafts.probed >= 0 && sum < drafts.budget; ++i) {
        if (round.rows[i] == drafts.probed && round.caps[i] > 0 && lengths[i] == 0) lengths[i] = 1;
    }
}

}  // namespace dspark::host
