#pragma once

#include "round_state.h"

#include "device.cuh"

namespace dspark {

constexpr int kRoundThreads = 128;

__device__ inline bool isLive(int32_t const* active, int32_t const* remaining, int64_t row) {
    return row < active[0] && remaining[row] > 0;
}

//! A thread an entry of block_ids; the first of each row writes where the row begins.
static __global__ void __launch_bounds__(kRoundThreads) roundBeginKernel(RoundBeginParams const p) {
    int64_t const at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    int64_t const width = p.block_size > 0 ? p.block_size : 1;
    int64_t const row = at / width, column = at % width;
    if (row >= p.num_requests) return;
    if (column == 0) p.starts[row] = p.positions[row];
    if (p.block_size > 0) p.block_ids[at] = column == 0 ? p.anchors[row] : p.mask_token;
}

static __global__ void __launch_bounds__(kRoundThreads) roundCapsKernel(RoundCapsParams const p) {
    int64_t const row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= p.num_requests) return;
    int32_t cap = 0;
    bool const live = isLive(p.active, p.remaining, row);
    if (live && p.draft_status[row] == 0) {
        int32_t const left = p.remaining[row] - 1;
        cap = p.max_drafts[row] < left ? p.max_drafts[row] : left;
    }
    p.caps[row] = cap > 0 ? cap : 0;
    p.live[row] = live ? 1 : 0;
}

//! A thread an entry of pad_index and of the packed arrays.
static __global__ void __launch_bounds__(kRoundThreads) roundRowsKernel(RoundRowsParams const p) {
    int64_t const at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < static_cast<int64_t>(p.num_requests) * p.row_len) {
        int64_t const row = at / p.row_len, slot = at % p.row_len;
        int64_t const last = p.cu_tokens[row + 1] - 1 - p.cu_tokens[row];
        p.pad_index[at] = p.cu_tokens[row] + (slot < last ? slot : last);
    }
    if (at < p.num_tokens) {
        int32_t const request = p.token_request[at];
        bool const used = request >= 0;
        p.input_ids[at] = used ? p.token_ids[at] : 0;
        p.positions[at] = used ? p.token_position[at] : 0;
        p.pack_index[at] = used ? static_cast<int64_t>(request) * p.row_len + at - p.cu_tokens[request] : 0;
    }
}

//! A block a row of requests; threads walk its tokens times banned ids.
static __global__ void __launch_bounds__(kRoundThreads) roundBanKernel(RoundBanParams const p) {
    int32_t const row = static_cast<int32_t>(blockIdx.x);
    int32_t const first = p.cu_tokens[row];
    // Row k of a request chooses the token at positions[row] + k + 1.
    int64_t count = static_cast<int64_t>(p.ban_until[row]) - p.positions[row] - 1;
    int64_t const length = p.cu_tokens[row + 1] - first;
    count = count < length ? count : length;
    for (int64_t at = threadIdx.x; at < count * p.max_banned; at += blockDim.x) {
        int32_t const id = p.banned[static_cast<int64_t>(row) * p.max_banned + at % p.max_banned];
        int64_t const token = first + at / p.max_banned;
        if (id >= 0 && id < p.vocab && token < p.num_tokens) p.logits[token * p.vocab + id] = -INFINITY;
    }
}

static __global__ void __launch_bounds__(kRoundThreads) roundCommitKernel(RoundCommitParams const p) {
    int64_t const row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= p.num_requests || !isLive(p.active, p.remaining, row)) return;
    int32_t const emitted = p.emitted_len[row];
    if (emitted <= 0) return;
    p.anchors[row] = p.out_tokens[row * (p.draft_len + 1) + emitted - 1];
    p.positions[row] += emitted;
    p.remaining[row] -= emitted;
}

}  // namespace dspark
