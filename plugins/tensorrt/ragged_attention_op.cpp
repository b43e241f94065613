#include "ops.h"

#include "../kernels/ragged_attention.h"

namespace trtllm_dspark {
namespace {

std::size_t workspaceBytes(Symbols const& sizes, Attributes const& attributes) {
    return static_cast<std::size_t>(dspark::raggedAttentionWorkspaceBytes(
        sizes["T"], sizes["Hq"], sizes["D"], sizes["P"] * sizes["S"], attributes.integer("kv_split")));
}

void checkFields(Attributes const& attributes) {
    if (attributes.integer("kv_split") % 64 != 0) {
        throw FieldError("field 'kv_split': expected a multiple of 64, got " +
                         std::to_string(attributes.integer("kv_split")));
    }
}

dspark::LaunchStatus launch(LaunchCall const& call, cudaStream_t stream) {
    dspark::RaggedAttentionParams params{};
    params.num_tokens = call.size32("T");
    params.num_requests = call.size32("R");
    params.num_heads = call.size32("Hq");
    params.num_kv_heads = call.size32("Hkv");
    params.head_dim = call.size32("D");
    params.num_pages = call.size32("N");
    params.page_size = call.size32("S");
    params.pages_per_request = call.size32("P");
    params.kv_split = call.attributes().integer("kv_split");
    params.causal = call.attributes().integer("causal");
    params.scale = call.attributes().real("scale");
    params.type = call.elementType("query");
    params.query = call.input<void>("query");
    params.key_cache = call.input<void>("key_cache");
    params.value_cache = call.input<void>("value_cache");
    params.cu_tokens = call.input<std::int32_t>("cu_tokens");
    params.token_position = call.input<std::int32_t>("token_position");
    params.page_table = call.input<std::int32_t>("page_table");
    params.output = call.output<void>("output");
    params.workspace = call.workspace();
    return dspark::launchRaggedAttention(params, stream);
}

}  // namespace

OpDescription const& raggedAttentionOp() {
    static OpDescription const op{
        "DsparkRaggedAttention",
        "1",
        {
            {"scale", true, true, 0.0, 1e-6, 1e6},
            {"causal", false, true, 1.0, 0.0, 1.0},
            {"kv_split", false, false, 512.0, 64.0, 1048576.0},
        },
        {
            {"query", {{"T"}, {"Hq"}, {"D"}}, halfTypes('q')},
            {"key_cache", {{"N"}, {"Hkv"}, {"S"}, {"D"}}, halfTypes('q')},
            {"value_cache", {{"N"}, {"Hkv"}, {"S"}, {"D"}}, halfTypes('q')},
            {"cu_tokens", {{"R", 1}}, int32Type()},
            {"token_position", {{"T"}}, int32Type()},
            {"page_table", {{"R"}, {"P"}}, int32Type()},
        },
        {
            {"output", {{"T"}, {"Hq"}, {"D"}}, halfTypes('q')},
        },
        checkFields,
        workspaceBytes,
        launch,
    };
    return op;
}

}  // namespace trtllm_dspark
