//! Confidence, survival, schedule and packing of one round: what to verify, and the rows of the verify pass.
//! Source: DSpark paper, equation 7, Algorithm 1 and section 5.2.
#pragma once

#include "launch_status.h"

#include "dspark/hd.h"

namespace dspark {

//! Two launches: confidences by half a warp each, everything else by one block.
//!
//! Exactness: every output has the bits of confidenceOf, schedulePrefixes, verifyBudget and packTokens with SerialTeam.
//! A table too short for R + extra tokens + admissible drafts counts as missing: all drafts up to cap and budget are
//! verified, and the report says so.
//! Rows that are not live have cap 0. They run, so each costs a token, but emit nothing: throughput counts live rows.
struct ConfidenceScheduleParams {
    int32_t num_requests;   // R
    int32_t draft_len;      // gamma
    int32_t hidden_size;    // d
    int32_t num_rows;       // T_pad of the packed outputs, at least R * (gamma + 1)
    int32_t table_len;      // entries of step_time_us
    int32_t mode;           // ScheduleMode: 0 fixed, 1 threshold, 2 early_stop, 3 stale_topk
    ElementType hidden_type;
    void const* hidden;              // [R, gamma, d]
    float const* hidden_weight;      // [d], or null without a confidence head (then mode must be fixed)
    float const* markov_table;       // [V] w_m . W1[v], or null without the Markov half
    float const* confidence_bias;    // [1] or null
    float const* inv_temperature;    // [gamma] or null = 1
    float const* position_bias;      // [gamma] or null = 0
    int32_t const* anchors;          // [R]
    int32_t const* positions;        // [R]
    int32_t const* draft_tokens;     // [R, gamma] target ids, -1 = no draft
    int32_t const* caps;             // [R] most draft tokens of each request, or null = gamma
    int32_t const* live;             // [R] of round_caps: 0 = a row that emits nothing, or null = all emit
    int32_t const* limits;           // [4] draft_len (fixed), budget (stale_topk), token_budget (-1 = none), extra_tokens
    float const* thresholds;         // [R] threshold of each request in mode threshold, or null = terms[0] for all
    float const* terms;              // [3] threshold, load_scale, fixed_time_us
    float const* step_time_us;       // [table_len] entry B = microseconds of a pass over B tokens; null = missing
    float* confidence;               // [R, gamma]
    int32_t* survival;               // [R, gamma] bits of Q0.31; zeros in fixed mode
    int32_t* verify_len;             // [R]
    int32_t* cu_tokens;              // [R + 1]
    int32_t* token_ids;              // [T_pad], padding 0
    int32_t* token_request;          // [T_pad], padding -1
    int32_t* token_position;         // [T_pad], padding -1
    int32_t* report;                 // [4] ScheduleWarning bits, candidates, T, budget for two rounds later (stale_topk)
    void* workspace;                 // confidenceScheduleWorkspaceBytes(R, gamma)
};

inline int64_t confidenceScheduleWorkspaceBytes(int64_t num_requests, int64_t draft_len) {
    return num_requests * draft_len * 8 + 16;
}

LaunchStatus launchConfidenceSchedule(ConfidenceScheduleParams const& params, cudaStream_t stream) noexcept;

}  // namespace dspark
