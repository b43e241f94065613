#pragma once

#include "device.cuh"

namespace dspark {

//! Request whose packed rows hold `token`, or -1 at or beyond cu_tokens[R].
__device__ inline int32_t requestOfToken(int32_t const* cu_tokens, int32_t num_requests, int32_t token) {
    if (token >= cu_tokens[num_requests]) return -1;
    int32_t low = 0, high = num_requests;  // last request with cu_tokens[request] <= token
    while (high - low > 1) {
        int32_t const middle = (low + high) >> 1;
        if (cu_tokens[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace dspark
