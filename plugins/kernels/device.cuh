//! What kernel bodies need from the device: element loads, dynamic shared memory, launching.
//!
//! Kernel sources use only CUDA C++ that the host shim of tests/simt can also provide; the two places where that is not
//! possible (shared memory, mma) ask for DSPARK_SIMT.
#pragma once

#include "launch_status.h"

#include "dspark/hd.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if defined(DSPARK_SIMT)
#include "simt.h"
#endif

namespace dspark {

//! Start of the block's dynamic shared memory, 16-byte aligned.
__device__ inline unsigned char* sharedMemory() {
#if defined(DSPARK_SIMT)
    return simt::sharedMemory();
#else
    extern __shared__ uint4 dspark_shared[];
    return reinterpret_cast<unsigned char*>(dspark_shared);
#endif
}

__device__ inline float toFloat(float x) { return x; }
__device__ inline float toFloat(__half x) { return __half2float(x); }
__device__ inline float toFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T fromFloat(float x);
template <>
__device__ inline float fromFloat<float>(float x) {
    return x;
}
template <>
__device__ inline __half fromFloat<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 fromFloat<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

//! A logit row of any float type, read one element at a time. The type is uniform in a launch.
struct LogitRow {
    void const* data;
    ElementType type;
    __device__ float operator[](int id) const {
        if (type == ElementType::kFloat32) return static_cast<float const*>(data)[id];
        if (type == ElementType::kFloat16) return toFloat(static_cast<__half const*>(data)[id]);
        return toFloat(static_cast<__nv_bfloat16 const*>(data)[id]);
    }
};

//! Row `row` of a matrix of logits whose rows are `stride` elements apart.
__device__ inline LogitRow logitRow(void const* data, ElementType type, int64_t row, int64_t stride) {
    int64_t const bytes = type == ElementType::kFloat32 ? 4 : 2;
    return {static_cast<unsigned char const*>(data) + row * stride * bytes, type};
}

//! Eight consecutive elements beginning at id; 16-byte loads when the row allows them, lanes at or beyond `count` are
//! not read and hold `fill`.
struct Eight {
    float value[8];
};

template <class T>
__device__ inline void unpackEight(uint4 const& word, float* out) {
    T element[8];
    memcpy(element, &word, sizeof(element));
    for (int lane = 0; lane < 8; ++lane) out[lane] = toFloat(element[lane]);
}

__device__ inline Eight loadEight(LogitRow const& row, int id, int count, bool aligned, float fill) {
    Eight out;
    if (aligned && id + 8 <= count) {
        if (row.type == ElementType::kFloat32) {
            float4 const* const at = reinterpret_cast<float4 const*>(static_cast<float const*>(row.data) + id);
            float4 const low = at[0], high = at[1];
            out = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
        } else {
            uint4 const word = *reinterpret_cast<uint4 const*>(static_cast<unsigned char const*>(row.data) +
                                                               static_cast<int64_t>(id) * 2);
            if (row.type == ElementType::kFloat16) {
                unpackEight<__half>(word, out.value);
            } else {
                unpackEight<__nv_bfloat16>(word, out.value);
            }
        }
    } else {
        for (int lane = 0; lane < 8; ++lane) out.value[lane] = id + lane < count ? row[id + lane] : fill;
    }
    return out;
}

//! Whether loadEight may use 16-byte loads for every row of a matrix.
inline bool rowsAligned(void const* data, ElementType type, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * elementBytes(type) % 16 == 0;
}

//! Launches `kernel(params)`; raises the kernel's dynamic shared memory limit when it needs more than the default.
template <class Params>
LaunchStatus launchKernel(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                          Params params) noexcept {
    if (shared_bytes > 48 * 1024) {
        cudaError_t const raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        static_cast<int>(shared_bytes));
        if (raised != cudaSuccess) return launched(raised);
    }
    void* arguments[] = {&params};
    return launched(cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream));
}

}  // namespace dspark
