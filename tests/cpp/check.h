#pragma once
//! Assertions that keep going, and the random inputs of these tests.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "dspark/philox.h"

namespace dspark::test {

inline int failures = 0;

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            ++dspark::test::failures;                                                \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);      \
        }                                                                            \
    } while (0)

//! Exit code of a test program.
inline int report(char const* name) {
    std::printf("%s: %s\n", name, failures == 0 ? "passed" : "FAILED");
    return failures == 0 ? 0 : 1;
}

//! Deterministic numbers from Philox, so that every compiler sees the same inputs.
class Random {
public:
    explicit Random(uint64_t seed) : seed_(seed) {}
    uint64_t bits() { return streamBits64(seed_, counter_++, kStreamBonus, 0); }
    int below(int limit) { return static_cast<int>(bits() % static_cast<uint64_t>(limit)); }
    float uniform() { return static_cast<float>(static_cast<double>(bits() >> 40) / 16777216.0); }
    //! Roughly bell shaped, with ties when `coarse`.
    float bell(bool coarse = false) {
        float const x = (uniform() + uniform() + uniform() - 1.5f) * 6.0f;
        return coarse ? static_cast<float>(static_cast<int>(x * 2.0f)) * 0.5f : x;
    }
    std::vector<float> bells(size_t count, float scale = 1.0f) {
        std::vector<float> values(count);
        for (float& value : values) value = bell() * scale;
        return values;
    }
    //! Logits with ties, both zeros, far tails and -inf; entry 0 is finite.
    std::vector<float> logits(size_t count) {
        std::vector<float> values(count);
        for (float& value : values) {
            int const kind = below(20);
            value = kind == 0 ? -0.0f : kind == 1 ? bitsFloat(0xff800000u) : kind == 2 ? bell() - 40.0f : bell(kind < 8);
        }
        if (count > 0) values[0] = 0.25f;
        return values;
    }

private:
    uint64_t seed_;
    uint64_t counter_ = 0;
};

}  // namespace dspark::test
