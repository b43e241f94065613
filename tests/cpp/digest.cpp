//! Prints a digest of everything the shared algorithms compute on fixed inputs. Built by the host compiler and by nvcc;
//! both must print the same.

#include "scenario.h"

using namespace dspark;
using namespace dspark::test;

namespace {

uint64_t mix(uint64_t digest, uint64_t word) {
    digest ^= word + 0x9E3779B97F4A7C15u + (digest << 6) + (digest >> 2);
    return digest * 0xD6E8FEB86659FD93u;
}

}  // namespace

int main() {
    uint64_t digest = 1;
    std::vector<uint64_t> words;
    Random random(4);
    for (Shape const& shape : shapes()) {
        World const world(shape, 3);
        Buffers buffers(shape);
        runScenario(SerialTeam{}, world, paramsOf(&random), &buffers, &words);
    }
    std::vector<uint32_t> storage(4 * 20 * 7);
    std::vector<int32_t> lens(20);
    runSchedules(SerialTeam{}, 20, 7, 8, false, &storage, &lens, &words);
    runSchedules(SerialTeam{}, 20, 7, 9, true, &storage, &lens, &words);
    for (uint32_t i = 0; i < 100000; ++i) {
        uint32_t const word = static_cast<uint32_t>(random.bits());
        words.push_back(floatBits(exponentialExact(word)));
        words.push_back(floatBits(tanhExact(random.bell())));
    }
    for (uint64_t const word : words) digest = mix(digest, word);
    std::printf("%016llx %zu\n", static_cast<unsigned long long>(digest), words.size());
    return 0;
}
