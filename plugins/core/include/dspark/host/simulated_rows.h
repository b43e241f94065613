#pragma once
//! The decoding requests of a simulated server: where each stands among recorded blocks, what it may still emit.
//!
//! Arguments are checked by the caller.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dspark::host {

//! Blocks of drafts that requests meet one after the other.
struct RecordedBlocks {
    int64_t count;             // N
    int64_t const* accepted;   // [N] drafts accepted of each when it is verified in full
    int64_t const* following;  // [N] the block behind each
    bool by_token;             // whether there is one for every token: who emits n tokens goes on by n blocks
};

//! What a request did while it had a row.
struct RowTally {
    int64_t rounds, emitted, verified;
};

//! Drafts of all rows in one round, and tokens that drafters' contexts absorb in it beyond the one of each row that
//! drafts.
struct RoundTally {
    int64_t verified, accepted, backlog;
};

//! Rows 0 .. R - 1; into the hole of one that leaves the last moves, as in a session's slot table.
class SimulatedRows {
public:
    //! A row that does not draft absorbs what waits once that is `most_waiting` tokens, at least 1: 1 = in every round.
    SimulatedRows(RecordedBlocks const& blocks, int64_t most_waiting) : blocks_(blocks), most_waiting_(most_waiting) {}

    int64_t size() const { return static_cast<int64_t>(rows_.size()); }
    RecordedBlocks const& blocks() const { return blocks_; }
    int64_t block(int64_t row) const { return at(row).block; }

    //! Drafts a row may verify: behind them it emits one token more.
    int64_t cap(int64_t row, int64_t most) const { return std::min(at(row).left - 1, most); }

    //! Add a row that may emit `left` tokens, at least 1; of its prompt `waiting` are not absorbed.
    void join(int64_t block, int64_t left, int64_t waiting) {
        rows_.push_back({block, left, left, 0, waiting, rounds_});
    }

    RowTally leave(int64_t row) {
        Row const gone = at(row);
        rows_[static_cast<size_t>(row)] = rows_.back();
        rows_.pop_back();
        return {rounds_ - gone.joined, gone.first_left - gone.left, gone.verified};
    }

    void clear() { rows_.clear(); }

    //! Let every row emit what a round gives it and go on to its next block.
    //!
    //! `verify_len` [R] is null where nothing was drafted: then a block that is not of a token is met again. `drafting`
    //! [R] is above 0 where a row drafts; null where none does. `accepted` [R] gets the drafts accepted of each, `ended`
    //! the rows that have emitted all they may, in order.
    RoundTally advance(int64_t const* verify_len, int64_t const* drafting, int64_t* accepted,
                       std::vector<int64_t>* ended) {
        RoundTally tally = {0, 0, 0};
        ++rounds_;
        for (int64_t i = 0; i < size(); ++i) {
            Row* const row = &rows_[static_cast<size_t>(i)];
            int64_t const verified = verify_len ? verify_len[i] : 0;
            int64_t const kept = std::min(verified, blocks_.accepted[row->block]);
            if (blocks_.by_token) {
                row->block = blocks_.following[row->block + kept];
            } else if (verify_len) {
                row->block = blocks_.following[row->block];
            }
            bool const drafts = drafting && drafting[i] > 0;
            if (drafts || row->waiting >= most_waiting_) {
                tally.backlog += std::max<int64_t>(row->waiting - drafts, 0);
                row->waiting = 0;
            }
            row->waiting += kept + 1;
            row->left -= kept + 1;
            row->verified += verified;
            accepted[i] = kept;
            tally.verified += verified;
            tally.accepted += kept;
            if (row->left <= 0) ended->push_back(i);
        }
        return tally;
    }

private:
    struct Row {
        int64_t block, left, first_left, verified;
        int64_t waiting;  // tokens emitted, or of the prompt, that the drafter's context has not absorbed
        int64_t joined;  // number of the round before its first
    };

    Row const& at(int64_t row) const { return rows_[static_cast<size_t>(row)]; }

    RecordedBlocks blocks_;
    int64_t most_waiting_;
    std::vector<Row> rows_;
    int64_t rounds_ = 0;
};

}  // namespace dspark::host
