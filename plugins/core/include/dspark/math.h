#pragma once
//! Elementary functions with pinned bits (docs/core_numerics.md, section 2).

#include "dspark/hd.h"

namespace dspark {

constexpr float kLog2e = 0x1.715476p0f;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
constexpr float kExp2C1 = 0x1.62e43p-1f, kExp2C2 = 0x1.ebfbdcp-3f, kExp2C3 = 0x1.c6aee8p-5f;
constexpr float kExp2C4 = 0x1.3b2d4ap-7f, kExp2C5 = 0x1.5f3e2cp-10f, kExp2C6 = 0x1.41fd02p-13f;
constexpr float kLogD0 = 0x1.715476p+1f, kLogD1 = 0x1.ec6ff4p-1f, kLogD2 = 0x1.27a5ep-1f;
constexpr float kLogD3 = 0x1.9d1148p-2f, kLogD4 = 0x1.a048bcp-2f;

//! 2^x times 2^shift for |x| <= 126, x + shift inside the normal range; at most 1 ulp off.
DSPARK_HD inline float exp2Shifted(float x, int shift) {
    float const t = addRn(x, kMagic);
    float const f = subRn(x, subRn(t, kMagic));
    float y = kExp2C6;
    y = fmaRn(y, f, kExp2C5);
    y = fmaRn(y, f, kExp2C4);
    y = fmaRn(y, f, kExp2C3);
    y = fmaRn(y, f, kExp2C2);
    y = fmaRn(y, f, kExp2C1);
    y = fmaRn(y, f, 1.0f);
    return bitsFloat(floatBits(y) + ((floatBits(t) + static_cast<uint32_t>(shift)) << 23));
}

DSPARK_HD inline float exp2Exact(float x) { return exp2Shifted(x, 0); }

//! Exponential variate of mean 1 / ln 2 made of one random word, with full relative resolution near zero.
DSPARK_HD inline float exponentialExact(uint32_t word) {
    float s;
    float e;
    if (word < 0x80000000u) {
        float const x = mulRn(static_cast<float>(2u * word + 1u), 0x1p-33f);
        s = divRn(x, subRn(2.0f, x));
        e = 0.0f;
    } else {
        float const y = mulRn(static_cast<float>(2u * (0xffffffffu - word) + 1u), 0x1p-33f);
        uint32_t const bits = floatBits(y);
        int exponent = static_cast<int>(bits >> 23) - 127;
        float m = bitsFloat((bits & 0x7fffffu) | 0x3f800000u);
        if (m > 0x1.6a09e6p0f) {
            m = mulRn(m, 0.5f);
            ++exponent;
        }
        s = divRn(subRn(1.0f, m), addRn(1.0f, m));
        e = static_cast<float>(-exponent);
    }
    float const t = mulRn(s, s);
    float p = fmaRn(kLogD4, t, kLogD3);
    p = fmaRn(p, t, kLogD2);
    p = fmaRn(p, t, kLogD1);
    p = fmaRn(p, t, kLogD0);
    return fmaRn(s, p, e);
}

DSPARK_HD inline float sigmoidExact(float z) {
    if (isNan(z)) return z;
    float a = mulRn(z, -kLog2e);
    a = a < -126.0f ? -126.0f : (a > 126.0f ? 126.0f : a);
    return divRn(1.0f, addRn(1.0f, exp2Exact(a)));
}

DSPARK_HD inline float tanhExact(float z) { return fmaRn(2.0f, sigmoidExact(mulRn(2.0f, z)), -1.0f); }

//! Dot product in 16 virtual lanes and a fixed tree, so that any SIMD width of up to 16 gives the same bits.
DSPARK_HD inline float dot16(float const* a, float const* b, int n) {
    float lane[16] = {};
    int const whole = n & ~15;
    for (int begin = 0; begin < whole; begin += 16) {
        for (int c = 0; c < 16; ++c) lane[c] = fmaRn(a[begin + c], b[begin + c], lane[c]);
    }
    for (int c = 0; whole + c < n; ++c) lane[c] = fmaRn(a[whole + c], b[whole + c], lane[c]);
    for (int width = 8; width >= 1; width >>= 1) {
        for (int c = 0; c < width; ++c) lane[c] = addRn(lane[c], lane[c + width]);
    }
    return lane[0];
}

}  // namespace dspark
