#include "ops.h"

#include "../kernels/confidence_schedule.h"

namespace trtllm_dspark {
namespace {

void checkFields(Attributes const& attributes) {
    if (attributes.integer("confidence_head") == 0 && attributes.integer("schedule_mode") != 0) {
        throw FieldError("field 'schedule_mode': expected 0 (fixed) without a confidence head, got " +
                         std::to_string(attributes.integer("schedule_mode")));
    }
    if (attributes.integer("confidence_head") == 0 && attributes.integer("markov_half") != 0) {
        throw FieldError("field 'markov_half': expected 0 without a confidence head, got 1");
    }
}

std::size_t workspaceBytes(Symbols const& sizes, Attributes const&) {
    return static_cast<std::size_t>(dspark::confidenceScheduleWorkspaceBytes(sizes["R"], sizes["gamma"]));
}

dspark::LaunchStatus launch(LaunchCall const& call, cudaStream_t stream) {
    dspark::ConfidenceScheduleParams params{};
    params.num_requests = call.size32("R");
    params.draft_len = call.size32("gamma");
    params.num_rows = params.num_requests * (params.draft_len + 1);
    params.table_len = call.size32("table_len");
    params.mode = call.attributes().integer("schedule_mode");
    if (call.attributes().integer("confidence_head") != 0) {
        params.hidden_size = call.size32("d");
        params.hidden_type = call.elementType("hidden");
        params.hidden = call.input<void>("hidden");
        params.hidden_weight = call.input<float>("hidden_weight");
        params.confidence_bias = call.input<float>("confidence_bias");
        params.inv_temperature = call.input<float>("inv_temperature");
        params.position_bias = call.input<float>("position_bias");
    }
    params.markov_table = call.input<float>("markov_table");
    params.anchors = call.input<std::int32_t>("anchors");
    params.positions = call.input<std::int32_t>("positions");
    params.draft_tokens = call.input<std::int32_t>("draft_tokens");
    params.caps = call.input<std::int32_t>("caps");
    params.live = call.input<std::int32_t>("live");
    params.thresholds = call.input<float>("thresholds");
    params.limits = call.input<std::int32_t>("limits");
    params.terms = call.input<float>("terms");
    params.step_time_us = call.input<float>("step_time_us");
    params.confidence = call.output<float>("confidence");
    params.survival = call.output<std::int32_t>("survival");
    params.verify_len = call.output<std::int32_t>("verify_len");
    params.cu_tokens = call.output<std::int32_t>("cu_tokens");
    params.token_ids = call.output<std::int32_t>("token_ids");
    params.token_request = call.output<std::int32_t>("token_request");
    params.token_position = call.output<std::int32_t>("token_position");
    params.report = call.output<std::int32_t>("report");
    params.workspace = call.workspace();
    return dspark::launchConfidenceSchedule(params, stream);
}

}  // namespace

OpDescription const& confidenceScheduleOp() {
    static std::vector<When> const with_head{{"confidence_head", kNonZero}};
    static OpDescription const op{
        "DsparkConfidenceSchedule",
        "3",
        {
            {"schedule_mode", false, true, 0.0, 0.0, 3.0},
            {"confidence_head", false, false, 1.0, 0.0, 1.0},
            {"markov_half", false, false, 0.0, 0.0, 1.0},
        },
        {
            {"hidden", {{"R"}, {"gamma"}, {"d"}}, floatTypes('h'), with_head},
            {"hidden_weight", {{"d"}}, float32Type(), with_head},
            {"markov_table", {{"V"}}, float32Type(), {{"markov_half", kNonZero}}},
            {"confidence_bias", {{nullptr, 1}}, float32Type(), with_head},
            {"inv_temperature", {{"gamma"}}, float32Type(), with_head},
            {"position_bias", {{"gamma"}}, float32Type(), with_head},
            {"anchors", {{"R"}}, int32Type()},
            {"positions", {{"R"}}, int32Type()},
            {"draft_tokens", {{"R"}, {"gamma"}}, int32Type()},
            {"caps", {{"R"}}, int32Type()},
            {"live", {{"R"}}, int32Type(), {{"schedule_mode", 12u}}},
            {"thresholds", {{"R"}}, float32Type(), {{"schedule_mode", 2u}}},
            {"limits", {{nullptr, 4}}, int32Type()},
            {"terms", {{nullptr, 3}}, float32Type()},
            {"step_time_us", {{"table_len"}}, float32Type()},
        },
        {
            {"verify_len", {{"R"}}, int32Type()},
            {"cu_tokens", {{"R", 1}}, int32Type()},
            {"token_ids", {{"R", 0, "gamma", 1}}, int32Type()},
            {"token_request", {{"R", 0, "gamma", 1}}, int32Type()},
            {"token_position", {{"R", 0, "gamma", 1}}, int32Type()},
            {"report", {{nullptr, 4}}, int32Type()},
            {"survival", {{"R"}, {"gamma"}}, int32Type()},
            {"confidence", {{"R"}, {"gamma"}}, float32Type(), with_head},
        },
        checkFields,
        workspaceBytes,
        launch,
    };
    return op;
}

}  // namespace trtllm_dspark
