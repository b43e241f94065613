//! The team concept of plugins/core on a device: a warp or a block runs one algorithm together.
#pragma once

#include "device.cuh"

#include "dspark/pivot.h"

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

//! All threads of a one-dimensional block; both arrays are shared memory.
struct BlockTeam {
    uint64_t* scratch;  // [32], kBlockTeamBytes
    uint64_t* list;     // [kTeamList] and a counter for pivot searches, kTeamListBytes; null where none happens

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
constexpr int kTeamList = 2048;
constexpr int kTeamListBytes = (kTeamList + 2) * 8;  // and a counter

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

//! The team of a block whose shared memory begins with kBlockTeamBytes of scratch.
__device__ inline BlockTeam blockTeam() { return {reinterpret_cast<uint64_t*>(sharedMemory()), nullptr}; }

//! The same with a list behind the scratch: kBlockTeamBytes + kTeamListBytes in all.
__device__ inline BlockTeam searchingTeam() {
    uint64_t* const scratch = reinterpret_cast<uint64_t*>(sharedMemory());
    return {scratch, scratch + kBlockTeamBytes / 8};
}
constexpr int kSearchingTeamBytes = kBlockTeamBytes + kTeamListBytes;

//! Largest key such that the weights of the entries with key >= it reach `need`: 32 halvings, as pivotKey of the core.
template <class Keys, class Weights>
__device__ uint32_t descendKeys(BlockTeam const& team, int count, Keys const& key_at, Weights const& weight_at,
                                uint64_t need) {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; --bit) {
        uint32_t const trial = key | (1u << bit);
        uint64_t sum = 0;
        for (int entry = team.rank(); entry < count; entry += team.size()) {
            if (key_at(entry) >= trial) sum += weight_at(entry);
        }
        if (team.addU64(sum) >= need) key = trial;
    }
    return key;
}

template <class Row>
struct RowKeys {
    Row const& row;
    __device__ uint32_t operator()(int id) const { return orderedKey(row[id]); }
};

//! A key in the upper and an id in the lower half of each word.
struct ListKeys {
    uint64_t const* list;
    __device__ uint32_t operator()(int entry) const { return static_cast<uint32_t>(list[entry] >> 32); }
};
template <class Weight>
struct ListWeights {
    uint64_t const* list;
    Weight const& weight;
    __device__ uint64_t operator()(int entry) const { return weight(static_cast<int>(static_cast<uint32_t>(list[entry]))); }
};

//! A key that about four entries a thread reach: nearly the smallest of the threads' own largest keys.
template <class Row>
__device__ uint32_t listBound(BlockTeam const& team, Row const& row, int count) {
    uint32_t own = 0;
    for (int id = team.rank(); id < count; id += team.size()) own = maxOf(own, orderedKey(row[id]));
    team.list[team.rank()] = (static_cast<uint64_t>(own) << 32) | static_cast<uint32_t>(team.rank());
    team.sync();  // own keys visible
    int above = 0;
    for (int thread = 0; thread < team.size(); ++thread) above += team.list[thread] > team.list[team.rank()] ? 1 : 0;
    bool const chosen = above == team.size() - 1 - team.size() / 64;
    uint64_t const bound = team.maxU64(chosen ? own : 0);  // its barriers end the reads of the list
    return static_cast<uint32_t>(bound);
}

//! pivotKey of plugins/core for a block: the halvings run over a short list of the largest entries whenever their weights
//! reach `need`, which makes it two passes over the row instead of 32. Same key.
template <class Row, class Weight>
__device__ uint32_t pivotKey(BlockTeam const& team, Row const& row, int count, Weight const& weight, uint64_t need) {
    uint32_t const bound = count <= kTeamList ? 0 : listBound(team, row, count);
    int32_t* const counter = reinterpret_cast<int32_t*>(team.list + kTeamList);
    if (team.rank() == 0) *counter = 0;
    team.sync();  // the counter is zero
    uint64_t total = 0;
    for (int id = team.rank(); id < count; id += team.size()) {
        uint32_t const key = orderedKey(row[id]);
        if (key < bound) continue;
        int const at = atomicAdd(counter, 1);
        if (at < kTeamList) {
            team.list[at] = (static_cast<uint64_t>(key) << 32) | static_cast<uint32_t>(id);
            total += weight(id);
        }
    }
    total = team.addU64(total);  // its barriers also make list and counter visible
    int const listed = *counter;  // beyond kTeamList when they did not fit
    uint32_t pivot;
    if (listed <= kTeamList && total >= need) {
        pivot = descendKeys(team, listed, ListKeys{team.list}, ListWeights<Weight>{team.list, weight}, need);
    } else {
        pivot = descendKeys(team, count, RowKeys<Row>{row}, weight, need);
    }
    team.sync();  // the list may be overwritten
    return pivot;
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
