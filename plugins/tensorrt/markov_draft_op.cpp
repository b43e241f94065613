#include "ops.h"

#include "../kernels/markov_draft.h"

namespace trtllm_dspark {
namespace {

constexpr std::uint32_t kGated = 1u << 2, kRnn = 1u << 3;

void checkFields(Attributes const& attributes) {
    if (attributes.integer("head_kind") == 0 && attributes.integer("int8_weights") != 0) {
        throw FieldError("field 'int8_weights': expected 0 without a head (head_kind 0), got 1");
    }
    if (attributes.integer("head_kind") < 2 && attributes.integer("head_bias") != 0) {
        throw FieldError("field 'head_bias': expected 0 unless head_kind is 2 (gated) or 3 (rnn), got 1");
    }
}

std::size_t workspaceBytes(Symbols const& sizes, Attributes const& attributes) {
    std::int64_t const rank = attributes.integer("head_kind") == 0 ? 0 : sizes["r"];
    return static_cast<std::size_t>(
        dspark::markovDraftWorkspaceBytes(sizes["R"], attributes.integer("vocab"), sizes["Vd"], rank));
}

void requireColumns(LaunchCall const& call, char const* tensor, char const* symbol, std::int64_t expected) {
    if (call.size(symbol) != expected) {
        throw SignatureError(std::string(tensor) + ": expected " + std::to_string(expected) + " columns, got " +
                             std::to_string(call.size(symbol)));
    }
}

dspark::LaunchStatus launch(LaunchCall const& call, cudaStream_t stream) {
    Attributes const& fields = call.attributes();
    dspark::MarkovDraftParams params{};
    params.num_requests = call.size32("R");
    params.draft_len = call.size32("gamma");
    params.vocab = fields.integer("vocab");
    params.draft_vocab = call.size32("Vd");
    params.head_kind = fields.integer("head_kind");
    params.acceptance = fields.integer("acceptance");
    params.num_candidates = fields.integer("num_candidates");
    params.logits_type = call.elementType("base_logits");
    params.base_logits = call.input<void>("base_logits");
    params.anchors = call.input<std::int32_t>("anchors");
    params.positions = call.input<std::int32_t>("positions");
    params.temperature = call.input<float>("temperature");
    params.top_k = call.input<std::int32_t>("top_k");
    params.top_p = call.input<float>("top_p");
    params.seed = call.input<std::int64_t>("seed");
    if (params.head_kind != 0) {
        params.rank = call.size32("r");
        params.weight_type = call.elementType("w1");
        bool const int8 = params.weight_type == dspark::ElementType::kInt8;
        if (int8 != (fields.integer("int8_weights") != 0)) {
            throw SignatureError("w1: expected int8 exactly when field 'int8_weights' is 1");
        }
        params.w1 = call.input<void>("w1");
        params.w2 = call.input<void>("w2");
        params.w1_scale = call.input<float>("w1_scale");
        params.w2_scale = call.input<float>("w2_scale");
    }
    if (params.head_kind >= 2) {
        params.hidden_size = call.size32("d");
        params.hidden_type = call.elementType("hidden");
        params.hidden = call.input<void>("hidden");
        params.gate_weight = call.input<float>("gate_weight");
        params.gate_bias = call.input<float>("gate_bias");
        params.rnn_weight = call.input<float>("rnn_weight");
        params.rnn_bias = call.input<float>("rnn_bias");
        std::int64_t const r = params.rank, d = params.hidden_size;
        if (params.head_kind == 2) requireColumns(call, "gate_weight", "gate_columns", d + r);
        if (params.head_kind == 3) {
            requireColumns(call, "rnn_weight", "rnn_columns", d + 2 * r);
            requireColumns(call, "rnn_weight (transposed)", "rnn_rows", 3 * r);
        }
    }
    params.target_of_draft = call.input<std::int32_t>("target_of_draft");
    params.draft_of_target = call.input<std::int32_t>("draft_of_target");
    params.draft_tokens = call.output<std::int32_t>("draft_tokens");
    params.draft_entries = call.output<std::int32_t>("draft_entries");
    params.draft_logits = call.output<float>("draft_logits");
    params.draft_laws = call.output<float>("draft_laws");
    params.draft_totals = call.output<std::int64_t>("draft_totals");
    params.candidates = call.output<std::int32_t>("candidates");
    params.status = call.output<std::int32_t>("draft_status");
    params.workspace = call.workspace();
    return dspark::launchMarkovDraft(params, stream);
}

}  // namespace

OpDescription const& markovDraftOp() {
    using nvinfer1::DataType;
    static TypeSpec const weights{{DataType::kFLOAT, DataType::kHALF, DataType::kBF16, DataType::kINT8}, 'w'};
    static OpDescription const op{
        "DsparkMarkovDraft",
        "1",
        {
            {"vocab", false, true, 0.0, 1.0, 1048576.0},
            {"head_kind", false, true, 0.0, 0.0, 3.0},
            {"acceptance", false, true, 0.0, 0.0, 2.0},
            {"num_candidates", false, false, 0.0, 0.0, 256.0},
            {"mapped_vocab", false, false, 0.0, 0.0, 1.0},
            {"int8_weights", false, false, 0.0, 0.0, 1.0},
            {"head_bias", false, false, 0.0, 0.0, 1.0},
        },
        {
            {"base_logits", {{"R"}, {"gamma"}, {"Vd"}}, floatTypes('u')},
            {"anchors", {{"R"}}, int32Type()},
            {"positions", {{"R"}}, int32Type()},
            {"temperature", {{"R"}}, float32Type()},
            {"top_k", {{"R"}}, int32Type()},
            {"top_p", {{"R"}}, float32Type()},
            {"seed", {{"R"}}, int64Type()},
            {"w1", {{"vocab"}, {"r"}}, weights, {{"head_kind", kNonZero}}},
            {"w2", {{"Vd"}, {"r"}}, weights, {{"head_kind", kNonZero}}},
            {"w1_scale", {{"vocab"}}, float32Type(), {{"int8_weights", kNonZero}}},
            {"w2_scale", {{"Vd"}}, float32Type(), {{"int8_weights", kNonZero}}},
            {"hidden", {{"R"}, {"gamma"}, {"d"}}, floatTypes('h'), {{"head_kind", kGated | kRnn}}},
            {"gate_weight", {{"r"}, {"gate_columns"}}, float32Type(), {{"head_kind", kGated}}},
            {"gate_bias", {{"r"}}, float32Type(), {{"head_kind", kGated}, {"head_bias", kNonZero}}},
            {"rnn_weight", {{"rnn_rows"}, {"rnn_columns"}}, float32Type(), {{"head_kind", kRnn}}},
            {"rnn_bias", {{"rnn_rows"}}, float32Type(), {{"head_kind", kRnn}, {"head_bias", kNonZero}}},
            {"target_of_draft", {{"Vd"}}, int32Type(), {{"mapped_vocab", kNonZero}}},
            {"draft_of_target", {{"vocab"}}, int32Type(), {{"mapped_vocab", kNonZero}}},
        },
        {
            {"draft_tokens", {{"R"}, {"gamma"}}, int32Type()},
            {"draft_status", {{"R"}}, int32Type()},
            {"draft_entries", {{"R"}, {"gamma"}}, int32Type()},
            {"draft_laws", {{"R"}, {"gamma"}, {nullptr, 4}}, float32Type()},
            {"draft_totals", {{"R"}, {"gamma"}}, int64Type()},
            {"draft_logits", {{"R"}, {"gamma"}, {"Vd"}}, float32Type(), {{"acceptance", kNonZero}, {"num_candidates", 1u}}},
            {"draft_logits", {{"R"}, {"gamma"}, {"num_candidates"}}, float32Type(),
             {{"acceptance", kNonZero}, {"num_candidates", kNonZero}}},
            {"candidates", {{"R"}, {"gamma"}, {"num_candidates"}}, int32Type(), {{"num_candidates", kNonZero}}},
        },
        checkFields,
        workspaceBytes,
        launch,
    };
    return op;
}

}  // namespace trtllm_dspark
