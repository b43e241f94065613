#include "ops.h"

#include "../kernels/kv_append.h"

namespace trtllm_dspark {
namespace {

dspark::LaunchStatus launch(LaunchCall const& call, cudaStream_t stream) {
    dspark::KvAppendParams params{};
    params.num_tokens = call.size32("T");
    params.num_requests = call.size32("R");
    params.num_kv_heads = call.size32("Hkv");
    params.head_dim = call.size32("D");
    params.num_pages = call.size32("N");
    params.page_size = call.size32("S");
    params.pages_per_request = call.size32("P");
    params.type = call.elementType("key");
    params.key = call.input<void>("key");
    params.value = call.input<void>("value");
    params.token_request = call.input<std::int32_t>("token_request");
    params.token_position = call.input<std::int32_t>("token_position");
    params.page_table = call.input<std::int32_t>("page_table");
    params.key_cache = call.output<void>("key_cache_out");
    params.value_cache = call.output<void>("value_cache_out");
    // Without aliasing the outputs would lack everything that was cached before.
    if (params.key_cache != call.input<void>("key_cache") || params.value_cache != call.input<void>("value_cache")) {
        throw SignatureError("key_cache_out: expected the memory of key_cache; build the engine with "
                             "PreviewFeature::kALIASED_PLUGIN_IO_10_03");
    }
    return dspark::launchKvAppend(params, stream);
}

}  // namespace

OpDescription const& kvAppendOp() {
    static OpDescription const op{
        "DsparkKvAppend",
        "1",
        {},
        {
            {"key", {{"T"}, {"Hkv"}, {"D"}}, floatTypes('k')},
            {"value", {{"T"}, {"Hkv"}, {"D"}}, floatTypes('k')},
            {"token_request", {{"T"}}, int32Type()},
            {"token_position", {{"T"}}, int32Type()},
            {"page_table", {{"R"}, {"P"}}, int32Type()},
            {"key_cache", {{"N"}, {"Hkv"}, {"S"}, {"D"}}, floatTypes('k')},
            {"value_cache", {{"N"}, {"Hkv"}, {"S"}, {"D"}}, floatTypes('k')},
        },
        {
            {"key_cache_out", {{"N"}, {"Hkv"}, {"S"}, {"D"}}, floatTypes('k'), {}, "key_cache"},
            {"value_cache_out", {{"N"}, {"Hkv"}, {"S"}, {"D"}}, floatTypes('k'), {}, "value_cache"},
        },
        nullptr,
        nullptr,
        launch,
    };
    return op;
}

}  // namespace trtllm_dspark
