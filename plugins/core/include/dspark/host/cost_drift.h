#pragma once
//! How measured times correct a cost table while it is used (docs/adaptive.md).
//!
//! Times are microseconds: of a pass over one token a request by the table (`first`), what its other tokens add to that
//! (`more`), and a draft. Arguments are checked by the caller.

#include <algorithm>
#include <cstdint>

namespace dspark::host {

//! How far and how fast a table is corrected.
struct DriftRules {
    double memory;          // weight of a round after one more round
    double prior;           // rounds that the assumption counts for that base and marginal cost drift alike
    double flat;            // a pass whose other tokens add less than this share measures the base
    double outlier;         // a time counts as this many times its prediction at most
    double base_bound;      // the base is corrected by this factor at most, either way
    double marginal_bound;  // marginal cost by this factor of the base
    double draft_bound;     // drafting by this factor of the base
};

//! Measured over predicted time.
struct Correction {
    double base, marginal, draft;
};

class CostDrift {
public:
    explicit CostDrift(DriftRules const& rules) : rules_(rules) {}

    Correction const& correction() const { return correction_; }
    //! Rounds with drafts, timed or not, since the last timed pass without.
    int64_t roundsUnmeasured() const { return unmeasured_; }

    //! Learn from one target pass; return the time that was predicted for it.
    double observeVerify(double first, double more, double measured) {
        double const predicted = correction_.base * first + correction_.marginal * more;
        double const x = more / first, taken = believable(measured, predicted, first + more) / first;
        Sums* const sums = &sums_;
        double const memory = rules_.memory;
        *sums = {memory * sums->n + 1.0, memory * sums->nx + x, memory * sums->nxx + x * x, memory * sums->y + taken,
                 memory * sums->xy + x * taken};
        // Of both alike: the least-squares factor on the whole prediction.
        double const alike = (sums->y + sums->xy) / (sums->n + 2.0 * sums->nx + sums->nxx);
        // A marginal cost that hardly enters the rounds must not hold the base back, nor be told from so little.
        double const weak = rules_.prior * sums->nxx / sums->n + sums->n * (rules_.flat * rules_.flat);
        double const n = sums->n + rules_.prior, nx = sums->nx, nxx = sums->nxx + weak;
        double const y = sums->y + rules_.prior * alike, xy = sums->xy + weak * alike;
        double const determinant = n * nxx - nx * nx;
        unmeasured_ = more < rules_.flat * first ? 0 : unmeasured_ + 1;
        correct((nxx * y - nx * xy) / determinant, (n * xy - nx * y) / determinant);
        return predicted;
    }

    //! Learn from one draft, timed by itself; return the time that was predicted for it.
    double observeDraft(double draft, double measured) {
        double const predicted = correction_.draft * draft;
        draft_weight_ = rules_.memory * draft_weight_ + 1.0;
        draft_ratio_ = rules_.memory * draft_ratio_ + believable(measured, predicted, draft) / draft;
        correct(correction_.base, correction_.marginal);
        return predicted;
    }

    //! Learn from a round with drafts of which only the whole was timed; return the time predicted for it.
    double observeRound(double first, double more, double draft, double measured) {
        double const predicted = correction_.base * first + correction_.marginal * more + correction_.draft * draft;
        double const taken = believable(measured, predicted, first + more + draft), memory = rules_.memory;
        whole_ = {memory * whole_.count + 1.0, memory * whole_.taken + taken / first,
                  memory * whole_.more + more / first, memory * whole_.drafts + draft / first};
        ++unmeasured_;
        double base = correction_.base;
        // No plain round was timed: nothing tells the parts apart.
        if (sums_.n == 0.0) base = whole_.taken / (whole_.count + whole_.more + whole_.drafts);
        correct(base, base);
        return predicted;
    }

    //! Count a round with drafts that could not be timed.
    void observeUntimed() { ++unmeasured_; }

private:
    //! The normal equations [[n, nx], [nx, nxx]], [y, xy] of base and marginal.
    struct Sums {
        double n, nx, nxx, y, xy;
    };
    //! Whole rounds: their number, and in passes over one token a request what they took and what the table adds.
    struct WholeRounds {
        double count, taken, more, drafts;
    };

    //! A time that was not interrupted; one up to where a correction of 1 reaches its bound.
    double believable(double measured, double predicted, double table) const {
        return std::min(measured, rules_.outlier * std::max(predicted, table));
    }

    static double bounded(double factor, double middle, double bound) {
        return std::min(bound * middle, std::max(middle / bound, factor));
    }

    void correct(double base, double marginal) {
        // As long as no draft was timed it is taken to drift like the target.
        double draft = draft_weight_ > 0.0 ? draft_ratio_ / draft_weight_ : base;
        base = bounded(base, 1.0, rules_.base_bound);
        if (whole_.count > 0.0) {
            double const beyond = whole_.taken - base * whole_.count;
            marginal = bounded(beyond / (whole_.more + whole_.drafts), base, rules_.marginal_bound);
            draft = (beyond - marginal * whole_.more) / whole_.drafts;
        }
        correction_ = {base, bounded(marginal, base, rules_.marginal_bound),
                       bounded(draft, base, rules_.draft_bound)};
    }

    DriftRules rules_;
    Correction correction_ = {1.0, 1.0, 1.0};
    Sums sums_ = {};
    WholeRounds whole_ = {};
    double draft_weight_ = 0.0, draft_ratio_ = 0.0;
    int64_t unmeasured_ = 0;
};

}  // namespace dspark::host
