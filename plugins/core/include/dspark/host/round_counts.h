#pragma once
//! What rounds drafted, were allowed, verified and accepted: by position in the block, and of the latest in total.
//!
//! Arguments are checked by the caller.

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <vector>

namespace dspark::host {

//! The requests of a round.
struct CountedRound {
    int64_t num_requests;       // R
    int64_t const* caps;        // [R] drafts of each that might be verified
    bool const* drafted;        // [R] whether it drafted; the others count nowhere
    int64_t const* verify_len;  // [R]
    int64_t const* accepted;    // [R], negative where the logits were refused
    int64_t budget;             // drafts of all that might be verified
};

//! Drafts of one round.
struct RoundTotals {
    int64_t admitted, verified, made;
};

class RoundCounts {
public:
    RoundCounts(int draft_len, size_t most_recent) : draft_len_(draft_len), most_recent_(most_recent) {
        for (std::vector<int64_t>& counts : at_least_) counts.resize(static_cast<size_t>(draft_len) + 1);
    }

    int draftLen() const { return draft_len_; }
    int64_t drafted() const { return at_least_[0][0]; }

    void add(CountedRound const& round) {
        RoundTotals totals = {0, 0, 0};
        for (int64_t i = 0; i < round.num_requests; ++i) {
            if (!round.drafted[i]) continue;
            totals.admitted += round.caps[i];
            totals.verified += round.verify_len[i];
            totals.made += draft_len_;
            countUpTo(round.caps[i], &at_least_[0]);
            countUpTo(round.verify_len[i], &at_least_[1]);
            countUpTo(round.accepted[i], &at_least_[2]);
        }
        if (totals.made == 0) return;
        totals.admitted = std::min(totals.admitted, round.budget);
        recent_.push_back(totals);
        if (recent_.size() > most_recent_) recent_.pop_front();
    }

    //! How often the positions got to a stage: 0 admitted, 1 verified, 2 accepted.
    std::vector<int64_t> positions(size_t stage) const { return {at_least_[stage].begin() + 1, at_least_[stage].end()}; }

    //! The latest rounds that drafted, and forget them.
    std::deque<RoundTotals> takeRecent() {
        std::deque<RoundTotals> taken;
        taken.swap(recent_);
        return taken;
    }

private:
    //! Entry k counts requests with at least k drafts.
    static void countUpTo(int64_t length, std::vector<int64_t>* at_least) {
        ++(*at_least)[0];
        for (int64_t k = 1; k <= length; ++k) ++(*at_least)[static_cast<size_t>(k)];
    }

    int draft_len_;
    size_t most_recent_;
    std::array<std::vector<int64_t>, 3> at_least_;
    std::deque<RoundTotals> recent_;
};

}  // namespace dspark::host
