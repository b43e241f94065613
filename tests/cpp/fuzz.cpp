//! Fuzz target over the core's entry points: bytes choose shapes, flags and numbers (NaN and infinities included).
//!
//! With clang: -fsanitize=fuzzer -DDSPARK_LIBFUZZER. Otherwise `main` feeds it pseudo-random inputs.

#include "dspark/host/adaptive_round.h"
#include "dspark/host/chain.h"
#include "dspark/pack.h"
#include "scenario.h"

using namespace dspark;
using namespace dspark::test;

namespace {

//! Reads numbers off the input; zeros after its end.
class Bytes {
public:
    Bytes(uint8_t const* data, size_t size) : data_(data), size_(size) {}
    uint8_t byte() { return at_ < size_ ? data_[at_++] : static_cast<uint8_t>(0); }
    int below(int limit) { return (byte() | byte() << 8) % limit; }
    float number() {
        uint32_t bits = 0;
        switch (byte() & 7) {
            case 0:  // any pattern: NaN, infinities, subnormals
                for (int i = 0; i < 4; ++i) bits = bits << 8 | byte();
                return bitsFloat(bits);
            case 1: return 0.0f;
            case 2: return bitsFloat(0xff800000u);
            default: return static_cast<float>(byte() - 128) / 8.0f;
        }
    }
    std::vector<float> numbers(int count) {
        std::vector<float> values(static_cast<size_t>(count));
        for (float& value : values) value = number();
        return values;
    }

private:
    uint8_t const* data_;
    size_t size_;
    size_t at_ = 0;
};

void fuzzSchedule(Bytes* bytes) {
    int const requests = bytes->below(20), gamma = 1 + bytes->below(9);
    size_t const cells = static_cast<size_t>(requests) * static_cast<size_t>(gamma);
    std::vector<float> const confidence = bytes->numbers(requests * gamma);
    std::vector<float> const table = bytes->numbers(requests * (gamma + 1) + 1);
    std::vector<int32_t> caps(static_cast<size_t>(requests)), lens(static_cast<size_t>(requests));
    for (int32_t& cap : caps) cap = bytes->below(gamma + 2);
    std::vector<uint32_t> storage(4 * cells);
    ScheduleInput in = {};
    in.mode = static_cast<ScheduleMode>(bytes->below(4));
    in.num_requests = requests;
    in.draft_stride = gamma;
    in.draft_len = bytes->below(gamma + 1);
    in.threshold = bytes->byte() / 255.0;
    in.budget = bytes->below(200);
    in.token_budget = bytes->below(200) - 1;
    in.confidence = confidence.data();
    uint8_t const rows = bytes->byte();
    in.caps = rows & 1 ? caps.data() : nullptr;
    in.live = rows & 2 ? caps.data() : nullptr;  // a row without a cap rides along
    in.cost = {bytes->byte() & 3 ? table.data() : nullptr, requests, bytes->byte() / 64.0, bytes->byte() / 2.0};
    ScheduleWorkspace const ws = {storage.data(), storage.data() + cells, storage.data() + 2 * cells,
                                  storage.data() + 3 * cells};
    ScheduleOutput out = {lens.data(), 0, 0};
    schedulePrefixes(SerialTeam{}, in, ws, &out);
    int64_t sum = 0;
    for (size_t request = 0; request < lens.size(); ++request) {
        CHECK(lens[request] >= 0 && lens[request] <= (in.caps ? minOf(caps[request], gamma) : gamma));
        sum += lens[request];
    }
    if (in.token_budget >= 0) CHECK(sum <= in.token_budget);
    uint32_t warnings = 0;
    int64_t const budget = verifyBudget(SerialTeam{}, in, ws, &warnings);
    CHECK(budget >= 0 && budget <= static_cast<int64_t>(cells));
}

void fuzzAdaptive(Bytes* bytes) {
    int const gamma = 1 + bytes->below(9), most = 1 + bytes->below(6);
    host::BlockStatistics statistics(gamma, {0.1f, 0.5f, 2.0f}, {0.9, 0.98, 4.0, 0.98, 1.0, 2.0, 1.5, 0.95, 6.0, 0.9});
    host::Standings standings({0.0, 0.03, -0.1, 0.1, 8, 4});
    for (int round = 0; round < 12; ++round) {
        int64_t const fresh = bytes->below(minOf(most, static_cast<int>(statistics.numRows()) + 1));
        statistics.reset(fresh);
        standings.reset(fresh);
        std::vector<int64_t> rows, lens, accepted;
        for (int64_t row = 0; row < statistics.numRows(); ++row) {
            rows.push_back(row);
            lens.push_back(bytes->below(gamma + 1));
            accepted.push_back(bytes->below(gamma + 1));
        }
        int const count = static_cast<int>(rows.size());
        std::vector<float> const confidence = bytes->numbers(count * gamma);
        statistics.add({count, rows.data(), nullptr, confidence.data(), lens.data(), accepted.data()});
        std::vector<float> const curve = bytes->numbers(count * (gamma + 1) + 1);
        host::BatchCosts const costs = {count, curve.data(), bytes->number(), bytes->number(),
                                        static_cast<double>(bytes->number())};
        statistics.evaluate(rows.data(), lens.data(), costs);
        std::vector<int64_t> caps(rows.size()), lengths(rows.size());
        host::RoundVerdict const verdict =
            host::judgeRound({count, rows.data(), lens.data()}, statistics, &standings, caps.data());
        CHECK(verdict.num_resting <= verdict.num_judged && verdict.num_judged <= count && verdict.span <= count);
        int64_t const budget = bytes->below(count * gamma + 2), probed = bytes->below(most + 1) - 1;
        host::verifyLens({count, rows.data(), caps.data()}, statistics,
                         {confidence.data(), bytes->number(), budget, probed}, lengths.data());
        int64_t sum = 0;
        for (size_t i = 0; i < lengths.size(); ++i) {
            CHECK(lengths[i] >= 0 && lengths[i] <= caps[i]);
            sum += lengths[i];
        }
        CHECK(sum <= budget);
    }
}

void fuzzRound(Bytes* bytes) {
    int const vocab = 1 + bytes->below(1300), requests = 1 + bytes->below(3), gamma = 1 + bytes->below(4);
    bool const reduced = (bytes->byte() & 1) != 0;
    int const draft_vocab = reduced ? 1 + bytes->below(vocab) : vocab;
    auto const mode = static_cast<Acceptance>(bytes->below(3));
    World world({static_cast<HeadKind>(bytes->below(4)), (bytes->byte() & 1) != 0, vocab, draft_vocab, 1 + bytes->below(9),
                 1 + bytes->below(20), mode},
                bytes->byte());
    if (!reduced) world.weights.target_ids = nullptr;
    for (float& x : world.base) x = bytes->byte() & 15 ? x : bytes->number();
    for (float& x : world.target) x = bytes->byte() & 15 ? x : bytes->number();
    for (float& x : world.hidden) x = bytes->number();
    int const candidates = bytes->byte() & 1 ? 1 + bytes->below(draft_vocab) : 0;
    size_t const n = static_cast<size_t>(requests), steps = static_cast<size_t>(gamma), vd = static_cast<size_t>(draft_vocab);
    std::vector<float> base, hidden;
    for (size_t cell = 0; cell < n * steps; ++cell) {
        base.insert(base.end(), world.base.begin(), world.base.end());
        hidden.insert(hidden.end(), world.hidden.begin(), world.hidden.end());
    }
    std::vector<int64_t> anchors(n);
    std::vector<RequestParams> params(n);
    for (size_t q = 0; q < n; ++q) {
        anchors[q] = bytes->below(vocab);
        params[q] = paramsOf(&world.random);
    }
    size_t const width = candidates ? static_cast<size_t>(candidates) : vd;
    std::vector<int32_t> tokens(n * steps), status(n), ids(n * steps * width);
    std::vector<DraftPick> picks(n * steps);
    std::vector<float> rows(n * steps * width);
    host::PackedW2 const packed = host::packW2(world.weights);
    host::FilterScratch scratch;
    host::Kernels const* kernels = host::kernelsOf(static_cast<host::SimdLevel>(bytes->below(3)));
    if (!kernels) kernels = host::kernelsOf(host::SimdLevel::kPortable);
    host::ChainInput const in = {&world.weights, &packed, mode, requests, gamma, gamma, candidates,
                                 base.data(), hidden.data(), anchors.data(), params.data()};
    host::ChainOutput const out = {tokens.data(), status.data(), picks.data(), rows.data(), ids.data()};
    host::Chain(kernels, &scratch, in, out).run();
    Buffers buffers(world.shape);
    HostTeam const team(kernels, &scratch);
    for (size_t q = 0; q < n; ++q) {
        if (status[q] != kRowOk) continue;
        auto const proposal = [&](int step) {
            size_t const at = q * steps + static_cast<size_t>(step);
            if (picks[at].total == 0) return Proposal{nullptr, nullptr, 0, 0, {}, 0};
            int32_t const* const entry_ids = candidates ? ids.data() + at * width : world.weights.target_ids;
            return Proposal{rows.data() + at * width, entry_ids, static_cast<int32_t>(width), picks[at].index,
                            picks[at].law, picks[at].total};
        };
        int32_t emitted[4];
        AcceptResult const result =
            acceptRequest(team, mode, params[q], vocab, minOf(gamma, 3), tokens.data() + q * steps,
                          TargetRows{world.target.data(), vocab}, proposal, buffers.workspace(), emitted);
        CHECK((result.status == kRowOk) == (result.emitted > 0));
        for (int i = 0; i < result.emitted; ++i) CHECK(emitted[i] >= 0 && emitted[i] < vocab);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size) {
    Bytes bytes(data, size);
    switch (bytes.byte() & 3) {
        case 0:
        case 1: fuzzRound(&bytes); break;
        case 2: fuzzSchedule(&bytes); break;
        default: fuzzAdaptive(&bytes); break;
    }
    return failures ? 1 : 0;
}

#ifndef DSPARK_LIBFUZZER
int main(int argc, char** argv) {
    int const rounds = argc > 1 ? std::atoi(argv[1]) : 3000;
    Random random(1);
    std::vector<uint8_t> data;
    for (int round = 0; round < rounds && failures == 0; ++round) {
        data.resize(static_cast<size_t>(random.below(6000)));
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.bits());
        LLVMFuzzerTestOneInput(data.data(), data.size());
    }
    return report("fuzz");
}
#endif
