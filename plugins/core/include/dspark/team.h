#pragma once
//! The team concept: the threads that run one algorithm together.
//!
//! A team has rank() in [0, size()), size(), sync(), maxU64(x), addU64(x) and exclusiveAddU64(x, &total). Every member is
//! called by all ranks in the same order; results are the same on all ranks (except the exclusive prefix, which is the
//! rank's own). Only order-independent things are reduced (integer max and sum), so every team size gives equal bits.
//! Ranks see each other's writes to shared arrays after sync(); the reductions synchronise as well.

#include "dspark/hd.h"

namespace dspark {

//! One thread: every collective is the identity.
struct SerialTeam {
    DSPARK_HD int rank() const { return 0; }
    DSPARK_HD int size() const { return 1; }
    DSPARK_HD void sync() const {}
    DSPARK_HD uint64_t maxU64(uint64_t x) const { return x; }
    DSPARK_HD uint64_t addU64(uint64_t x) const { return x; }
    DSPARK_HD uint64_t exclusiveAddU64(uint64_t x, uint64_t* total) const {
        *total = x;
        return 0;
    }
};

//! Half-open range of [0, count) that a rank owns when work is split into contiguous chunks.
struct Span {
    int begin;
    int end;
};

DSPARK_TEAM template <class Team>
DSPARK_HD inline Span chunkOf(Team const& team, int count) {
    int const chunk = (count + team.size() - 1) / team.size();
    int const begin = minOf(count, chunk * team.rank());
    return {begin, minOf(count, begin + chunk)};
}

}  // namespace dspark
