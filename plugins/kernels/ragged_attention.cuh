#pragma once

#include "ragged_attention.h"

#include "mma.cuh"
#include "packed_rows.cuh"
#include "paged_cache.cuh"

namespace dspark {

constexpr int kAttentionRows = 64;  // query rows a tile: 4 warps of 16
constexpr int kAttentionKeys = 64;  // key rows a tile
constexpr int kAttentionThreads = 128;
constexpr float kLog2eFast = 1.4426950408889634f;

template <int kDim>
constexpr int attentionSharedBytes() {
    return (kAttentionRows + 2 * kAttentionKeys) * (kDim + 8) * 2;  // 8 elements of padding: no bank conflicts
}

//! Number of keys of a request.
__device__ inline int32_t keysOfRequest(RaggedAttentionParams const& p, int32_t request) {
    int32_t const end = p.cu_tokens[request + 1];
    if (end <= p.cu_tokens[request]) return 0;
    int64_t const capacity = static_cast<int64_t>(p.pages_per_request) * p.page_size;
    int64_t const length = static_cast<int64_t>(p.token_position[end - 1]) + 1;
    return static_cast<int32_t>(length < capacity ? length : capacity);
}

//! What one thread holds of a tile of query rows: rows `group` and `group + 8` of its warp's 16.
template <int kDim>
struct AttentionState {
    float out[kDim / 8][4];
    float best[2];
    float sum[2];
};

//! Partial results of one piece: out is not yet divided by sum; best is in units of q k^T.
struct AttentionPartials {
    float* out;       // [pieces, T, Hq, D]
    float* best_sum;  // [pieces, T, Hq, 2]
};

__device__ inline AttentionPartials attentionPartials(RaggedAttentionParams const& p) {
    int64_t const pieces =
        raggedAttentionPieces(static_cast<int64_t>(p.pages_per_request) * p.page_size, p.kv_split);
    float* const base = static_cast<float*>(p.workspace);
    return {base, base + pieces * p.num_tokens * p.num_heads * p.head_dim};
}

//! Copies key or value rows [begin, begin + 64) of one head into shared memory; rows at or beyond `end` become zeros, so
//! that stale cache contents (even NaN) never meet a zero probability.
template <class T, int kDim>
__device__ inline void loadKeyTile(RaggedAttentionParams const& p, T const* cache, int32_t const* pages, int32_t head,
                                   int32_t begin, int32_t end, T* shared) {
    constexpr int kChunks = kDim / 8;
    for (int index = static_cast<int>(threadIdx.x); index < kAttentionKeys * kChunks; index += kAttentionThreads) {
        int const row = index / kChunks, chunk = index % kChunks;
        T* const to = shared + row * (kDim + 8) + chunk * 8;
        int64_t const from = begin + row < end ? cacheRow(pages, p.pages_per_request, p.page_size, p.num_pages,
                                                          p.num_kv_heads, head, begin + row)
                                               : -1;
        if (from >= 0) {
            copyAsync16(to, cache + from * kDim + chunk * 8);
        } else {
            *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
        }
    }
}

template <class T>
__device__ inline uint32_t loadPair(T const* at) {
    return *reinterpret_cast<uint32_t const*>(at);
}

//! Scores of 16 query rows against 64 keys: score[n] covers keys 8n + 2 * member, +1 for rows group, group + 8.
template <class T, int kDim>
__device__ inline void scoreTile(T const* query, T const* keys, int group, int member,
                                 float (&score)[kAttentionKeys / 8][4]) {
    constexpr int kStride = kDim + 8;
    for (int n = 0; n < kAttentionKeys / 8; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < kDim; k += 16) {
        T const* const row = query + group * kStride + k + 2 * member;
        uint32_t const a[4] = {loadPair(row), loadPair(row + 8 * kStride), loadPair(row + 8),
                               loadPair(row + 8 * kStride + 8)};
#pragma unroll
        for (int n = 0; n < kAttentionKeys / 8; ++n) {
            T const* const key = keys + (8 * n + group) * kStride + k + 2 * member;
            uint32_t const b[2] = {loadPair(key), loadPair(key + 8)};
            mma16816<T>(score[n], a, b);
        }
    }
}

//! Masks, updates the running maximum, turns scores into probabilities and rescales what was accumulated.
template <int kDim>
__device__ inline void softmaxTile(float (&score)[kAttentionKeys / 8][4], int32_t const (&limit)[2], int32_t begin,
                                   int member, float factor, AttentionState<kDim>& state) {
    float const minus_inf = bitsFloat(0xff800000u);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float best = state.best[half];
#pragma unroll
        for (int n = 0; n < kAttentionKeys / 8; ++n) {
#pragma unroll
            for (int parity = 0; parity < 2; ++parity) {
                float& s = score[n][2 * half + parity];
                if (begin + 8 * n + 2 * member + parity >= limit[half]) s = minus_inf;
                best = s > best ? s : best;
            }
        }
        for (int lanes = 1; lanes < 4; lanes <<= 1) {
            float const other = __shfl_xor_sync(0xffffffffu, best, lanes);
            best = other > best ? other : best;
        }
        // A row that has seen no key yet: any finite reference keeps exp2 away from inf - inf.
        float const reference = best == minus_inf ? 0.0f : best;
        float const keep = exp2f((state.best[half] - reference) * factor);
        state.best[half] = best;
        state.sum[half] *= keep;
#pragma unroll
        for (int n = 0; n < kAttentionKeys / 8; ++n) {
#pragma unroll
            for (int parity = 0; parity < 2; ++parity) {
                float& s = score[n][2 * half + parity];
                s = exp2f((s - reference) * factor);
                state.sum[half] += s;
            }
        }
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            state.out[n][2 * half] *= keep;
            state.out[n][2 * half + 1] *= keep;
        }
    }
}

//! out += P V for 64 keys; P is rounded to T.
template <class T, int kDim>
__device__ inline void accumulateTile(float (&score)[kAttentionKeys / 8][4], T const* values, int group, int member,
                                      AttentionState<kDim>& state) {
    constexpr int kStride = kDim + 8;
#pragma unroll
    for (int k = 0; k < kAttentionKeys / 16; ++k) {
        uint32_t a[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            float const* const pair = &score[2 * k + (part >> 1)][2 * (part & 1)];
            a[part] = packPair(fromFloat<T>(pair[0]), fromFloat<T>(pair[1]));
        }
        T const* const row = values + (16 * k + 2 * member) * kStride + group;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            T const* const at = row + 8 * n;
            uint32_t const b[2] = {packPair(at[0], at[kStride]), packPair(at[8 * kStride], at[9 * kStride])};
            mma16816<T>(state.out[n], a, b);
        }
    }
}

//! Where one query row's result goes: the output when the request has one piece, a partial otherwise.
template <class T, int kDim>
__device__ inline void storeRow(RaggedAttentionParams const& p, AttentionState<kDim> const& state, int half, int member,
                                int64_t row, int32_t piece, bool single) {
    float sum = state.sum[half];
    if (single) {
        T* const out = static_cast<T*>(p.output) + row * kDim;
        float const scale = sum > 0.0f ? 1.0f / sum : 0.0f;
        for (int n = 0; n < kDim / 8; ++n) {
            T const low = fromFloat<T>(state.out[n][2 * half] * scale);
            T const high = fromFloat<T>(state.out[n][2 * half + 1] * scale);
            *reinterpret_cast<uint32_t*>(out + 8 * n + 2 * member) = packPair(low, high);
        }
        return;
    }
    AttentionPartials const partials = attentionPartials(p);
    int64_t const at = static_cast<int64_t>(piece) * p.num_tokens * p.num_heads + row;
    for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(partials.out + at * kDim + 8 * n + 2 * member) =
            float2{state.out[n][2 * half], state.out[n][2 * half + 1]};
    }
    if (member == 0) *reinterpret_cast<float2*>(partials.best_sum + at * 2) = float2{state.best[half], sum};
}

//! One block = one piece of the keys (x) of one key head (y) of one request (z); the request's query rows in tiles of 64.
template <class T, int kDim>
__global__ void __launch_bounds__(kAttentionThreads) raggedAttentionKernel(RaggedAttentionParams const p) {
    int32_t const request = static_cast<int32_t>(blockIdx.z);
    int32_t const head = static_cast<int32_t>(blockIdx.y);
    int32_t const piece = static_cast<int32_t>(blockIdx.x);
    int32_t const num_keys = keysOfRequest(p, request);
    int32_t const piece_begin = piece * p.kv_split;
    if (piece_begin >= num_keys) return;
    int32_t const piece_end = num_keys - piece_begin < p.kv_split ? num_keys : piece_begin + p.kv_split;
    bool const single = num_keys <= p.kv_split;

    constexpr int kStride = kDim + 8;
    T* const query = reinterpret_cast<T*>(sharedMemory());
    T* const keys = query + kAttentionRows * kStride;
    T* const values = keys + kAttentionKeys * kStride;

    int32_t const first_token = p.cu_tokens[request];
    int32_t const heads_per_key = p.num_heads / p.num_kv_heads;
    int32_t const num_rows = (p.cu_tokens[request + 1] - first_token) * heads_per_key;
    int32_t const* const pages = p.page_table + static_cast<int64_t>(request) * p.pages_per_request;
    int const warp = static_cast<int>(threadIdx.x) >> 5;
    int const group = (static_cast<int>(threadIdx.x) & 31) >> 2, member = static_cast<int>(threadIdx.x) & 3;

    for (int32_t tile = 0; tile < num_rows; tile += kAttentionRows) {
        int32_t const rows = num_rows - tile < kAttentionRows ? num_rows - tile : kAttentionRows;
        constexpr int kChunks = kDim / 8;
        for (int index = static_cast<int>(threadIdx.x); index < kAttentionRows * kChunks; index += kAttentionThreads) {
            int const row = index / kChunks, chunk = index % kChunks;
            T* const to = query + row * kStride + chunk * 8;
            if (row < rows) {
                int64_t const token = first_token + (tile + row) / heads_per_key;
                int64_t const at = token * p.num_heads + head * heads_per_key + (tile + row) % heads_per_key;
                copyAsync16(to, static_cast<T const*>(p.query) + at * kDim + chunk * 8);
            } else {
                *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
            }
        }
        bool const busy = 16 * warp < rows;  // uniform in the warp
        AttentionState<kDim> state;
        int32_t limit[2];
        int64_t row_index[2];
        for (int half = 0; half < 2; ++half) {
            int32_t const row = 16 * warp + group + 8 * half;
            int32_t const inside = row < rows ? row : rows - 1;
            int32_t const token = first_token + (tile + inside) / heads_per_key;
            int32_t const visible = p.causal != 0 ? p.token_position[token] + 1 : piece_end;
            limit[half] = visible < piece_end ? visible : piece_end;
            row_index[half] = row < rows ? static_cast<int64_t>(token) * p.num_heads + head * heads_per_key +
                                               (tile + inside) % heads_per_key
                                         : -1;
            state.best[half] = bitsFloat(0xff800000u);
            state.sum[half] = 0.0f;
        }
        for (int n = 0; n < kDim / 8; ++n) state.out[n][0] = state.out[n][1] = state.out[n][2] = state.out[n][3] = 0.0f;

        int32_t tile_end = piece_end;
        if (p.causal != 0) {
            int32_t const last = p.token_position[first_token + (tile + rows - 1) / heads_per_key] + 1;
            tile_end = last < tile_end ? last : tile_end;
        }
        for (int32_t begin = piece_begin; begin < tile_end; begin += kAttentionKeys) {
            loadKeyTile<T, kDim>(p, static_cast<T const*>(p.key_cache), pages, head, begin, piece_end, keys);
            loadKeyTile<T, kDim>(p, static_cast<T const*>(p.value_cache), pages, head, begin, piece_end, values);
            waitCopies();
            __syncthreads();  // query, key and value tiles visible
            if (busy) {
                float score[kAttentionKeys / 8][4];
                scoreTile<T, kDim>(query + 16 * warp * kStride, keys, group, member, score);
                softmaxTile<kDim>(score, limit, begin, member, p.scale * kLog2eFast, state);
                accumulateTile<T, kDim>(score, values, group, member, state);
            }
            __syncthreads();  // all warps are done with the tiles before they are overwritten
        }
        waitCopies();
        for (int half = 0; half < 2 && busy; ++half) {
            for (int lanes = 1; lanes < 4; lanes <<= 1) {
                state.sum[half] += __shfl_xor_sync(0xffffffffu, state.sum[half], lanes);
            }
            if (row_index[half] >= 0) storeRow<T, kDim>(p, state, half, member, row_index[half], piece, single);
        }
        __syncthreads();  // the query tile may be overwritten
    }
}

//! Merges the pieces of one (token, head) a warp, in ascending order; zeros rows that belong to no request.
template <class T, int kDim>
__global__ void __launch_bounds__(128) raggedAttentionMergeKernel(RaggedAttentionParams const p) {
    int64_t const row = static_cast<int64_t>(blockIdx.x) * 4 + (threadIdx.x >> 5);
    if (row >= static_cast<int64_t>(p.num_tokens) * p.num_heads) return;
    constexpr int kPerLane = kDim / 32;
    int const lane = static_cast<int>(threadIdx.x) & 31;
    T* const out = static_cast<T*>(p.output) + row * kDim + lane * kPerLane;
    int32_t const request =
        requestOfToken(p.cu_tokens, p.num_requests, static_cast<int32_t>(row / p.num_heads));
    if (request < 0) {
        for (int i = 0; i < kPerLane; ++i) out[i] = fromFloat<T>(0.0f);
        return;
    }
    int32_t const num_keys = keysOfRequest(p, request);
    if (num_keys <= p.kv_split) return;  // the only piece wrote the output
    int64_t const pieces = raggedAttentionPieces(num_keys, p.kv_split);
    AttentionPartials const partials = attentionPartials(p);
    int64_t const stride = static_cast<int64_t>(p.num_tokens) * p.num_heads;
    float best = bitsFloat(0xff800000u);
    for (int64_t piece = 0; piece < pieces; ++piece) {
        float const b = partials.best_sum[(piece * stride + row) * 2];
        best = b > best ? b : best;
    }
    float sum = 0.0f;
    float merged[kPerLane] = {};
    for (int64_t piece = 0; piece < pieces; ++piece) {
        float const* const best_sum = partials.best_sum + (piece * stride + row) * 2;
        if (!(best_sum[1] > 0.0f)) continue;  // the piece lies behind this token
        float const weight = exp2f((best_sum[0] - best) * (p.scale * kLog2eFast));
        sum += weight * best_sum[1];
        float const* const partial = partials.out + (piece * stride + row) * kDim + lane * kPerLane;
        for (int i = 0; i < kPerLane; ++i) merged[i] += weight * partial[i];
    }
    float const scale = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (int i = 0; i < kPerLane; ++i) out[i] = fromFloat<T>(merged[i] * scale);
}

}  // namespace dspark
