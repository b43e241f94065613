//! Kernels that are wrong on purpose: what the host shim must catch. `planted` runs one of them by number.
#include "device.cuh"

namespace {

struct PlantedParams {
    int32_t kind;
    int32_t count;
    int32_t* data;
};

__global__ void plantedKernel(PlantedParams const p) {
    int32_t* const shared = reinterpret_cast<int32_t*>(dspark::sharedMemory());
    int const rank = static_cast<int>(threadIdx.x);
    if (p.kind == 0 || p.kind == 1) {  // reverses through shared memory; kind 1 lacks the barrier
        shared[rank] = p.data[rank];
        if (p.kind == 0) __syncthreads();
        p.data[rank] = shared[static_cast<int>(blockDim.x) - 1 - rank];
    } else if (p.kind == 2) {  // one element behind global memory
        p.data[rank + 1] = rank;
    } else if (p.kind == 3) {  // one element behind shared memory
        shared[rank + 1] = rank;
    } else if (p.kind == 4) {  // a shuffle that half the warp has left
        if (rank >= 16) return;
        p.data[rank] = __shfl_xor_sync(0xffffffffu, rank, 1);
    } else if (p.kind == 5) {  // half the warp waits for the block, the other half for the warp
        if (rank < 16) {
            __syncthreads();
        } else {
            __syncwarp(0xffffffffu);
        }
    }
}

}  // namespace

extern "C" int planted(int kind, int count, int32_t* data) {
    PlantedParams const params = {kind, count, data};
    unsigned const threads = static_cast<unsigned>(count);
    return static_cast<int>(dspark::launchKernel(plantedKernel, dim3(1), dim3(threads), threads * 4, nullptr, params).error);
}
