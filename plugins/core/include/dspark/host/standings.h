#pragma once
//! Which requests rest from speculating: hysteresis over every request's own gain, in rounds (docs/adaptive.md).
//!
//! Requests are rows. Arguments are checked by the caller.

#include <cstdint>
#include <vector>

namespace dspark::host {

//! When a request stops speculating and when it may go on.
struct RestRules {
    double enter;     // it rests where its average gain is less than this for `patience` rounds
    double leave;     // one that rests goes on above this
    double heavy_loss;     // a round below this counts as `heavy_weight` of them
    double smoothing;      // weight of a round in the average
    int64_t patience;      // rounds
    int64_t heavy_weight;  // rounds
};

//! The requests of a round.
struct RoundGains {
    int64_t num_requests;   // R
    int64_t const* rows;    // [R]
    int64_t const* caps;    // [R] drafts of each that may be verified; those without any are not judged
    double const* gains;    // [R] predicted rate of speculating over that of plain decoding, minus 1
    double const* blocks;   // [R] blocks known of each, 0 = it is new
};

struct RoundVerdict {
    int64_t num_judged;
    int64_t num_resting;
    bool entered;  // whether one that had speculated rests now
    bool fresh;    // whether one that rests is new and loses little
};

class Standings {
public:
    explicit Standings(RestRules const& rules) : rules_(rules) {}

    int64_t numRows() const { return static_cast<int64_t>(rows_.size()); }

    //! Make a row that of a request that was never judged; `row` is at most numRows().
    void reset(int64_t row) {
        if (row == numRows()) rows_.push_back({});
        rows_[static_cast<size_t>(row)] = {};
    }

    //! Let a request that was never judged speculate.
    void meet(int64_t row) { rows_[static_cast<size_t>(row)].known = true; }

    //! Judge the requests of a round; `resting` [R] gets the places of those that rest, in order.
    RoundVerdict judge(RoundGains const& round, int64_t* resting) {
        RoundVerdict verdict = {0, 0, false, false};
        for (int64_t i = 0; i < round.num_requests; ++i) {
            if (round.caps[i] <= 0) continue;
            ++verdict.num_judged;
            Standing* const standing = &rows_[static_cast<size_t>(round.rows[i])];
            bool const rested = standing->resting || !standing->known;
            bool const is_new = round.blocks[i] == 0.0;
            judgeOne(round.gains[i], is_new, standing);
            if (!standing->resting) continue;
            resting[verdict.num_resting++] = i;
            verdict.entered = verdict.entered || !rested;
            verdict.fresh = verdict.fresh || (is_new && round.gains[i] > rules_.heavy_loss);
        }
        return verdict;
    }

private:
    struct Standing {
        bool known, resting, averaged;
        double mean;   // average gain
        int64_t poor;  // poor rounds in a row
    };

    void judgeOne(double gain, bool is_new, Standing* standing) const {
        if (!standing->known) {
            // Of a new one nothing is known but what all promise.
            standing->known = true;
            standing->resting = gain < rules_.enter;
            return;
        }
        if (standing->resting) {
            if (gain > rules_.leave) *standing = {true, false, false, 0.0, 0};
            return;
        }
        // What others show does not stop it.
        if (is_new) return;
        standing->mean = standing->averaged ? standing->mean + rules_.smoothing * (gain - standing->mean) : gain;
        standing->averaged = true;
        if (gain < rules_.heavy_loss) {
            standing->poor += rules_.heavy_weight;
        } else {
            standing->poor = standing->mean < rules_.enter ? standing->poor + 1 : 0;
        }
        standing->resting = standing->poor >= rules_.patience;
    }

    RestRules rules_;
    std::vector<Standing> rows_;
};

}  // namespace dspark::host
