//! The shared algorithms give the same bits on teams of 1, 3, 32 and 256 threads and on the SIMD host team.

#include "dspark/host/host_team.h"
#include "scenario.h"
#include "thread_team.h"

using namespace dspark;
using namespace dspark::test;

namespace {

template <class Team>
std::vector<uint64_t> scenarioOn(Team const& team, World const& world, RequestParams const& params) {
    Buffers buffers(world.shape);
    std::vector<uint64_t> words;
    runScenario(team, world, params, &buffers, &words);
    return words;
}

std::vector<uint64_t> scenarioOnThreads(int size, World const& world, RequestParams const& params) {
    Buffers buffers(world.shape);
    std::vector<uint64_t> words;
    runTeam(size, [&](ThreadTeam const& team) { runScenario(team, world, params, &buffers, &words); });
    return words;
}

void testScenarios() {
    host::FilterScratch scratch;
    Random random(77);
    int number = 0;
    for (Shape const& shape : shapes()) {
        World const world(shape, static_cast<uint64_t>(number));
        for (int repeat = 0; repeat < 20; ++repeat) {
            RequestParams const params = paramsOf(&random);
            std::vector<uint64_t> const expected = scenarioOn(SerialTeam{}, world, params);
            CHECK(!expected.empty());
            for (host::SimdLevel const level :
                 {host::SimdLevel::kPortable, host::SimdLevel::kAvx2, host::SimdLevel::kAvx512}) {
                if (host::Kernels const* const kernels = host::kernelsOf(level)) {
                    CHECK(scenarioOn(HostTeam(kernels, &scratch), world, params) == expected);
                }
            }
            if (repeat == 0) CHECK(scenarioOnThreads(3, world, params) == expected);
            if (repeat == 1) CHECK(scenarioOnThreads(32, world, params) == expected);
            if (repeat == 2 && number % 5 == 0) CHECK(scenarioOnThreads(256, world, params) == expected);
        }
        ++number;
    }
}

void testSchedules() {
    for (int number = 0; number < 24; ++number) {
        Random random(static_cast<uint64_t>(number));
        int const requests = 1 + random.below(number % 3 == 0 ? 40 : 9), gamma = 1 + random.below(8);
        size_t const cells = static_cast<size_t>(requests) * static_cast<size_t>(gamma);
        std::vector<uint32_t> storage(4 * cells);
        std::vector<int32_t> lens(static_cast<size_t>(requests));
        std::vector<uint64_t> expected;
        uint64_t const seed = static_cast<uint64_t>(1000 + number);
        runSchedules(SerialTeam{}, requests, gamma, seed, number % 2 == 0, &storage, &lens, &expected);
        for (int const size : {1, 3, 32, 256}) {
            if (size == 256 && number > 3) continue;
            std::vector<uint64_t> words;
            runTeam(size, [&](ThreadTeam const& team) {
                runSchedules(team, requests, gamma, seed, number % 2 == 0, &storage, &lens, &words);
            });
            CHECK(words == expected);
        }
    }
}

void testPacking() {
    int32_t const anchors[] = {10, 20, 30}, drafts[] = {11, 12, 21, 22, 31, 32}, lens[] = {2, 0, 1};
    int32_t const positions[] = {5, 6, 7};
    int32_t cu[4], ids[8], requests[8], places[8];
    PackInput<int32_t> const in = {3, 2, 8, anchors, drafts, lens, positions};
    PackOutput<int32_t> const out = {cu, ids, requests, places};
    int32_t const expected_ids[] = {10, 11, 12, 20, 30, 31, 0, 0}, expected_requests[] = {0, 0, 0, 1, 2, 2, -1, -1};
    for (int const size : {1, 3, 32}) {
        for (int32_t& id : ids) id = 77;
        runTeam(size, [&](ThreadTeam const& team) { packTokens(team, in, out); });
        for (int row = 0; row < 8; ++row) {
            CHECK(ids[row] == expected_ids[row]);
            CHECK(requests[row] == expected_requests[row]);
        }
        CHECK(cu[0] == 0 && cu[1] == 3 && cu[2] == 4 && cu[3] == 6);
        CHECK(places[2] == 7 && places[6] == -1);
    }
}

}  // namespace

int main() {
    testScenarios();
    testSchedules();
    testPacking();
    return report("teams");
}
