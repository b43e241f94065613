#include "ragged_attention.cuh"

namespace dspark {
namespace {

template <class T, int kDim>
LaunchStatus launchTyped(RaggedAttentionParams const& p, cudaStream_t stream) {
    int64_t const positions = static_cast<int64_t>(p.pages_per_request) * p.page_size;
    dim3 const grid(static_cast<unsigned>(raggedAttentionPieces(positions, p.kv_split)),
                    static_cast<unsigned>(p.num_kv_heads), static_cast<unsigned>(p.num_requests));
    LaunchStatus const pieces = launchKernel(raggedAttentionKernel<T, kDim>, grid, dim3(kAttentionThreads),
                                             attentionSharedBytes<kDim>(), stream, p);
    if (!pieces.ok()) return pieces;
    int64_t const rows = static_cast<int64_t>(p.num_tokens) * p.num_heads;
    return launchKernel(raggedAttentionMergeKernel<T, kDim>, dim3(static_cast<unsigned>((rows + 3) / 4)), dim3(128), 0,
                        stream, p);
}

}  // namespace

LaunchStatus launchRaggedAttention(RaggedAttentionParams const& p, cudaStream_t stream) noexcept {
    if (p.num_tokens < 0) return refused("num_tokens", "at least 0", p.num_tokens);
    if (p.num_requests < 0 || p.num_requests > 65535) return refused("num_requests", "0 to 65535", p.num_requests);
    if (p.num_kv_heads < 1 || p.num_kv_heads > 65535) return refused("num_kv_heads", "1 to 65535", p.num_kv_heads);
    if (p.num_heads < 1 || p.num_heads % p.num_kv_heads != 0) {
        return refused("num_heads", "a multiple of num_kv_heads", p.num_heads);
    }
    if (p.page_size < 1) return refused("page_size", "at least 1", p.page_size);
    if (p.pages_per_request < 1) return refused("pages_per_request", "at least 1", p.pages_per_request);
    if (static_cast<int64_t>(p.page_size) * p.pages_per_request > 0x7fffffff) {
        return refused("pages_per_request", "page_size * pages_per_request below 2^31", p.pages_per_request);
    }
    if (p.kv_split < kAttentionKeys || p.kv_split % kAttentionKeys != 0) {
        return refused("kv_split", "a positive multiple of 64", p.kv_split);
    }
    if (!(p.scale > 0.0f)) return refused("scale", "above 0", static_cast<int64_t>(p.scale));
    bool const half = p.type == ElementType::kFloat16;
    if (!half && p.type != ElementType::kBFloat16) {
        return refused("type", "float16 (1) or bfloat16 (2)", static_cast<int64_t>(p.type));
    }
    if (p.head_dim != 64 && p.head_dim != 128) return refused("head_dim", "64 or 128", p.head_dim);
    if (p.num_tokens == 0 || p.num_requests == 0) return launchOk();
    if (!isAligned16(p.query) || !isAligned16(p.key_cache) || !isAligned16(p.value_cache) || !isAligned16(p.output)) {
        return refused("query", "query, caches and output at multiples of 16 bytes", 0);
    }
    if (p.head_dim == 64) {
        return half ? launchTyped<__half, 64>(p, stream) : launchTyped<__nv_bfloat16, 64>(p, stream);
    }
    return half ? launchTyped<__half, 128>(p, stream) : launchTyped<__nv_bfloat16, 128>(p, stream);
}

}  // namespace dspark
