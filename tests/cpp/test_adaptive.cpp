//! Statistics and standings of requests, on exact-size heap arrays, so that a sanitizer sees any access beyond them.

#include <cmath>

#include "check.h"
#include "dspark/host/block_statistics.h"
#include "dspark/host/standings.h"

using namespace dspark;
using namespace dspark::test;
using host::BlockStatistics;
using host::Standings;

namespace {

constexpr host::BlockRules kRules = {0.9, 0.98, 4.0, 0.98, 1.0, 2.0, 1.5, 0.95, 6.0, 1.0};
constexpr host::RestRules kRest = {0.0, 0.03, -0.1, 0.1, 8, 4};

std::vector<float> levels(int count) {
    std::vector<float> values;
    for (int c = 1; c <= count; ++c) values.push_back(static_cast<float>(c) / static_cast<float>(count));
    return values;
}

//! A pass that costs `rise` more for every token.
std::vector<float> line(int requests, int gamma, float rise) {
    std::vector<float> curve;
    for (int tokens = 0; tokens <= requests * (gamma + 1); ++tokens) {
        curve.push_back(100.0f + rise * static_cast<float>(std::max(tokens, requests) - requests));
    }
    return curve;
}

void testHistories(int gamma, int num_thresholds, bool odd) {
    Random random(static_cast<uint64_t>(gamma * 100 + num_thresholds));
    std::vector<float> const thresholds = levels(num_thresholds);
    BlockStatistics statistics(gamma, thresholds, kRules);
    Standings standings(kRest);
    float const strange[] = {bitsFloat(0x7fc00000u), bitsFloat(0x7f800000u), -1.0f, 3.0f, 0.0f};
    for (int round = 0; round < 60; ++round) {
        int64_t const num_rows = statistics.numRows();
        if (num_rows < 20) {
            statistics.reset(num_rows);
            standings.reset(num_rows);
        } else {
            int64_t const row = random.below(20);
            statistics.reset(row);
            standings.reset(row);
            CHECK(statistics.blocks(row) == 0.0);
        }
        std::vector<int64_t> rows, caps, lens, accepted;
        for (int64_t row = 0; row < statistics.numRows(); ++row) {
            if (random.below(3) == 0) continue;
            rows.push_back(row);
            caps.push_back(random.below(gamma + 1));
            lens.push_back(random.below(gamma + 1));
            accepted.push_back(random.below(static_cast<int>(lens.back()) + 1));
        }
        std::vector<float> confidence(rows.size() * static_cast<size_t>(gamma));
        for (float& c : confidence) c = odd && random.below(4) == 0 ? strange[random.below(5)] : random.uniform();
        statistics.add(static_cast<int64_t>(rows.size()), rows.data(), confidence.data(), lens.data(), accepted.data());
        if (statistics.empty()) continue;
        std::vector<double> gains(rows.size()), blocks(rows.size()), more(2 * rows.size());
        int const count = static_cast<int>(rows.size());
        std::vector<float> const curve = line(count, gamma, 3.0f);
        host::BatchWorth const worth = {gains.data(), more.data(), more.data() + count};
        statistics.evaluate(rows.data(), caps.data(), {count, curve.data(), 20.0}, worth);
        for (size_t i = 0; i < rows.size(); ++i) {
            blocks[i] = statistics.blocks(rows[i]);
            CHECK(blocks[i] >= 1.0 && blocks[i] < 10.0);
            float const chosen = statistics.threshold(rows[i], -1.0f);
            CHECK(std::find(thresholds.begin(), thresholds.end(), chosen) != thresholds.end());
            CHECK(odd || (gains[i] > -1.0 && gains[i] < kRules.max_ratio * gamma));
        }
        std::vector<int64_t> resting(rows.size());
        host::RoundVerdict const verdict =
            standings.judge({count, rows.data(), caps.data(), gains.data(), blocks.data()}, resting.data());
        CHECK(verdict.num_resting <= verdict.num_judged && verdict.num_judged <= count);
        for (int64_t i = 0; i < verdict.num_resting; ++i) {
            int64_t const place = resting[static_cast<size_t>(i)];
            CHECK(place >= 0 && place < count && caps[static_cast<size_t>(place)] > 0);
        }
    }
}

void testKnownGains() {
    BlockStatistics statistics(3, levels(4), kRules);
    statistics.reset(0);
    statistics.reset(1);
    CHECK(statistics.threshold(0, 0.7f) == 0.7f);
    int64_t const rows[] = {0, 1}, caps[] = {3, 0}, lens[] = {3, 3}, accepted[] = {3, 3};
    std::vector<float> const sure(6, 1.0f);
    for (int block = 0; block < 50; ++block) statistics.add(2, rows, sure.data(), lens, accepted);
    CHECK(statistics.acceptedRatio() == 1.0);
    double gains[2], tokens[2], us[2];
    host::BatchWorth const worth = {gains, tokens, us};
    // Free drafts that are all accepted: four tokens in the time of one.
    std::vector<float> const level = line(2, 3, 0.0f);
    host::BatchMeans const free = statistics.evaluate(rows, caps, {2, level.data(), 0.0}, worth);
    CHECK(std::fabs(gains[0] - 3.0) < 1e-9 && std::fabs(gains[1] - 3.0) < 1e-9);
    CHECK(std::fabs(tokens[0] - 3.0) < 1e-9 && us[0] == 0.0);
    CHECK(free.gain == gains[0] && free.threshold == 1.0);
    // A draft as dear as the pass halves that; drafts that cost twice a pass each are not worth anything.
    std::vector<float> const dear = line(2, 3, 200.0f);
    statistics.evaluate(rows, caps, {2, level.data(), 100.0}, worth);
    CHECK(std::fabs(gains[0] - 1.0) < 1e-9);
    statistics.evaluate(rows, caps, {2, dear.data(), 0.0}, worth);
    CHECK(gains[0] < -0.4);
}

//! Judge one request with a gain; return whether it rests.
bool rests(Standings* standings, double gain, double blocks) {
    int64_t const row = 0, cap = 1;
    int64_t resting = -1;
    return standings->judge({1, &row, &cap, &gain, &blocks}, &resting).num_resting == 1;
}

void testStandings() {
    Standings standings(kRest);
    auto const speculating = [&] {
        standings.reset(0);
        standings.meet(0);
    };
    standings.reset(0);
    CHECK(rests(&standings, -0.01, 0.0) && rests(&standings, 0.02, 3.0) && !rests(&standings, 0.04, 3.0));
    speculating();
    for (int round = 1; round < 8; ++round) CHECK(!rests(&standings, -0.01, 3.0));
    CHECK(rests(&standings, -0.01, 3.0));
    speculating();
    CHECK(!rests(&standings, -0.2, 3.0));
    CHECK(rests(&standings, -0.2, 3.0));
    speculating();
    for (int round = 0; round < 30; ++round) CHECK(!rests(&standings, -0.2, 0.0));
    int64_t const row = 0, cap = 0;
    double const gain = -0.5, blocks = 3.0;
    host::RoundVerdict const nobody = standings.judge({1, &row, &cap, &gain, &blocks}, nullptr);
    CHECK(nobody.num_judged == 0 && nobody.num_resting == 0 && !nobody.entered && !nobody.fresh);
}

}  // namespace

int main() {
    for (int const gamma : {1, 7, kMaxDraftLen}) {
        for (int const num_thresholds : {1, 18, host::kMaxThresholds}) {
            testHistories(gamma, num_thresholds, false);
            testHistories(gamma, num_thresholds, true);
        }
    }
    testKnownGains();
    testStandings();
    return report("adaptive");
}
