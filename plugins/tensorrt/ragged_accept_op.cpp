#include "ops.h"

#include "../kernels/ragged_accept.h"

namespace trtllm_dspark {
namespace {

void checkFields(Attributes const& attributes) {
    if (attributes.integer("acceptance") == 0 && attributes.integer("sampled_draft") != 0) {
        throw FieldError("field 'sampled_draft': expected 0 for greedy acceptance (acceptance 0), got 1");
    }
    if (attributes.integer("sampled_draft") == 0 && attributes.integer("num_candidates") != 0) {
        throw FieldError("field 'num_candidates': expected 0 unless sampled_draft is 1, got " +
                         std::to_string(attributes.integer("num_candidates")));
    }
}

std::size_t workspaceBytes(Symbols const& sizes, Attributes const&) {
    return static_cast<std::size_t>(dspark::raggedAcceptWorkspaceBytes(sizes["T"], sizes["R"], sizes["V"]));
}

dspark::LaunchStatus launch(LaunchCall const& call, cudaStream_t stream) {
    Attributes const& fields = call.attributes();
    dspark::RaggedAcceptParams params{};
    params.num_tokens = call.size32("T");
    params.num_requests = call.size32("R");
    params.draft_len = call.size32("gamma");
    params.vocab = call.size32("V");
    params.num_candidates = fields.integer("num_candidates");
    // Only a dense sampled draft has rows as wide as the draft vocabulary.
    bool const dense = fields.integer("sampled_draft") != 0 && params.num_candidates == 0;
    params.draft_vocab = dense ? call.size32("Vd") : params.vocab;
    params.acceptance = fields.integer("acceptance");
    params.logits_type = call.elementType("target_logits");
    params.logits_stride = params.vocab;
    params.target_logits = call.input<void>("target_logits");
    params.cu_tokens = call.input<std::int32_t>("cu_tokens");
    params.draft_tokens = call.input<std::int32_t>("draft_tokens");
    params.draft_entries = call.input<std::int32_t>("draft_entries");
    params.draft_logits = call.input<float>("draft_logits");
    params.draft_laws = call.input<float>("draft_laws");
    params.draft_totals = call.input<std::int64_t>("draft_totals");
    params.candidates = call.input<std::int32_t>("candidates");
    params.draft_of_target = call.input<std::int32_t>("draft_of_target");
    params.temperature = call.input<float>("temperature");
    params.top_k = call.input<std::int32_t>("top_k");
    params.top_p = call.input<float>("top_p");
    params.seed = call.input<std::int64_t>("seed");
    params.positions = call.input<std::int32_t>("positions");
    params.out_tokens = call.output<std::int32_t>("out_tokens");
    params.emitted_len = call.output<std::int32_t>("emitted_len");
    params.status = call.output<std::int32_t>("status");
    params.workspace = call.workspace();
    return dspark::launchRaggedAccept(params, stream);
}

}  // namespace

OpDescription const& raggedAcceptOp() {
    static std::vector<When> const sampled{{"sampled_draft", kNonZero}};
    static OpDescription const op{
        "DsparkRaggedAccept",
        "1",
        {
            {"acceptance", false, true, 0.0, 0.0, 2.0},
            {"sampled_draft", false, true, 0.0, 0.0, 1.0},
            {"num_candidates", false, false, 0.0, 0.0, 256.0},
            {"mapped_vocab", false, false, 0.0, 0.0, 1.0},
        },
        {
            {"target_logits", {{"T"}, {"V"}}, floatTypes('u')},
            {"cu_tokens", {{"R", 1}}, int32Type()},
            {"draft_tokens", {{"R"}, {"gamma"}}, int32Type()},
            {"temperature", {{"R"}}, float32Type()},
            {"top_k", {{"R"}}, int32Type()},
            {"top_p", {{"R"}}, float32Type()},
            {"seed", {{"R"}}, int64Type()},
            {"positions", {{"R"}}, int32Type()},
            {"draft_entries", {{"R"}, {"gamma"}}, int32Type(), sampled},
            {"draft_laws", {{"R"}, {"gamma"}, {nullptr, 4}}, float32Type(), sampled},
            {"draft_totals", {{"R"}, {"gamma"}}, int64Type(), sampled},
            {"draft_logits", {{"R"}, {"gamma"}, {"Vd"}}, float32Type(),
             {{"sampled_draft", kNonZero}, {"num_candidates", 1u}}},
            {"draft_logits", {{"R"}, {"gamma"}, {"num_candidates"}}, float32Type(),
             {{"sampled_draft", kNonZero}, {"num_candidates", kNonZero}}},
            {"candidates", {{"R"}, {"gamma"}, {"num_candidates"}}, int32Type(), {{"num_candidates", kNonZero}}},
            {"draft_of_target", {{"V"}}, int32Type(), {{"mapped_vocab", kNonZero}}},
        },
        {
            {"out_tokens", {{"R"}, {"gamma", 1}}, int32Type()},
            {"emitted_len", {{"R"}}, int32Type()},
            {"status", {{"R"}}, int32Type()},
        },
        checkFields,
        workspaceBytes,
        launch,
    };
    return op;
}

}  // namespace trtllm_dspark
