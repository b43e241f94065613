#pragma once
//! Admission order of prefix candidates: survival descending, flat index (request * gamma + step) ascending.

#include "dspark/team.h"

namespace dspark {

constexpr uint32_t kNoRank = 0xffffffffu;

//! Number of leading entries of a non-increasing list that are >= `floor`.
DSPARK_HD inline int countAtLeast(uint32_t const* list, int length, uint32_t floor) {
    int low = 0, high = length;
    while (low < high) {
        int const middle = (low + high) >> 1;
        if (list[middle] >= floor) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

//! Merge rank: each request's list is sorted already, so a candidate's rank is a sum of binary searches.
//!
//! Reads   survival [R, gamma] Q0.31, non-increasing in each row; zeros are no candidates
//! Writes  order [candidates], rank_of [R, gamma]
DSPARK_TEAM template <class Team>
DSPARK_HD void admissionOrder(Team const& team, int num_requests, int draft_stride, uint32_t const* survival,
                              uint32_t* order, uint32_t* rank_of, uint32_t*) {
    int const count = num_requests * draft_stride;
    for (int flat = team.rank(); flat < count; flat += team.size()) {
        uint32_t const own = survival[flat];
        uint32_t rank = kNoRank;
        if (own > 0) {
            int const request = flat / draft_stride;
            rank = static_cast<uint32_t>(flat - request * draft_stride);
            for (int other = 0; other < num_requests; ++other) {
                if (other == request) continue;
                // Earlier requests win ties: their equal survivals come first.
                uint32_t const floor = other < request ? own : own + 1;
                rank += static_cast<uint32_t>(
                    countAtLeast(survival + static_cast<int64_t>(other) * draft_stride, draft_stride, floor));
            }
            order[rank] = static_cast<uint32_t>(flat);
        }
        rank_of[flat] = rank;
    }
    team.sync();  // order and rank_of visible to all ranks
}

//! One thread sorts by the same key instead (stable radix sort, 11 bits a pass): linear, same result.
DSPARK_HD inline void admissionOrder(SerialTeam const&, int num_requests, int draft_stride, uint32_t const* survival,
                                     uint32_t* order, uint32_t* rank_of, uint32_t* temp) {
    int const count = num_requests * draft_stride;
    constexpr int kBits = 11, kBins = 1 << kBits;
    int candidates = 0;
    for (int flat = 0; flat < count; ++flat) {
        rank_of[flat] = kNoRank;
        if (survival[flat] > 0) temp[candidates++] = static_cast<uint32_t>(flat);
    }
    if (candidates <= 64) {  // insertion beats clearing three histograms
        for (int n = 0; n < candidates; ++n) {
            uint32_t const flat = temp[n];
            int at = n;
            while (at > 0 && survival[order[at - 1]] < survival[flat]) {
                order[at] = order[at - 1];
                --at;
            }
            order[at] = flat;
        }
    } else {
        uint32_t bins[3][kBins] = {};
        for (int n = 0; n < candidates; ++n) {
            uint32_t const key = ~survival[temp[n]];
            ++bins[0][key & (kBins - 1)];
            ++bins[1][(key >> kBits) & (kBins - 1)];
            ++bins[2][key >> (2 * kBits)];
        }
        uint32_t* from = temp;
        uint32_t* to = order;
        for (int pass = 0; pass < 3; ++pass) {
            uint32_t start = 0;
            for (int bin = 0; bin < kBins; ++bin) {
                uint32_t const size = bins[pass][bin];
                bins[pass][bin] = start;
                start += size;
            }
            for (int n = 0; n < candidates; ++n) {
                uint32_t const key = ~survival[from[n]];
                to[bins[pass][(key >> (pass * kBits)) & (kBins - 1)]++] = from[n];
            }
            uint32_t* const swap = from;
            from = to;
            to = swap;
        }
        // Three passes: the sorted list is where the first pass wrote, in `order`.
    }
    for (int n = 0; n < candidates; ++n) rank_of[order[n]] = static_cast<uint32_t>(n);
}

}  // namespace dspark
