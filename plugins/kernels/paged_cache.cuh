#pragma once

#include "device.cuh"

namespace dspark {

//! Cache row of a position, or -1 when the page table does not reach it.
__device__ inline int64_t cacheRow(int32_t const* pages, int32_t pages_per_request, int32_t page_size,
                                   int32_t num_pages, int32_t num_kv_heads, int32_t head, int32_t position) {
    int32_t const slot = position / page_size;
    if (position < 0 || slot >= pages_per_request) return -1;
    int32_t const page = pages[slot];
    if (page < 0 || page >= num_pages) return -1;
    return (static_cast<int64_t>(page) * num_kv_heads + head) * page_size + position % page_size;
}

}  // namespace dspark
