#pragma once
//! What verifying drafts would have gained, request by request, from the blocks of past rounds (docs/adaptive.md).
//!
//! Requests are rows of contiguous arrays in double precision. Arguments are checked by the caller.

#include <algorithm>
#include <vector>

#include "dspark/draft.h"

namespace dspark::host {

constexpr int kMaxThresholds = 64;

//! How long blocks are remembered, and what stands in for them in a new request.
struct BlockRules {
    double memory;            // weight of a block after one more of its request
    double pool_memory;       // of a round in the mean of all requests after one more
    double prior_blocks;      // blocks that this mean counts for in a new request; they fade as its own come in
    double ratio_memory;      // weight of a block's outcome after one more block of its request was verified
    double ratio_prior;       // drafts that count as right as promised
    double pool_drafts;       // drafts that the outcomes of all count for in a new request; they fade likewise
    double max_ratio;         // bound on accepted over promised
    double hindsight_memory;  // weight of what was expected of a block, and of what it held, after one more
    double hindsight_prior;   // drafts a new request is taken to have expected
    double hindsight_found;   // share of those that were found
};

//! What became of the blocks of R requests with different rows.
struct RoundBlocks {
    int64_t num_requests;       // R
    int64_t const* rows;        // [R], -1 = the request has ended
    bool const* drafted;        // [R] or null = all
    float const* confidence;    // [R, gamma]
    int64_t const* verify_len;  // [R] 0..gamma
    int64_t const* accepted;    // [R], -1 = its logits were refused
};

//! A pass over 1..gamma + 1 tokens of each of R requests, and the draft before it.
//!
//! A pass over T tokens takes base * curve[R] + marginal * (curve[T] - curve[R]).
struct BatchCosts {
    int64_t num_requests;   // R
    float const* curve_us;  // [R * (gamma + 1) + 1] microseconds of a pass over T tokens, as measured once
    float base;
    float marginal;
    double draft_us;  // of one draft for all
};

//! Means over the requests that may draft; NaN where none may.
struct BatchMeans {
    double gain;
    double threshold;  // at most 1 of each request
};

//! What speculating is expected to bring a request.
struct Worth {
    double gain;          // predicted rate over that of plain decoding, minus 1
    double extra_tokens;  // tokens that drafts add
    double more_us;       // microseconds that verifying them takes, as one request's part
};

class BlockStatistics {
public:
    BlockStatistics(int gamma, std::vector<float> thresholds, BlockRules const& rules)
        : gamma_(gamma), thresholds_(std::move(thresholds)), rules_(rules) {
        pool_.resize(cells());
        round_.resize(cells());
    }

    int gamma() const { return gamma_; }
    int64_t numRows() const { return static_cast<int64_t>(weight_.size()); }
    //! Whether no block was seen yet.
    bool empty() const { return pool_weight_ == 0.0; }
    //! How many blocks of a request count, old ones less.
    double blocks(int64_t row) const { return weight_[static_cast<size_t>(row)]; }
    //! Whether a request was evaluated since its row was reset.
    bool evaluated(int64_t row) const { return expected_[static_cast<size_t>(row)].evaluated; }
    //! What speculating is worth to a request that was evaluated, as found the last time.
    Worth const& worth(int64_t row) const { return worth_[static_cast<size_t>(row)]; }
    //! Drafts accepted over drafts promised by all requests, recently.
    double acceptedRatio() const {
        return std::min(rules_.max_ratio, (kept_ + rules_.ratio_prior) / (promised_ + rules_.ratio_prior));
    }

    //! Make a row that of a request of which nothing is known; `row` is at most numRows().
    void reset(int64_t row) {
        size_t const at = static_cast<size_t>(row);
        if (row == numRows()) {
            sums_.resize(sums_.size() + cells());
            weight_.push_back(0.0);
            outcomes_.push_back({});
            hindsight_.push_back({});
            expected_.push_back({});
            worth_.push_back({});
        }
        std::fill_n(sums_.begin() + static_cast<std::ptrdiff_t>(at * cells()), cells(), 0.0);
        weight_[at] = 0.0;
        outcomes_[at] = {0.0, 0.0, 1.0};
        double const found = rules_.hindsight_prior * rules_.hindsight_found;
        hindsight_[at] = {rules_.hindsight_prior, rules_.hindsight_prior, found, found};
        expected_[at] = {false, 0.0, 0.0, 0.0};
        worth_[at] = {};
    }

    //! Learn the blocks of a round: compare each with what was expected of it, then keep it; return how many.
    int64_t add(RoundBlocks const& round) {
        std::fill(round_.begin(), round_.end(), 0.0);
        double promised_of_all = 0.0, kept_of_all = 0.0;
        int64_t count = 0;
        for (int64_t i = 0; i < round.num_requests; ++i) {
            if (round.rows[i] < 0 || round.accepted[i] < 0 || (round.drafted && !round.drafted[i])) continue;
            ++count;
            size_t const row = static_cast<size_t>(round.rows[i]);
            float survival[kMaxDraftLen];
            double sums[kMaxDraftLen + 1];  // survivors of the first drafts
            survivals(round.confidence + i * gamma_, survival, sums);
            lookBack(row, survival);
            keep(row, survival, sums);
            double const promised = sums[round.verify_len[i]], kept = static_cast<double>(round.accepted[i]);
            promised_of_all += promised;
            kept_of_all += kept;
            if (round.verify_len[i] > 0) {
                Outcome* const outcome = &outcomes_[row];
                outcome->promised = rules_.ratio_memory * outcome->promised + promised;
                outcome->accepted = rules_.ratio_memory * outcome->accepted + kept;
                outcome->pool *= rules_.memory;
            }
        }
        if (count == 0) return 0;
        for (size_t cell = 0; cell < pool_.size(); ++cell) {
            pool_[cell] = rules_.pool_memory * pool_[cell] + round_[cell] / static_cast<double>(count);
        }
        pool_weight_ = rules_.pool_memory * pool_weight_ + 1.0;
        promised_ = rules_.ratio_memory * promised_ + promised_of_all;
        kept_ = rules_.ratio_memory * kept_ + kept_of_all;
        return count;
    }

    //! Choose the threshold of every row of a batch as if all were like it, and find what that is worth.
    //!
    //! caps [R]: drafts of each that may be verified; those without any do not enter the means. Not while empty.
    BatchMeans evaluate(int64_t const* rows, int64_t const* caps, BatchCosts const& costs) {
        PassTimes const times(costs, gamma_, &curve_);
        for (size_t cell = 0; cell < pool_.size(); ++cell) round_[cell] = pool_[cell] / pool_weight_;
        double const pool_ratio = acceptedRatio();
        double gain = 0.0, threshold = 0.0;
        int64_t able = 0;
        for (int64_t i = 0; i < costs.num_requests; ++i) {
            size_t const row = static_cast<size_t>(rows[i]);
            choose(row, times, pool_ratio);
            if (caps[i] <= 0) continue;
            ++able;
            gain += worth_[row].gain;
            threshold += std::min(1.0, expected_[row].threshold);
        }
        return {gain / static_cast<double>(able), threshold / static_cast<double>(able)};
    }

    //! Survival that a draft of the next block of a request needs; `unknown` where it was not evaluated yet.
    float threshold(int64_t row, float unknown) const {
        Expected const& expected = expected_[static_cast<size_t>(row)];
        return expected.evaluated ? static_cast<float>(expected.threshold) : unknown;
    }

private:
    struct Outcome {
        double promised, accepted;
        double pool;  // what is left of the weight of all requests' ratio
    };
    struct Hindsight {
        double expected_survivors, expected_drafts, found_survivors, found_drafts;
    };
    //! What is expected of the next block of a request.
    struct Expected {
        bool evaluated;
        double threshold, survivors, drafts;
    };

    //! Times of the passes a batch may run.
    struct PassTimes {
        int64_t count;
        double const* curve;
        int64_t last;     // index of the last entry
        double part;      // 1 / R
        double plain_us;  // one token of each, the whole pass
        double least_us;  // that and the draft, as one request's part
        double added[kMaxDraftLen + 1];  // what k more tokens of each add, as one request's part

        //! `storage` gets the curve.
        PassTimes(BatchCosts const& costs, int gamma, std::vector<double>* storage)
            : count(costs.num_requests), last(count * (gamma + 1)), part(1.0 / static_cast<double>(count)) {
            storage->resize(static_cast<size_t>(last + 1));
            float const plain = costs.base * costs.curve_us[count];
            for (int64_t tokens = 0; tokens <= last; ++tokens) {
                float const more = costs.marginal * (costs.curve_us[tokens] - costs.curve_us[count]);
                (*storage)[static_cast<size_t>(tokens)] = static_cast<double>(plain + more);
            }
            curve = storage->data();
            plain_us = curve[count];
            least_us = (costs.draft_us + plain_us) * part;
            for (int more = 0; more <= gamma; ++more) added[more] = (curve[count * (more + 1)] - plain_us) * part;
        }

        //! What many alike add whose mean is `drafts`, as one request's part.
        double together(double drafts) const {
            double const tokens = static_cast<double>(count) * (1.0 + drafts);
            double us = curve[last];
            if (tokens < static_cast<double>(last)) {
                int64_t const below = static_cast<int64_t>(tokens);
                us = (curve[below + 1] - curve[below]) * (tokens - static_cast<double>(below)) + curve[below];
            }
            return (us - plain_us) * part;
        }
    };

    size_t width() const { return thresholds_.size(); }
    //! By verify length 0..gamma, and behind them for the survivors: one number a threshold.
    size_t cells() const { return static_cast<size_t>(gamma_ + 2) * width(); }

    //! Running products of confidences, which fall; where the drafter gave no number nothing is promised.
    void survivals(float const* confidence, float* survival, double* sums) const {
        float product = 1.0f;
        sums[0] = 0.0;
        for (int step = 0; step < gamma_; ++step) {
            product *= confidence[step] > 0.0f ? confidence[step] : 0.0f;
            survival[step] = product;
            sums[step + 1] = sums[step] + static_cast<double>(product);
        }
    }

    //! The threshold was the best of several estimates: what the next block holds there is what the choice is worth.
    void lookBack(size_t row, float const* survival) {
        Expected const& expected = expected_[row];
        if (!expected.evaluated) return;
        double survivors = 0.0, drafts = 0.0;
        for (int step = 0; step < gamma_; ++step) {
            if (!(survival[step] >= static_cast<float>(expected.threshold))) continue;
            survivors += static_cast<double>(survival[step]);
            drafts += 1.0;
        }
        Hindsight* const past = &hindsight_[row];
        double const memory = rules_.hindsight_memory;
        past->expected_survivors = memory * past->expected_survivors + expected.survivors;
        past->expected_drafts = memory * past->expected_drafts + expected.drafts;
        past->found_survivors = memory * past->found_survivors + survivors;
        past->found_drafts = memory * past->found_drafts + drafts;
    }

    void keep(size_t row, float const* survival, double const* sums) {
        size_t const num = width();
        int32_t lengths[kMaxThresholds] = {};
        for (int step = 0; step < gamma_; ++step) {
            for (size_t c = 0; c < num; ++c) lengths[c] += survival[step] >= thresholds_[c];
        }
        double* const own = sums_.data() + row * cells();
        for (size_t cell = 0; cell < cells(); ++cell) own[cell] *= rules_.memory;
        size_t const survivors = static_cast<size_t>(gamma_ + 1) * num;
        for (size_t c = 0; c < num; ++c) {
            size_t const cell = static_cast<size_t>(lengths[c]) * num + c;
            own[cell] += 1.0;
            round_[cell] += 1.0;
            own[survivors + c] += sums[lengths[c]];
            round_[survivors + c] += sums[lengths[c]];
        }
        weight_[row] = rules_.memory * weight_[row] + 1.0;
    }

    //! Drafts accepted over drafts promised by a request, recently.
    double ratio(size_t row, double pool_ratio) const {
        Outcome const& own = outcomes_[row];
        double const pool = rules_.pool_drafts * own.pool;
        double const ratio = (own.accepted + rules_.ratio_prior + pool * pool_ratio) /
                             (own.promised + rules_.ratio_prior + pool);
        return std::min(rules_.max_ratio, ratio);
    }

    //! What was found of what was expected, at most 1.
    static double left(double found, double expected) { return expected > 0.0 ? std::min(1.0, found / expected) : 1.0; }

    //! What a request may expect under every threshold.
    struct Prospects {
        double drafts[kMaxThresholds];     // verified of a block
        double survivors[kMaxThresholds];  // of those
        double more_us[kMaxThresholds];    // that verifying them takes, as one request's part
        double rates[kMaxThresholds];      // tokens a microsecond
    };

    //! `pool` is the weight of what is known of all.
    void foresee(size_t row, double pool, double rho, PassTimes const& times, Prospects* out) const {
        size_t const num = width();
        double const *own = sums_.data() + row * cells(), *all = round_.data();
        std::fill_n(out->drafts, num, 0.0);
        std::fill_n(out->more_us, num, 0.0);
        for (int len = 0; len <= gamma_; ++len, own += num, all += num) {
            double const tokens = static_cast<double>(len), added = times.added[len];
            for (size_t c = 0; c < num; ++c) {
                double const share = own[c] + pool * all[c];
                out->drafts[c] += share * tokens;
                out->more_us[c] += share * added;
            }
        }
        double const norm = 1.0 / (weight_[row] + pool), among = 1.0 - times.part;
        double together[kMaxThresholds];
        for (size_t c = 0; c < num; ++c) {
            out->drafts[c] *= norm;
            out->survivors[c] = norm * (own[c] + pool * all[c]);
        }
        for (size_t c = 0; c < num; ++c) together[c] = times.together(out->drafts[c]);
        for (size_t c = 0; c < num; ++c) {
            // One request's lengths are what the pass gets; of many alike it gets their mean.
            out->more_us[c] = norm * out->more_us[c] * times.part + together[c] * among;
            out->rates[c] = (1.0 + rho * out->survivors[c]) / (times.least_us + out->more_us[c]);
        }
    }

    //! Set the threshold of a row, what is expected there and what that is worth.
    //!
    //! `round_` holds the mean of all requests, `pool_ratio` their ratio.
    void choose(size_t row, PassTimes const& times, double pool_ratio) {
        // What is left of the prior after as many own blocks.
        double const pool = rules_.prior_blocks * (1.0 - (1.0 - rules_.memory) * weight_[row]);
        double const rho = ratio(row, pool_ratio);
        Prospects found;
        foresee(row, pool, rho, times, &found);
        // From the last: of equal rates the one that verifies least. Between two thresholds that no confidence tells
        // apart only rounding differs, by the order of sums.
        size_t best = width() - 1;
        double best_rate = found.rates[best];
        for (size_t c = best; c-- > 0;) {
            bool const better = found.rates[c] > best_rate * (1.0 + kRounding);
            best = better ? c : best;
            best_rate = better ? found.rates[c] : best_rate;
        }
        double const survivors = found.survivors[best];
        expected_[row] = {true, static_cast<double>(thresholds_[best]), survivors, found.drafts[best]};
        Hindsight const& past = hindsight_[row];
        double const extra_tokens = left(past.found_survivors, past.expected_survivors) * rho * survivors;
        double const more_us = left(past.found_drafts, past.expected_drafts) * found.more_us[best];
        double const gain = (1.0 + extra_tokens) / (times.least_us + more_us) * times.plain_us * times.part - 1.0;
        worth_[row] = {gain, extra_tokens, more_us};
    }

    static constexpr double kRounding = 1e-9;

    int gamma_;
    std::vector<float> thresholds_;
    BlockRules rules_;
    std::vector<double> sums_;  // [rows, gamma + 2, C]
    std::vector<double> weight_;
    std::vector<Outcome> outcomes_;
    std::vector<Hindsight> hindsight_;
    std::vector<Expected> expected_;
    std::vector<Worth> worth_;
    std::vector<double> pool_;   // [gamma + 2, C]
    std::vector<double> round_;  // [gamma + 2, C] of one call
    std::vector<double> curve_;  // of one call
    double pool_weight_ = 0.0;
    double promised_ = 0.0, kept_ = 0.0;
};

}  // namespace dspark::host
