//! The team concept of plugins/core on a device: a warp or a block runs one algorithm together.
#pragma once

#include "device.cuh"

#include "dspark/row.h"

namespace dspark {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline uint64_t warpMax(uint64_t x) {
    for (int offset = 16; offset > 0; offset >>= 1) {
        uint64_t const other = __shfl_xor_sync(kFullWarp, static_cast<unsigned long long>(x), offset);
        x = other > x ? other : x;
    }
    return x;
}

__device__ inline uint64_t warpAdd(uint64_t x) {
    for (int offset = 16; offset > 0; offset >>= 1) {
        x += __shfl_xor_sync(kFullWarp, static_cast<unsigned long long>(x), offset);
    }
    return x;
}

//! Inclusive prefix sum over the lanes of a warp.
__device__ inline uint64_t warpScan(uint64_t x) {
    int const lane = static_cast<int>(threadIdx.x) & 31;
    for (int offset = 1; offset < 32; offset <<= 1) {
        uint64_t const below = __shfl_up_sync(kFullWarp, static_cast<unsigned long long>(x), offset);
        if (lane >= offset) x += below;
    }
    return x;
}

//! The 32 lanes of one warp. The block's x dimension must be a multiple of 32.
struct WarpTeam {
    __device__ int rank() const { return static_cast<int>(threadIdx.x) & 31; }
    __device__ int size() const { return 32; }
    __device__ void sync() const { __syncwarp(kFullWarp); }
    __device__ uint64_t maxU64(uint64_t x) const { return warpMax(x); }
    __device__ uint64_t addU64(uint64_t x) const { return warpAdd(x); }
    __device__ uint64_t exclusiveAddU64(uint64_t x, uint64_t* total) const {
        uint64_t const inclusive = warpScan(x);
        *total = __shfl_sync(kFullWarp, static_cast<unsigned long long>(inclusive), 31);
        return inclusive - x;
    }
};

//! All threads of a one-dimensional block; `scratch` is shared memory, kBlockTeamBytes.
struct BlockTeam {
    uint64_t* scratch;  // [32]

    __device__ int rank() const { return static_cast<int>(threadIdx.x); }
    __device__ int size() const { return static_cast<int>(blockDim.x); }
    __device__ void sync() const { __syncthreads(); }

    __device__ uint64_t maxU64(uint64_t x) const {
        uint64_t const mine = warpMax(x);
        publish(mine);
        uint64_t best = 0;
        for (int warp = 0; warp < warps(); ++warp) best = maxOf(best, scratch[warp]);
        __syncthreads();  // all ranks have read scratch before it is written again
        return best;
    }

    __device__ uint64_t addU64(uint64_t x) const {
        uint64_t const mine = warpAdd(x);
        publish(mine);
        uint64_t sum = 0;
        for (int warp = 0; warp < warps(); ++warp) sum += scratch[warp];
        __syncthreads();  // all ranks have read scratch before it is written again
        return sum;
    }

    __device__ uint64_t exclusiveAddU64(uint64_t x, uint64_t* total) const {
        uint64_t const inclusive = warpScan(x);
        if ((threadIdx.x & 31) == 31) scratch[threadIdx.x >> 5] = inclusive;
        __syncthreads();  // warp totals visible
        uint64_t before = 0, sum = 0;
        for (int warp = 0; warp < warps(); ++warp) {
            if (warp < static_cast<int>(threadIdx.x >> 5)) before += scratch[warp];
            sum += scratch[warp];
        }
        __syncthreads();  // all ranks have read scratch before it is written again
        *total = sum;
        return before + inclusive - x;
    }

private:
    __device__ int warps() const { return static_cast<int>(blockDim.x >> 5); }
    __device__ void publish(uint64_t value) const {
        if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
        __syncthreads();  // warp results visible
    }
};

constexpr int kBlockTeamBytes = 32 * 8;

//! dot16 of plugins/core by the 16 threads of a half warp, a thread a lane; the result is on all 16. `a` and `b` are
//! anything indexable that yields float.
template <class A, class B>
__device__ inline float halfWarpDot(A const& a, B const& b, int n) {
    unsigned const mask = 0xffffu << (threadIdx.x & 16);
    float sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x & 15); i < n; i += 16) sum = fmaRn(a[i], b[i], sum);
    // The tree of dot16 adds lanes c and c + width; addition commutes, so every lane of a pair may hold the sum.
    for (int width = 8; width >= 1; width >>= 1) sum = addRn(sum, __shfl_xor_sync(mask, sum, width));
    return sum;
}

//! tileMasses of plugins/core for a block: a warp a tile, so that a tile costs no block barrier. Same integers.
template <class Mass>
__device__ uint64_t tileMasses(BlockTeam const& team, Mass const& mass, int count, uint64_t* tile_mass) {
    WarpTeam const warp;
    uint64_t total = 0;
    for (int tile = team.rank() >> 5; tile < numTiles(count); tile += team.size() >> 5) {
        int const end = minOf(count, (tile + 1) << kTileShift);
        uint64_t sum = 0;
        for (int id = (tile << kTileShift) + warp.rank(); id < end; id += warp.size()) sum += mass(id);
        sum = warp.addU64(sum);
        if (warp.rank() == 0) {
            tile_mass[tile] = sum;
            total += sum;
        }
    }
    return team.addU64(total);  // its barriers also make tile_mass visible to all ranks
}

//! Copies masses that other blocks have published into shared memory and returns their sum.
__device__ inline uint64_t collectMasses(BlockTeam const& team, uint64_t const* published, int count, uint64_t* shared) {
    uint64_t mine = 0;
    for (int tile = team.rank(); tile < count; tile += team.size()) {
        // From L2: this SM's L1 may hold the line as it was before other blocks wrote to it.
        uint64_t const mass = __ldcg(reinterpret_cast<unsigned long long const*>(published) + tile);
        shared[tile] = mass;
        mine += mass;
    }
    return team.addU64(mine);  // its barriers also make `shared` visible to all ranks
}

}  // namespace dspark
