//! The part of CUDA C++ that the kernel sources use, on top of simt.h. Only on the include path of tests/simt.
#pragma once

#include "simt.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};

#define threadIdx (::simt::thread_index)
#define blockIdx (::simt::block_index)
#define blockDim (::simt::block_size)
#define gridDim (::simt::grid_size)

using cudaStream_t = void*;
enum cudaError_t : int {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchFailure = 719,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

inline char const* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : simt::lastError(); }

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
    return cudaSuccess;
}

template <class Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                             cudaStream_t) {
    Params const params = *static_cast<Params*>(arguments[0]);
    switch (simt::run([&] { kernel(params); }, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes)) {
        case simt::Outcome::kOk: return cudaSuccess;
        case simt::Outcome::kOutOfBounds: return cudaErrorIllegalAddress;
        default: return cudaErrorLaunchFailure;
    }
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

inline void __syncthreads() { simt::syncThreads(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::syncWarp(mask); }
inline void __threadfence() {}

namespace simt {
inline int lane() { return static_cast<int>(thread_index.x) & 31; }
template <class T>
T exchangeAs(unsigned mask, T value, int source) {
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    word = exchange(mask, word, source);
    T out;
    std::memcpy(&out, &word, sizeof(T));
    return out;
}
}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    return simt::exchangeAs(mask, value, source);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return simt::exchangeAs(mask, value, simt::lane() ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta) {
    int const source = simt::lane() - delta;
    return simt::exchangeAs(mask, value, source < 0 ? simt::lane() : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta) {
    int const source = simt::lane() + delta;
    return simt::exchangeAs(mask, value, source > 31 ? simt::lane() : source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return simt::ballot(mask, predicate != 0); }

// Threads run one at a time and never preempt each other, so plain operations are atomic.
template <class T>
T atomicAdd(T* address, T value) {
    T const old = *address;
    *address = old + value;
    return old;
}
template <class T>
T atomicMax(T* address, T value) {
    T const old = *address;
    *address = old < value ? value : old;
    return old;
}
template <class T>
T atomicOr(T* address, T value) {
    T const old = *address;
    *address = old | value;
    return old;
}

template <class T>
T __ldcg(T const* address) {
    return *address;
}

inline int __dp4a(int a, int b, int c) {
    for (int byte = 0; byte < 4; ++byte) {
        c += static_cast<int>(static_cast<std::int8_t>(a >> (8 * byte))) *
             static_cast<int>(static_cast<std::int8_t>(b >> (8 * byte)));
    }
    return c;
}
