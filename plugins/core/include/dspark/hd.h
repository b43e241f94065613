#pragma once
//! Host/device qualifiers and pinned arithmetic: every operation is one correctly rounded IEEE 754 operation.
//!
//! A compiler may fuse a plain `a * b + c` (nvcc does by default), so code whose bits matter writes mulRn, addRn, fmaRn.
//! Host code must be compiled with -ffp-contract=off and without -ffast-math; device code without --use_fast_math.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DSPARK_HD __host__ __device__
// Templates shared by host-only and device teams would otherwise warn for each host-only instantiation.
#define DSPARK_TEAM _Pragma("nv_exec_check_disable")
#else
#define DSPARK_HD
#define DSPARK_TEAM
#endif

#if defined(__FAST_MATH__)
#error "dspark/core needs exact IEEE arithmetic: compile without -ffast-math"
#endif

namespace dspark {

#if defined(__CUDA_ARCH__)
DSPARK_HD inline float mulRn(float a, float b) { return __fmul_rn(a, b); }
DSPARK_HD inline float addRn(float a, float b) { return __fadd_rn(a, b); }
DSPARK_HD inline float subRn(float a, float b) { return __fsub_rn(a, b); }
DSPARK_HD inline float divRn(float a, float b) { return __fdiv_rn(a, b); }
DSPARK_HD inline float fmaRn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DSPARK_HD inline double mulRn(double a, double b) { return __dmul_rn(a, b); }
DSPARK_HD inline double addRn(double a, double b) { return __dadd_rn(a, b); }
DSPARK_HD inline double subRn(double a, double b) { return __dsub_rn(a, b); }
DSPARK_HD inline double divRn(double a, double b) { return __ddiv_rn(a, b); }
DSPARK_HD inline uint64_t mulHi64(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
DSPARK_HD inline uint32_t floatBits(float x) { return __float_as_uint(x); }
DSPARK_HD inline float bitsFloat(uint32_t x) { return __uint_as_float(x); }
DSPARK_HD inline uint64_t doubleBits(double x) { return static_cast<uint64_t>(__double_as_longlong(x)); }
#else
DSPARK_HD inline float mulRn(float a, float b) { return a * b; }
DSPARK_HD inline float addRn(float a, float b) { return a + b; }
DSPARK_HD inline float subRn(float a, float b) { return a - b; }
DSPARK_HD inline float divRn(float a, float b) { return a / b; }
DSPARK_HD inline float fmaRn(float a, float b, float c) { return std::fma(a, b, c); }
DSPARK_HD inline double mulRn(double a, double b) { return a * b; }
DSPARK_HD inline double addRn(double a, double b) { return a + b; }
DSPARK_HD inline double subRn(double a, double b) { return a - b; }
DSPARK_HD inline double divRn(double a, double b) { return a / b; }

//! High 64 bits of the 128-bit product.
DSPARK_HD inline uint64_t mulHi64(uint64_t a, uint64_t b) {
    uint64_t const a_lo = a & 0xffffffffu, a_hi = a >> 32, b_lo = b & 0xffffffffu, b_hi = b >> 32;
    uint64_t const mid = a_hi * b_lo + ((a_lo * b_lo) >> 32);
    uint64_t const mid2 = a_lo * b_hi + (mid & 0xffffffffu);
    return a_hi * b_hi + (mid >> 32) + (mid2 >> 32);
}

DSPARK_HD inline uint32_t floatBits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}
DSPARK_HD inline float bitsFloat(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
DSPARK_HD inline uint64_t doubleBits(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}
#endif

DSPARK_HD inline bool isNan(float x) { return (floatBits(x) & 0x7fffffffu) > 0x7f800000u; }
DSPARK_HD inline bool isFinite(float x) { return (floatBits(x) & 0x7f800000u) != 0x7f800000u; }

//! Nearest integer (ties to even) of 0 <= x < 2^63. Above 2^23 a binary32 is an integer already.
DSPARK_HD inline uint64_t roundU64(float x) {
    float const magic = 8388608.0f;  // 2^23
    return static_cast<uint64_t>(x < magic ? subRn(addRn(x, magic), magic) : x);
}

//! Nearest integer (ties to even) of 0 <= x < 2^52.
DSPARK_HD inline int64_t roundI64(double x) {
    double const magic = 4503599627370496.0;  // 2^52
    return static_cast<int64_t>(subRn(addRn(x, magic), magic));
}

//! Nearest integer (ties to even) of |x| < 2^22.
DSPARK_HD inline int32_t roundI32(float x) {
    float const magic = 12582912.0f;  // 1.5 * 2^23
    return static_cast<int32_t>(subRn(addRn(x, magic), magic));
}

template <class T>
DSPARK_HD inline T minOf(T a, T b) {
    return b < a ? b : a;
}
template <class T>
DSPARK_HD inline T maxOf(T a, T b) {
    return a < b ? b : a;
}

}  // namespace dspark
