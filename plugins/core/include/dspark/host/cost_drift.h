#pragma once
//! How measured times correct a cost table while it is used (docs/adaptive.md).
//!
//! Times are microseconds: of a pass over one token a request by the table (`first`), what its other tokens add to that
//! (`more`), and a draft. Arguments are checked by the caller.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace dspark::host {

//! How far and how fast a table is corrected. Deviations are standard deviations, as shares of what deviates.
struct DriftRules {
    double noise;           // deviation of a measured time
    double common;          // deviation by which all three move together in a round
    double ratio;           // deviation by which marginal cost and drafting move against the base in a round
    double doubt;           // deviation of the table's marginal cost; forgetting makes no ratio more doubtful than this
    double shape;           // weight of that by which a pass's tokens differ from those of other passes with drafts
    double memory;          // weight of a round in the mean of its kind after one more
    double flat;            // a pass whose other tokens add less than this share measures the base
    double surprise;        // a time counts as this many deviations off its prediction at most
    double outlier;         // and as this many times its prediction at most
    double base_bound;      // the base is corrected by this factor at most, either way
    double marginal_bound;  // marginal cost by this factor of the base
    double draft_bound;     // drafting by this factor of the base
};

//! Measured over predicted time.
struct Correction {
    double base, marginal, draft;
};

//! A Kalman filter of the three factors. What moves all of them is expected much sooner than what moves one against
//! the others: a clock or a busy machine is followed at once, and their ratios stay as they were last told apart.
//! Whole rounds tell base and the rest only together, and only against plain ones: so nothing of that is doubted before
//! both were timed, and then along what leaves the expected time of the one kind as it is.
class CostDrift {
public:
    explicit CostDrift(DriftRules const& rules) : rules_(rules) { addDoubt(rules.base_bound, factors_); }

    Correction correction() const { return {factors_[0], factors_[1], factors_[2]}; }
    //! Rounds with drafts, timed or not, since the last timed pass without.
    int64_t roundsUnmeasured() const { return unmeasured_; }

    //! Learn from one target pass; return the time that was predicted for it.
    double observeVerify(double first, double more, double measured) {
        double const x = more / first, predicted = factors_[0] + factors_[1] * x;
        double const taken = believable(measured / first, predicted, 1.0 + x);
        passRound();
        if (x > 0.0 && !tokens_met_) {
            tokens_met_ = true;
            addDoubt(rules_.doubt, {0.0, factors_[1], 0.0});
        }
        double told = x;
        if (x >= rules_.flat) {
            passes_.add(rules_.memory, x, 0.0);
            // A table errs between its points: passes that differ by little would take that for a slope.
            told = passes_.meanMore() + rules_.shape * (x - passes_.meanMore());
        }
        learn({1.0, told, 0.0}, taken, predicted, x < rules_.flat ? kPlain : kOther);
        unmeasured_ = x < rules_.flat ? 0 : unmeasured_ + 1;
        return predicted * first;
    }

    //! Learn from one draft, timed by itself; return the time that was predicted for it.
    double observeDraft(double draft, double measured) {
        double const predicted = factors_[2], taken = believable(measured / draft, predicted, 1.0);
        if (!draft_met_) {
            draft_met_ = true;
            addDoubt(rules_.draft_bound, {0.0, 0.0, factors_[2]});
        }
        update({0.0, 0.0, 1.0}, taken - predicted, noiseOf(predicted));
        return predicted * draft;
    }

    //! Learn from a round with drafts of which only the whole was timed; return the time predicted for it.
    double observeRound(double first, double more, double draft, double measured) {
        double const x = more / first, d = draft / first;
        double const predicted = factors_[0] + factors_[1] * x + factors_[2] * d;
        double const taken = believable(measured / first, predicted, 1.0 + x + d);
        passRound();
        rounds_.add(rules_.memory, x, d);
        // Tokens and drafts are not told from each other, only from the base: by the mean of what both add to it.
        learn({1.0, rounds_.meanMore(), rounds_.meanDraft()}, taken, predicted, kWhole);
        ++unmeasured_;
        return predicted * first;
    }

    //! Count a round with drafts that could not be timed.
    void observeUntimed() { ++unmeasured_; }

private:
    //! Rounds that are told from each other: without drafts, with drafts and timed whole, any other.
    enum Kind { kPlain, kWhole, kOther };
    //! Changes between them in a row that lie far off on one side before the ratio is doubted anew.
    static constexpr int kChanges = 3;
    //! Of base, marginal cost and drafting.
    using Vector = std::array<double, 3>;

    //! Rounds with drafts: their number, and what the table adds to a pass over one token a request, in such passes.
    struct Rounds {
        double count, more, draft;

        void add(double memory, double x, double d) {
            count = memory * count + 1.0;
            more = memory * more + x;
            draft = memory * draft + d;
        }
        double meanMore() const { return more / count; }
        double meanDraft() const { return draft / count; }
    };

    //! A time that was not interrupted; one up to where a correction of 1 reaches its bound.
    double believable(double measured, double predicted, double table) const {
        return std::min(rules_.outlier * std::max(predicted, table), measured);
    }

    static double bounded(double factor, double middle, double bound) {
        return std::min(bound * middle, std::max(middle / bound, factor));
    }

    static double dot(Vector const& a, Vector const& b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

    //! The covariance times a vector.
    Vector doubtOf(Vector const& parts) const {
        return {dot(doubt_[0], parts), dot(doubt_[1], parts), dot(doubt_[2], parts)};
    }

    //! Expect the factors to have moved along `direction`, either way.
    void addDoubt(double deviation, Vector const& direction) {
        for (size_t i = 0; i < 3; ++i) {
            for (size_t j = 0; j < 3; ++j) doubt_[i][j] += deviation * deviation * direction[i] * direction[j];
        }
    }

    //! Whether forgetting may still make the ratio of a factor to the base more doubtful.
    bool fades(size_t factor) const {
        double const other = factors_[factor], base = factors_[0];
        double const variance = doubt_[factor][factor] / (other * other) - 2.0 * doubt_[0][factor] / (base * other) +
                                doubt_[0][0] / (base * base);
        return variance < rules_.doubt * rules_.doubt;
    }

    //! Forget a little, as one round has passed.
    void passRound() {
        addDoubt(rules_.common, factors_);
        Vector tokens = {}, drafts = {};
        if (fades(1)) tokens[1] = factors_[1];
        if (fades(2)) drafts[2] = factors_[2];
        if (rounds_.count > 0.0) {
            // What is only seen together is doubted together.
            addDoubt(rules_.ratio, {0.0, tokens[1], drafts[2]});
        } else {
            addDoubt(rules_.ratio, tokens);
            addDoubt(rules_.ratio, drafts);
        }
    }

    double noiseOf(double predicted) const { return rules_.noise * predicted; }

    double varianceOf(Vector const& parts, double noise) const { return dot(parts, doubtOf(parts)) + noise * noise; }

    //! What a whole round is expected to take beyond a plain one.
    double extra() const { return factors_[1] * rounds_.meanMore() + factors_[2] * rounds_.meanDraft(); }

    //! Doubt by what factor that is so, but not what a round of the other kind than `kind` takes.
    void doubtContrast(Kind kind, double deviation) {
        addDoubt(deviation, {kind == kPlain ? -extra() : 0.0, factors_[1], factors_[2]});
    }

    //! Learn from a round, of which the factors times `parts` were expected to take `predicted`.
    void learn(Vector const& parts, double taken, double predicted, Kind kind) {
        double const noise = noiseOf(std::max(predicted, factors_[0])), off = taken - predicted;
        bool const contrast = kind != kOther && kind_ != kOther && kind != kind_;
        if (contrast && !contrast_met_) {
            contrast_met_ = true;
            doubtContrast(kind, rules_.draft_bound);
        }
        bool const far = std::fabs(off) > rules_.surprise * std::sqrt(varianceOf(parts, noise));
        int const side = !far ? 0 : off > 0.0 ? 1 : -1;
        // One such round was interrupted. After two the machine is another one for all that runs on it.
        if (side != 0 && side == side_) addDoubt(off / predicted, factors_);
        side_ = side;
        if (contrast) {
            // What was far off again and again when drafts began, or ended, is what they add.
            int& times = changes_[kind];
            times = side * times > 0 ? times + side : side;
            if (std::abs(times) >= kChanges) doubtContrast(kind, off / extra());
        }
        kind_ = kind;
        update(parts, off, noise);
    }

    //! The filter's step for a time that lay `off` its prediction.
    void update(Vector const& parts, double off, double noise) {
        Vector const shared = doubtOf(parts);
        double const variance = varianceOf(parts, noise), most = rules_.surprise * std::sqrt(variance);
        double const step = std::min(most, std::max(-most, off)) / variance;
        for (size_t i = 0; i < 3; ++i) {
            factors_[i] += shared[i] * step;
            for (size_t j = 0; j < 3; ++j) doubt_[i][j] -= shared[i] * shared[j] / variance;
        }
        bound();
    }

    void bound() {
        double const base = bounded(factors_[0], 1.0, rules_.base_bound);
        double const marginal = bounded(factors_[1], base, rules_.marginal_bound);
        double draft = factors_[2];
        // Of whole rounds drafts took what tokens cannot have taken.
        if (rounds_.count > 0.0) draft += (factors_[1] - marginal) * rounds_.more / rounds_.draft;
        factors_ = {base, marginal, bounded(draft, base, rules_.draft_bound)};
    }

    DriftRules rules_;
    Vector factors_ = {1.0, 1.0, 1.0};
    std::array<Vector, 3> doubt_ = {};  // covariance of the factors
    Rounds passes_ = {}, rounds_ = {};
    bool tokens_met_ = false, draft_met_ = false, contrast_met_ = false;
    Kind kind_ = kOther;               // of the last round
    int side_ = 0;                     // where it lay if far off its prediction: 1 above, -1 below
    std::array<int, 2> changes_ = {};  // changes to a kind in a row that lay so, times the side
    int64_t unmeasured_ = 0;
};

}  // namespace dspark::host
