//! binary16 with round-to-nearest-even conversions, for tests/simt.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
    std::uint16_t bits;
};

inline float __half2float(__half h) {
    std::uint32_t const sign = static_cast<std::uint32_t>(h.bits & 0x8000u) << 16;
    std::uint32_t const exponent = (h.bits >> 10) & 0x1fu;
    std::uint32_t const mantissa = h.bits & 0x3ffu;
    float magnitude;
    if (exponent == 0) {
        magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        std::uint32_t word;
        std::memcpy(&word, &magnitude, 4);
        word |= sign;
        std::memcpy(&magnitude, &word, 4);
        return magnitude;
    }
    std::uint32_t const word = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
    std::memcpy(&magnitude, &word, 4);
    return magnitude;
}

inline __half __float2half_rn(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, 4);
    std::uint16_t const sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
    std::uint32_t const magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7fffu)};
    if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {  // subnormal result: adding 0.5 aligns the significand, rounding to nearest even
        float shifted;
        std::memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        std::uint32_t rounded;
        std::memcpy(&rounded, &shifted, 4);
        return {static_cast<std::uint16_t>(sign | (rounded - 0x3f000000u))};
    }
    std::uint32_t const odd = (magnitude >> 13) & 1u;
    return {static_cast<std::uint16_t>(sign | ((magnitude + 0xc8000fffu + odd) >> 13))};
}
