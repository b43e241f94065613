#pragma once
//! Which requests rest from speculating: hysteresis over every request's own gain, in rounds (docs/adaptive.md).
//!
//! Requests are rows. Arguments are checked by the caller.

#include <cstdint>
#include <vector>

namespace dspark::host {

//! When a request stops speculating and when it may go on.
struct RestRules {
    double enter;          // it rests where its average gain is less than this for `patience` rounds
    double leave;          // one that rests goes on above this
    double heavy_loss;     // a round below this counts as `heavy_weight` of them
    double smoothing;      // weight of a round in the average
    int64_t patience;      // rounds
    int64_t heavy_weight;  // rounds
};

//! What a round finds about one request.
struct Ruling {
    bool rests;
    bool entered;  // whether it had speculated and rests now
    bool fresh;    // whether it rests, is new and loses little
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

    //! Judge one request in a round by its gain; of one that is new nothing is known but what all promise.
    Ruling judge(int64_t row, double gain, bool is_new) {
        Standing* const standing = &rows_[static_cast<size_t>(row)];
        bool const rested = standing->resting || !standing->known;
        update(gain, is_new, standing);
        return {standing->resting, standing->resting && !rested,
                standing->resting && is_new && gain > rules_.heavy_loss};
    }

private:
    struct Standing {
        bool known, resting, averaged;
        double mean;   // average gain
        int64_t poor;  // poor rounds in a row
    };

    void update(double gain, bool is_new, Standing* standing) const {
        if (!standing->known) {
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
