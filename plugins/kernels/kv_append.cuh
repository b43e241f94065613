#pragma once

#include "kv_append.h"

#include "paged_cache.cuh"

namespace dspark {

//! One 16-byte chunk of one row a thread; blockIdx.x walks the chunks, blockIdx.y the tokens.
static __global__ void __launch_bounds__(128) kvAppendKernel(KvAppendParams const p) {
    int32_t const token = static_cast<int32_t>(blockIdx.y + gridDim.y * blockIdx.z);
    if (token >= p.num_tokens) return;
    int32_t const request = p.token_request[token];
    if (request < 0 || request >= p.num_requests) return;
    int32_t const bytes = p.type == ElementType::kFloat32 ? 4 : 2;
    int32_t const chunks = p.head_dim * bytes / 16;
    int32_t const index = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= p.num_kv_heads * chunks) return;
    int32_t const head = index / chunks;
    int64_t const row = cacheRow(p.page_table + static_cast<int64_t>(request) * p.pages_per_request,
                                 p.pages_per_request, p.page_size, p.num_pages, p.num_kv_heads, head,
                                 p.token_position[token]);
    if (row < 0) return;
    int64_t const from = static_cast<int64_t>(token) * p.num_kv_heads * chunks + index;
    int64_t const to = row * chunks + index % chunks;
    static_cast<uint4*>(p.key_cache)[to] = static_cast<uint4 const*>(p.key)[from];
    static_cast<uint4*>(p.value_cache)[to] = static_cast<uint4 const*>(p.value)[from];
}

}  // namespace dspark
