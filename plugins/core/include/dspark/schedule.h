#pragma once
//! How many draft tokens of each request to verify (docs/core_numerics.md, section 8).
//! Source: DSpark paper, Algorithm 1 (early_stop) and section 5.2 (stale_topk).

#include "dspark/admission.h"
#include "dspark/row.h"

namespace dspark {

enum class ScheduleMode : int32_t { kFixed = 0, kThreshold = 1, kEarlyStop = 2, kStaleTopK = 3 };

enum ScheduleWarning : uint32_t {
    kMissingCostTable = 1u << 0,
    kBadCostTable = 1u << 1,
    kFlatCostTable = 1u << 2,
    kNanConfidence = 1u << 3,
    kConfidenceOutOfRange = 1u << 4,
};

//! Microseconds of a verify pass over B tokens, and how they count.
struct CostModel {
    float const* step_time_us;  // entry B, up to base_tokens + admissible drafts; null = missing
    int64_t base_tokens;        // B0 = R + rows of others
    double load_scale;          // on the marginal cost
    double fixed_time_us;       // part of the round that does not depend on the choice
};

struct ScheduleInput {
    ScheduleMode mode;
    int32_t num_requests;  // R
    int32_t draft_stride;  // gamma
    int32_t draft_len;     // fixed
    double threshold;      // threshold
    float const* thresholds;  // [R] threshold of each request, above 1 = no draft; null = threshold for all
    int64_t budget;        // stale_topk
    int64_t token_budget;  // every mode; negative = none
    float const* confidence;  // [R, gamma], null only for fixed
    int32_t const* caps;      // [R] or null = gamma
    int32_t const* live;      // [R] 0 = a row that costs a token and emits none, cap 0; null = all emit
    CostModel cost;
};

//! Shared by the team; every array has R * gamma entries.
struct ScheduleWorkspace {
    uint32_t* survival;
    uint32_t* order;    // flat indices in admission order
    uint32_t* rank_of;  // admission rank of a flat index, or kNoRank
    uint32_t* temp;
};

struct ScheduleOutput {
    int32_t* verify_len;  // [R]
    uint32_t warnings;
    int64_t num_candidates;
};

DSPARK_HD inline int capOf(ScheduleInput const& in, int request) {
    return in.caps ? minOf(in.caps[request], in.draft_stride) : in.draft_stride;
}

//! A confidence as schedules count it; adds warning bits.
DSPARK_HD inline float countedConfidence(float c, uint32_t* warnings) {
    if (isNan(c)) {
        *warnings |= kNanConfidence;
        return 0.0f;
    }
    if (c >= 0.0f && c <= 1.0f) return c;
    *warnings |= kConfidenceOutOfRange;
    return c < 0.0f ? 0.0f : 1.0f;
}

//! A survival in Q0.31.
DSPARK_HD inline uint32_t survivalBits(float product) {
    return static_cast<uint32_t>(roundU64(mulRn(product, 2147483648.0f)));
}

//! Survivals in Q0.31 of one request; returns warning bits.
DSPARK_HD inline uint32_t survivalOf(ScheduleInput const& in, int request, uint32_t* survival) {
    int64_t const at = static_cast<int64_t>(request) * in.draft_stride;
    int const cap = capOf(in, request);
    uint32_t warnings = 0;
    float product = 1.0f;
    for (int step = 0; step < in.draft_stride; ++step) {
        product = mulRn(product, step < cap ? countedConfidence(in.confidence[at + step], &warnings) : 0.0f);
        survival[at + step] = survivalBits(product);
    }
    return warnings;
}

DSPARK_HD inline double stepTime(CostModel const& cost, int64_t admitted) {
    double const base = static_cast<double>(cost.step_time_us[cost.base_tokens]);
    double const marginal = subRn(static_cast<double>(cost.step_time_us[cost.base_tokens + admitted]), base);
    return addRn(cost.fixed_time_us, addRn(base, mulRn(cost.load_scale, marginal)));
}

DSPARK_HD inline double throughput(CostModel const& cost, uint64_t tau, int64_t admitted) {
    return divRn(static_cast<double>(tau), stepTime(cost, admitted));
}

//! Tokens emitted whatever is verified, in units of a survival: one a request.
DSPARK_TEAM template <class Team>
DSPARK_HD uint64_t baseTau(Team const& team, ScheduleInput const& in) {
    if (!in.live) return static_cast<uint64_t>(in.num_requests) << 31;
    uint64_t count = 0;
    for (int request = team.rank(); request < in.num_requests; request += team.size()) {
        count += in.live[request] != 0 ? 1 : 0;
    }
    return team.addU64(count) << 31;
}

//! Most draft tokens that caps and token_budget admit; the cost table must reach base_tokens + this.
DSPARK_TEAM template <class Team>
DSPARK_HD int64_t admissible(Team const& team, ScheduleInput const& in) {
    uint64_t sum = 0;
    for (int request = team.rank(); request < in.num_requests; request += team.size()) {
        sum += static_cast<uint64_t>(capOf(in, request));
    }
    int64_t const all = static_cast<int64_t>(team.addU64(sum));
    return in.token_budget < 0 ? all : minOf(all, in.token_budget);
}

//! Warning bits of the cost table over the entries a schedule may read.
DSPARK_TEAM template <class Team>
DSPARK_HD uint32_t inspectCost(Team const& team, CostModel const& cost, int64_t most) {
    if (!cost.step_time_us) return kMissingCostTable;
    uint64_t bad = 0, rises = 0;
    double const first = stepTime(cost, 0);
    for (int64_t n = team.rank(); n <= most; n += team.size()) {
        double const time = stepTime(cost, n);
        if (!(time > 0.0) || !(time < 1e300)) bad = 1;
        if (time != first) rises = 1;
    }
    bad = team.maxU64(bad);
    rises = team.maxU64(rises);
    return bad ? kBadCostTable : (rises || most == 0) ? 0u : kFlatCostTable;
}

//! Algorithm 1: number of candidates admitted before the first one that does not improve throughput.
DSPARK_TEAM template <class Team>
DSPARK_HD int64_t earlyStop(Team const& team, CostModel const& cost, uint64_t base_tau, uint32_t const* order,
                            uint32_t const* survival, int64_t most) {
    Span const span = chunkOf(team, static_cast<int>(most));
    uint64_t sum = 0, total = 0;
    for (int n = span.begin; n < span.end; ++n) sum += survival[order[n]];
    uint64_t tau = base_tau + team.exclusiveAddU64(sum, &total);
    uint64_t stop = 0;  // complement of the first failing index, so that the maximum is the smallest index
    if (span.begin < span.end) {
        double best = throughput(cost, tau, span.begin);
        for (int n = span.begin; n < span.end; ++n) {
            tau += survival[order[n]];
            double const theta = throughput(cost, tau, n + 1);
            if (!(theta > best)) {
                stop = ~static_cast<uint64_t>(n);
                break;
            }
            best = theta;
        }
    }
    stop = team.maxU64(stop);
    return stop == 0 ? most : static_cast<int64_t>(~stop);
}

//! Smallest prefix length that maximises throughput over all prefixes of the admission order.
DSPARK_TEAM template <class Team>
DSPARK_HD int64_t bestPrefix(Team const& team, CostModel const& cost, uint64_t base_tau, uint32_t const* order,
                             uint32_t const* survival, int64_t most) {
    Span const span = chunkOf(team, static_cast<int>(most));
    uint64_t sum = 0, total = 0;
    for (int n = span.begin; n < span.end; ++n) sum += survival[order[n]];
    uint64_t tau = base_tau + team.exclusiveAddU64(sum, &total);
    double best = team.rank() == 0 ? throughput(cost, tau, 0) : 0.0;
    int64_t best_n = 0;
    for (int n = span.begin; n < span.end; ++n) {
        tau += survival[order[n]];
        double const theta = throughput(cost, tau, n + 1);
        if (theta > best) {
            best = theta;
            best_n = n + 1;
        }
    }
    uint64_t const team_best = team.maxU64(doubleBits(best));  // throughput >= 0: its bits order it
    uint64_t const mine = doubleBits(best) == team_best ? ~static_cast<uint64_t>(best_n) : 0;
    return static_cast<int64_t>(~team.maxU64(mine));
}

//! Cut verify_len to `limit` draft tokens in (step, request) order: a rule that reads no token value.
DSPARK_TEAM template <class Team, class Length>
DSPARK_HD void cutToBudget(Team const& team, int num_requests, int draft_stride, int64_t limit, Length* verify_len) {
    team.sync();  // verify_len complete
    if (limit >= 0 && team.rank() == 0) {
        int64_t left = limit;
        for (int step = 0; step < draft_stride; ++step) {
            for (int request = 0; request < num_requests; ++request) {
                if (verify_len[request] <= step) continue;
                if (left > 0) {
                    --left;
                } else {
                    verify_len[request] = step;
                }
            }
        }
    }
    team.sync();  // verify_len visible to all ranks
}

//! Survival in Q0.31 that a draft needs under a threshold.
DSPARK_HD inline uint32_t floorOf(double threshold) {
    // NaN, negative and huge values from outside end up at a bound.
    double const bounded = threshold >= 0.0 ? minOf(threshold, 1.5) : 0.0;
    return static_cast<uint32_t>(roundI64(mulRn(bounded, 2147483648.0)));
}

//! Longest prefix of one request's drafts whose survivals reach `floor`: mode threshold without its workspace.
DSPARK_HD inline int prefixAbove(float const* confidence, int cap, uint32_t floor) {
    float product = 1.0f;
    uint32_t warnings = 0;
    for (int step = 0; step < cap; ++step) {
        product = mulRn(product, countedConfidence(confidence[step], &warnings));
        uint32_t const survival = survivalBits(product);
        if (survival < floor || survival == 0) return step;
    }
    return cap;
}

//! Longest prefix of each request whose survivals reach its threshold.
DSPARK_TEAM template <class Team>
DSPARK_HD void prefixAbove(Team const& team, ScheduleInput const& in, uint32_t const* survival,
                           int32_t* verify_len) {
    for (int request = team.rank(); request < in.num_requests; request += team.size()) {
        uint32_t const* const row = survival + static_cast<int64_t>(request) * in.draft_stride;
        uint32_t const floor = floorOf(in.thresholds ? static_cast<double>(in.thresholds[request]) : in.threshold);
        int len = 0;
        while (len < in.draft_stride && row[len] >= floor && row[len] > 0) ++len;
        verify_len[request] = len;
    }
}

DSPARK_TEAM template <class Team>
DSPARK_HD void fixedLen(Team const& team, ScheduleInput const& in, int draft_len, int32_t* verify_len) {
    for (int request = team.rank(); request < in.num_requests; request += team.size()) {
        verify_len[request] = minOf(draft_len, capOf(in, request));
    }
}

//! Survivals of all requests; returns warning bits and the number of candidates.
DSPARK_TEAM template <class Team>
DSPARK_HD uint32_t survivals(Team const& team, ScheduleInput const& in, uint32_t* survival, int64_t* candidates) {
    uint32_t warnings = 0;
    uint64_t positive = 0;
    for (int request = team.rank(); request < in.num_requests; request += team.size()) {
        warnings |= survivalOf(in, request, survival);
        uint32_t const* const row = survival + static_cast<int64_t>(request) * in.draft_stride;
        for (int step = 0; step < in.draft_stride && row[step] > 0; ++step) ++positive;
    }
    *candidates = static_cast<int64_t>(team.addU64(positive));
    uint64_t const nan = team.maxU64(warnings & kNanConfidence);
    uint64_t const range = team.maxU64(warnings & kConfidenceOutOfRange);
    return static_cast<uint32_t>(nan | range);  // the reductions made survival visible to all ranks
}

//! Global search over stale confidences: how many draft tokens a later round should verify.
DSPARK_TEAM template <class Team>
DSPARK_HD int64_t verifyBudget(Team const& team, ScheduleInput const& in, ScheduleWorkspace const& ws,
                               uint32_t* warnings) {
    int64_t const limit = admissible(team, in);
    int64_t candidates = 0;
    *warnings = survivals(team, in, ws.survival, &candidates) | inspectCost(team, in.cost, limit);
    if (*warnings & (kMissingCostTable | kBadCostTable)) return limit;
    admissionOrder(team, in.num_requests, in.draft_stride, ws.survival, ws.order, ws.rank_of, ws.temp);
    return bestPrefix(team, in.cost, baseTau(team, in), ws.order, ws.survival, minOf(candidates, limit));
}

DSPARK_TEAM template <class Team>
DSPARK_HD void schedulePrefixes(Team const& team, ScheduleInput const& in, ScheduleWorkspace const& ws,
                                ScheduleOutput* out) {
    int64_t const limit = admissible(team, in);
    if (team.rank() == 0) {
        out->warnings = 0;
        out->num_candidates = 0;
    }
    if (in.mode == ScheduleMode::kFixed) {
        fixedLen(team, in, in.draft_len, out->verify_len);
        return cutToBudget(team, in.num_requests, in.draft_stride, in.token_budget, out->verify_len);
    }
    int64_t candidates = 0;
    uint32_t warnings = survivals(team, in, ws.survival, &candidates);
    if (in.mode == ScheduleMode::kEarlyStop) warnings |= inspectCost(team, in.cost, limit);
    if (team.rank() == 0) {
        out->warnings = warnings;
        out->num_candidates = candidates;
    }
    if (in.mode == ScheduleMode::kThreshold) {
        prefixAbove(team, in, ws.survival, out->verify_len);
        return cutToBudget(team, in.num_requests, in.draft_stride, in.token_budget, out->verify_len);
    }
    if (warnings & (kMissingCostTable | kBadCostTable)) {
        fixedLen(team, in, in.draft_stride, out->verify_len);
        return cutToBudget(team, in.num_requests, in.draft_stride, in.token_budget, out->verify_len);
    }
    admissionOrder(team, in.num_requests, in.draft_stride, ws.survival, ws.order, ws.rank_of, ws.temp);
    int64_t const most = minOf(candidates, limit);
    int64_t const admitted = in.mode == ScheduleMode::kStaleTopK
                                 ? minOf(most, in.budget)
                                 : earlyStop(team, in.cost, baseTau(team, in), ws.order, ws.survival, most);
    for (int request = team.rank(); request < in.num_requests; request += team.size()) {
        uint32_t const* const rank_of = ws.rank_of + static_cast<int64_t>(request) * in.draft_stride;
        int len = 0;
        while (len < in.draft_stride && static_cast<int64_t>(rank_of[len]) < admitted) ++len;
        out->verify_len[request] = len;
    }
    team.sync();  // verify_len visible to all ranks
}

}  // namespace dspark
