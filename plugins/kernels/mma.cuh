//! Tensor-core tiles and asynchronous copies, each with one host twin for tests/simt.
#pragma once

#include "device.cuh"

namespace dspark {

//! Two elements in one register, the lower one in the low half.
template <class T>
__device__ inline uint32_t packPair(T low, T high) {
    uint16_t bits[2];
    memcpy(&bits[0], &low, 2);
    memcpy(&bits[1], &high, 2);
    return static_cast<uint32_t>(bits[0]) | (static_cast<uint32_t>(bits[1]) << 16);
}

//! c += a b for 16 x 8 x 16 tiles of T with float32 accumulation (mma.m16n8k16, row by column).
template <class T>
__device__ void mma16816(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]);

#if defined(DSPARK_SIMT)

template <class T>
__device__ inline void mma16816(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    T halves_a[8], halves_b[4];
    memcpy(halves_a, a, sizeof(halves_a));
    memcpy(halves_b, b, sizeof(halves_b));
    float floats_a[8], floats_b[4];
    for (int i = 0; i < 8; ++i) floats_a[i] = toFloat(halves_a[i]);
    for (int i = 0; i < 4; ++i) floats_b[i] = toFloat(halves_b[i]);
    simt::mma16816(c, floats_a, floats_b);
}

__device__ inline void copyAsync16(void* shared, void const* global) { memcpy(shared, global, 16); }
__device__ inline void waitCopies() {}

#else

template <>
__device__ inline void mma16816<__half>(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void mma16816<__nv_bfloat16>(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

//! Starts a 16-byte copy into shared memory; visible to this thread after waitCopies, to others after a barrier.
__device__ inline void copyAsync16(void* shared, void const* global) {
    unsigned const address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(global) : "memory");
}
__device__ inline void waitCopies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

#endif

}  // namespace dspark
