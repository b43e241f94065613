//! What a launcher returns, and the element types that kernels take.
//!
//! Every launcher in this directory: checks what the host can see; allocates nothing, waits for nothing, reads no device
//! memory; sizes its grid by capacities alone, device counts gate the work, so that one captured CUDA graph serves every
//! fill of a bucket; treats zero requests or tokens as success; uses no floating-point atomics, so results are
//! deterministic; runs in order on the given stream.
#pragma once

#include "dspark/status.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace dspark {

enum class ElementType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };

//! `field` names the parameter at fault; `error` is CUDA's code when the launch itself failed.
struct LaunchStatus {
    Code code;
    char const* field;
    char const* expected;
    int64_t got;
    cudaError_t error;
    bool ok() const { return code == Code::kOk && error == cudaSuccess; }
};

inline LaunchStatus launched(cudaError_t error) { return {Code::kOk, "", "", 0, error}; }
inline LaunchStatus launchOk() { return launched(cudaSuccess); }
inline LaunchStatus refused(char const* field, char const* expected, int64_t got) {
    return {Code::kBadArgument, field, expected, got, cudaSuccess};
}

inline std::string launchStatusText(LaunchStatus const& status) {
    if (status.error != cudaSuccess) {
        return std::string("launch failed: ") + cudaGetErrorString(status.error);
    }
    if (status.code == Code::kOk) {
        return "ok";
    }
    return std::string(status.field) + ": expected " + status.expected + ", got " + std::to_string(status.got);
}

//! Arrays that kernels read in 16-byte words must begin at a multiple of 16.
inline bool isAligned16(void const* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

//! Bytes per element.
inline int64_t elementBytes(ElementType type) {
    switch (type) {
        case ElementType::kFloat32: return 4;
        case ElementType::kFloat16:
        case ElementType::kBFloat16: return 2;
        case ElementType::kInt8: return 1;
    }
    return 0;
}

}  // namespace dspark
