#pragma once
//! Philox4x32-10 and the keying of the random streams (docs/core_numerics.md, section 1).
//! Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

#include "dspark/hd.h"

namespace dspark {

enum Stream : uint32_t {
    kStreamDraft = 0,
    kStreamAccept = 1,
    kStreamResidual = 2,
    kStreamBonus = 3,
    kStreamCoupledTile = 4,
    kStreamCoupledToken = 5,
};

struct PhiloxBlock {
    uint32_t word[4];
};

DSPARK_HD inline PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
    uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
    for (int round = 0; round < 10; ++round) {
        uint64_t const product0 = static_cast<uint64_t>(0xD2511F53u) * c0;
        uint64_t const product1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(product1);
        c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(product0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

//! One block of a request's stream; `position` is absolute and < 2^56.
DSPARK_HD inline PhiloxBlock streamBlock(uint64_t seed, uint64_t position, Stream stream, uint32_t block) {
    uint32_t const high = (static_cast<uint32_t>(position >> 32) & 0xffffffu) | (static_cast<uint32_t>(stream) << 24);
    return philox4x32({{block, static_cast<uint32_t>(position), high, 0u}}, static_cast<uint32_t>(seed),
                      static_cast<uint32_t>(seed >> 32));
}

DSPARK_HD inline uint64_t streamBits64(uint64_t seed, uint64_t position, Stream stream, uint32_t block) {
    PhiloxBlock const out = streamBlock(seed, position, stream, block);
    return static_cast<uint64_t>(out.word[0]) | (static_cast<uint64_t>(out.word[1]) << 32);
}

//! Uniform in [0, 1) with 53 bits.
DSPARK_HD inline double unit53(uint64_t bits) {
    return mulRn(static_cast<double>(bits >> 11), 1.1102230246251565e-16);  // 2^-53
}

}  // namespace dspark
