#include "kv_append.cuh"

namespace dspark {

LaunchStatus launchKvAppend(KvAppendParams const& p, cudaStream_t stream) noexcept {
    if (p.num_tokens < 0) return refused("num_tokens", "at least 0", p.num_tokens);
    if (p.num_requests < 0) return refused("num_requests", "at least 0", p.num_requests);
    if (p.num_kv_heads < 1) return refused("num_kv_heads", "at least 1", p.num_kv_heads);
    if (p.page_size < 1) return refused("page_size", "at least 1", p.page_size);
    if (p.pages_per_request < 1) return refused("pages_per_request", "at least 1", p.pages_per_request);
    if (p.num_pages < 0) return refused("num_pages", "at least 0", p.num_pages);
    if (p.type == ElementType::kInt8) return refused("type", "float32, float16 or bfloat16", 3);
    if (p.head_dim < 1 || p.head_dim * elementBytes(p.type) % 16 != 0) {
        return refused("head_dim", "rows of a multiple of 16 bytes", p.head_dim);
    }
    if (p.num_tokens == 0 || p.num_requests == 0) return launchOk();
    if (!isAligned16(p.key) || !isAligned16(p.value) || !isAligned16(p.key_cache) || !isAligned16(p.value_cache)) {
        return refused("key", "key, value and caches at multiples of 16 bytes", 0);
    }
    int64_t const chunks = p.num_kv_heads * p.head_dim * elementBytes(p.type) / 16;
    unsigned const rows = static_cast<unsigned>(p.num_tokens < 32768 ? p.num_tokens : 32768);
    dim3 const grid(static_cast<unsigned>((chunks + 127) / 128), rows,
                    (static_cast<unsigned>(p.num_tokens) + rows - 1) / rows);
    return launchKernel(kvAppendKernel, grid, dim3(128), 0, stream, p);
}

}  // namespace dspark
