//! bfloat16 with round-to-nearest-even conversions, for tests/simt.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    std::uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 b) {
    std::uint32_t const word = static_cast<std::uint32_t>(b.bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, 4);
    if ((word & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    word += 0x7fffu + ((word >> 16) & 1u);
    return {static_cast<std::uint16_t>(word >> 16)};
}
