#pragma once

#include "confidence_schedule.h"

#include "teams.cuh"

#include "dspark/pack.h"
#include "dspark/schedule.h"

namespace dspark {

constexpr int kConfidenceThreads = 128;
constexpr int kScheduleThreads = 512;

//! confidenceOf of the core, half a warp a draft token.
static __global__ void __launch_bounds__(kConfidenceThreads, 1) confidenceKernel(ConfidenceScheduleParams const p) {
    int64_t const at = static_cast<int64_t>(blockIdx.x) * (kConfidenceThreads / 16) + (threadIdx.x >> 4);
    if (at >= static_cast<int64_t>(p.num_requests) * p.draft_len) return;  // whole half warps
    int const request = static_cast<int>(at / p.draft_len), step = static_cast<int>(at % p.draft_len);
    LogitRow const hidden = logitRow(p.hidden, p.hidden_type, at, p.hidden_size);
    float z = halfWarpDot(p.hidden_weight, hidden, p.hidden_size);
    if ((threadIdx.x & 15) != 0) return;
    float confidence = 0.0f;
    if (p.draft_tokens[at] >= 0) {
        int const previous = step == 0 ? p.anchors[request] : p.draft_tokens[at - 1];
        if (p.markov_table) z = addRn(z, p.markov_table[previous]);
        z = addRn(z, p.confidence_bias ? p.confidence_bias[0] : 0.0f);
        float const scale = p.inv_temperature ? p.inv_temperature[step] : 1.0f;
        confidence = sigmoidExact(addRn(mulRn(z, scale), p.position_bias ? p.position_bias[step] : 0.0f));
    }
    p.confidence[at] = confidence;
}

//! Survival, schedule and packing in one block.
static __global__ void __launch_bounds__(kScheduleThreads, 1) scheduleKernel(ConfidenceScheduleParams const p) {
    BlockTeam const team = blockTeam();
    int64_t const count = static_cast<int64_t>(p.num_requests) * p.draft_len;
    uint32_t* const order = static_cast<uint32_t*>(p.workspace);
    ScheduleWorkspace const ws = {reinterpret_cast<uint32_t*>(p.survival), order, order + count, nullptr};
    ScheduleInput in = {};
    in.mode = static_cast<ScheduleMode>(p.mode);
    in.num_requests = p.num_requests;
    in.draft_stride = p.draft_len;
    in.draft_len = p.limits[0];
    in.budget = p.limits[1];
    in.token_budget = p.limits[2];
    in.threshold = static_cast<double>(p.terms[0]);
    in.thresholds = p.thresholds;
    in.confidence = p.confidence;
    in.caps = p.caps;
    in.live = p.live;
    in.cost.base_tokens = static_cast<int64_t>(p.num_requests) + p.limits[3];
    in.cost.load_scale = static_cast<double>(p.terms[1]);
    in.cost.fixed_time_us = static_cast<double>(p.terms[2]);
    bool const covered = in.cost.base_tokens + admissible(team, in) < p.table_len;
    in.cost.step_time_us = covered ? p.step_time_us : nullptr;
    if (in.mode == ScheduleMode::kFixed) {
        for (int64_t at = team.rank(); at < count; at += team.size()) p.survival[at] = 0;
    }
    ScheduleOutput out = {p.verify_len, 0, 0};
    schedulePrefixes(team, in, ws, &out);
    int64_t budget = 0;
    uint32_t warnings = out.warnings;
    if (in.mode == ScheduleMode::kStaleTopK) {
        team.sync();  // order and rank_of are read before they are written again
        uint32_t budget_warnings = 0;
        budget = verifyBudget(team, in, ws, &budget_warnings);
        warnings |= budget_warnings;
    }
    PackInput<int32_t> const rows = {p.num_requests, p.draft_len,  p.num_rows,  p.anchors,
                                     p.draft_tokens, p.verify_len, p.positions};
    packTokens(team, rows, PackOutput<int32_t>{p.cu_tokens, p.token_ids, p.token_request, p.token_position});
    if (team.rank() == 0) {
        p.report[0] = static_cast<int32_t>(warnings);
        p.report[1] = static_cast<int32_t>(out.num_candidates);
        p.report[2] = p.cu_tokens[p.num_requests];
        p.report[3] = static_cast<int32_t>(budget);
    }
}

}  // namespace dspark
