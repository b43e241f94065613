//! What mode adaptive keeps and decides, on exact-size heap arrays, so that a sanitizer sees any access beyond them.

#include <cmath>

#include "check.h"
#include "dspark/host/adaptive_round.h"
#include "dspark/host/cost_drift.h"

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
        int const count = static_cast<int>(rows.size());
        CHECK(statistics.add({count, rows.data(), nullptr, confidence.data(), lens.data(), accepted.data()}) == count);
        if (statistics.empty()) continue;
        std::vector<float> const curve = line(count, gamma, 3.0f);
        statistics.evaluate(rows.data(), caps.data(), {count, curve.data(), 1.0f, 1.0f, 20.0});
        for (size_t i = 0; i < rows.size(); ++i) {
            double const blocks = statistics.blocks(rows[i]), gain = statistics.worth(rows[i]).gain;
            CHECK(blocks >= 1.0 && blocks < 10.0);
            float const chosen = statistics.threshold(rows[i], -1.0f);
            CHECK(std::find(thresholds.begin(), thresholds.end(), chosen) != thresholds.end());
            CHECK(odd || (gain > -1.0 && gain < kRules.max_ratio * gamma));
        }
        std::vector<int64_t> allowed(rows.size()), lengths(rows.size());
        host::RoundVerdict const verdict =
            host::judgeRound({count, rows.data(), caps.data()}, statistics, &standings, allowed.data());
        CHECK(verdict.num_resting <= verdict.num_judged && verdict.num_judged <= count && verdict.span <= count);
        int64_t const budget = random.below(count * gamma + 1), probed = random.below(20);
        host::verifyLens({count, rows.data(), allowed.data()}, statistics, {confidence.data(), 0.5f, budget, probed},
                         lengths.data());
        int64_t num_resting = 0, sum = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            CHECK(allowed[i] == 0 || allowed[i] == caps[i]);
            CHECK(lengths[i] >= 0 && lengths[i] <= allowed[i]);
            num_resting += allowed[i] != caps[i];
            sum += lengths[i];
        }
        CHECK(num_resting == verdict.num_resting && sum <= budget);
    }
}

void testKnownGains() {
    BlockStatistics statistics(3, levels(4), kRules);
    statistics.reset(0);
    statistics.reset(1);
    CHECK(statistics.threshold(0, 0.7f) == 0.7f);
    int64_t const rows[] = {0, 1}, caps[] = {3, 0}, lens[] = {3, 3}, accepted[] = {3, 3};
    std::vector<float> const sure(6, 1.0f);
    for (int block = 0; block < 50; ++block) statistics.add({2, rows, nullptr, sure.data(), lens, accepted});
    CHECK(statistics.acceptedRatio() == 1.0);
    host::Worth const &first = statistics.worth(0), &second = statistics.worth(1);
    // Free drafts that are all accepted: four tokens in the time of one.
    std::vector<float> const level = line(2, 3, 0.0f);
    host::BatchMeans const free = statistics.evaluate(rows, caps, {2, level.data(), 1.0f, 1.0f, 0.0});
    CHECK(std::fabs(first.gain - 3.0) < 1e-9 && std::fabs(second.gain - 3.0) < 1e-9);
    CHECK(std::fabs(first.extra_tokens - 3.0) < 1e-9 && first.more_us == 0.0);
    CHECK(free.gain == first.gain && free.threshold == 1.0);
    // A draft as dear as the pass halves that; drafts that cost twice a pass each are not worth anything.
    statistics.evaluate(rows, caps, {2, level.data(), 1.0f, 1.0f, 100.0});
    CHECK(std::fabs(first.gain - 1.0) < 1e-9);
    // Nor are those of a table that is twice too low for a pass, and for what drafts add 200 times.
    std::vector<float> const dear = line(2, 3, 2.0f);
    statistics.evaluate(rows, caps, {2, dear.data(), 2.0f, 200.0f, 0.0});
    CHECK(first.gain < -0.4);
    // Nothing is learned of who has ended, did not draft or was refused.
    int64_t const gone[] = {-1, 1}, refused[] = {3, -1};
    bool const drafted[] = {false, true};
    double const before = statistics.blocks(0) + statistics.blocks(1);
    CHECK(statistics.add({2, gone, nullptr, sure.data(), lens, refused}) == 0);
    CHECK(statistics.add({2, rows, drafted, sure.data(), lens, refused}) == 0);
    CHECK(statistics.blocks(0) + statistics.blocks(1) == before);
    CHECK(statistics.add({2, rows, drafted, sure.data(), lens, accepted}) == 1);
}

//! A request that joins, evaluated by what is known of one whose drafts are all accepted; `rise` is what each costs.
BlockStatistics joined(float rise) {
    BlockStatistics statistics(3, levels(4), kRules);
    statistics.reset(0);
    statistics.reset(1);
    int64_t const row = 0, both[] = {0, 1}, caps[] = {3, 3}, three = 3;
    std::vector<float> const sure(3, 1.0f), curve = line(2, 3, rise);
    for (int block = 0; block < 20; ++block) statistics.add({1, &row, nullptr, sure.data(), &three, &three});
    statistics.evaluate(both, caps, {2, curve.data(), 1.0f, 1.0f, rise > 1.0f ? 50.0 : 0.0});
    return statistics;
}

void testRounds() {
    int64_t const rows[] = {0, 1, -1}, caps[] = {3, 3, 2};
    int64_t allowed[2], lengths[3];
    for (float const rise : {0.0f, 200.0f}) {
        BlockStatistics const statistics = joined(rise);
        Standings standings(kRest);
        standings.reset(0);
        standings.reset(1);
        host::RoundVerdict const verdict = host::judgeRound({2, rows, caps}, statistics, &standings, allowed);
        bool const pays = rise == 0.0f;
        CHECK(verdict.num_judged == 2 && verdict.num_resting == (pays ? 0 : 2));
        CHECK(verdict.span == (pays ? 2 : 0) && verdict.entered == false && !verdict.fresh);
        CHECK(allowed[0] == (pays ? 3 : 0) && allowed[1] == allowed[0]);
        CHECK(verdict.extra_tokens == (pays ? statistics.worth(0).extra_tokens + statistics.worth(1).extra_tokens : 0.0));
    }
    // Those that are known verify what is certain, one without a row what the threshold given for it allows.
    BlockStatistics const statistics = joined(0.0f);
    CHECK(statistics.threshold(0, 0.0f) == 1.0f);
    float const confidence[] = {1.0f, 1.0f, 0.5f, 0.9f, 1.0f, 1.0f, 0.9f, 0.9f, 0.9f};
    host::verifyLens({3, rows, caps}, statistics, {confidence, 0.75f, 9, -1}, lengths);
    CHECK(lengths[0] == 2 && lengths[1] == 0 && lengths[2] == 2);
    host::verifyLens({3, rows, caps}, statistics, {confidence, 0.75f, 9, 1}, lengths);
    CHECK(lengths[0] == 2 && lengths[1] == 1 && lengths[2] == 2);
    // A budget keeps the first drafts, and a probe takes no room from them.
    host::verifyLens({3, rows, caps}, statistics, {confidence, 0.75f, 3, 1}, lengths);
    CHECK(lengths[0] == 2 && lengths[1] == 0 && lengths[2] == 1);
}

//! Judge one request with a gain; return whether it rests.
bool rests(Standings* standings, double gain, bool is_new) { return standings->judge(0, gain, is_new).rests; }

void testStandings() {
    Standings standings(kRest);
    auto const speculating = [&] {
        standings.reset(0);
        standings.meet(0);
    };
    standings.reset(0);
    CHECK(rests(&standings, -0.01, true) && rests(&standings, 0.02, false) && !rests(&standings, 0.04, false));
    speculating();
    for (int round = 1; round < 8; ++round) CHECK(!rests(&standings, -0.01, false));
    host::Ruling const tired = standings.judge(0, -0.01, false);
    CHECK(tired.rests && tired.entered && !tired.fresh);
    speculating();
    CHECK(!rests(&standings, -0.2, false));
    CHECK(rests(&standings, -0.2, false));
    speculating();
    for (int round = 0; round < 30; ++round) CHECK(!rests(&standings, -0.2, true));
    standings.reset(0);
    host::Ruling const joined_poor = standings.judge(0, -0.05, true);
    CHECK(joined_poor.rests && !joined_poor.entered && joined_poor.fresh);
    CHECK(!standings.judge(0, -0.2, true).fresh);
}

//! Corrections of a table whose passes, other tokens and drafts take two, six and eight times what it says.
void testDrift() {
    constexpr host::DriftRules rules = {0.06, 0.005, 0.004, 0.5, 0.5, 0.99, 0.02, 3.0, 3.0, 64.0, 4.0, 64.0};
    auto const near = [](double found, double expected) { return std::fabs(found - expected) < 0.02 * expected; };
    host::CostDrift parts(rules), rounds(rules);
    for (int round = 0; round < 300; ++round) {
        double const more = round % 4 == 0 ? 0.0 : 10.0 * (round % 7);
        parts.observeVerify(100.0, more, 200.0 + 6.0 * more);
        parts.observeDraft(30.0, 240.0);
        if (more == 0.0) {
            CHECK(parts.roundsUnmeasured() == 0);
            rounds.observeVerify(100.0, 0.0, 200.0);
        } else {
            rounds.observeRound(100.0, more, 30.0, 200.0 + 6.0 * (more + 30.0));
        }
    }
    host::Correction found = parts.correction();
    CHECK(near(found.base, 2.0) && near(found.marginal, 6.0) && near(found.draft, 8.0));
    CHECK(near(parts.observeVerify(100.0, 10.0, 260.0), 260.0) && near(parts.observeDraft(30.0, 240.0), 240.0));
    // Of whole rounds what tokens and drafts take beyond the table is told together.
    host::Correction const together = rounds.correction();
    CHECK(near(together.base, 2.0) && near(together.marginal, 6.0) && near(together.draft, 6.0));
    // A clock changes no ratio, whoever runs while it does.
    for (int round = 0; round < 600; ++round) {
        if (round > 300 || round % 65 == 64) {
            rounds.observeVerify(100.0, 0.0, 100.0);
        } else {
            rounds.observeRound(100.0, 30.0, 30.0, 100.0 + 3.0 * 60.0);
        }
        host::Correction const now = rounds.correction();
        CHECK(std::fabs(now.draft / now.base - 3.0) < 0.5);
    }
    CHECK(near(rounds.correction().base, 1.0));
    // Nothing leaves its bounds, and what is not timed is counted.
    for (int round = 0; round < 2000; ++round) parts.observeVerify(1.0, 0.0, 1e9);
    found = parts.correction();
    CHECK(found.base == 64.0 && found.marginal <= 256.0 && found.draft >= 1.0);
    parts.observeUntimed();
    CHECK(parts.roundsUnmeasured() == 1);
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
    testRounds();
    testDrift();
    testStandings();
    return report("adaptive");
}
