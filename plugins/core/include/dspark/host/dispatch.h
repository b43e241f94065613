#pragma once
//! Choice of the instruction set at run time.

#include "dspark/host/avx2.h"
#include "dspark/host/avx512.h"
#include "dspark/host/portable.h"

namespace dspark::host {

enum class SimdLevel : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

//! Best level this machine has.
inline SimdLevel bestLevel() {
#if defined(__x86_64__) && defined(__GNUC__)
    bool const avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool const avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    return avx512 ? SimdLevel::kAvx512 : avx2 ? SimdLevel::kAvx2 : SimdLevel::kPortable;
#else
    return SimdLevel::kPortable;
#endif
}

//! Kernels of a level; null when this build or machine lacks it.
inline Kernels const* kernelsOf(SimdLevel level) {
    if (level > bestLevel()) return nullptr;
#if defined(__x86_64__) && defined(__GNUC__)
    if (level == SimdLevel::kAvx512) return &avx512::kKernels;
    if (level == SimdLevel::kAvx2) return &avx2::kKernels;
#endif
    return &portable::kKernels;
}

}  // namespace dspark::host
