#pragma once
//! One draft -> schedule -> accept -> pack pass on random data; its results as a flat list of words.
//!
//! Every output goes into the list, so equal lists mean equal bits of everything.

#include "check.h"
#include "dspark/confidence.h"
#include "dspark/draft.h"
#include "dspark/pack.h"
#include "dspark/schedule.h"

namespace dspark::test {

struct Shape {
    HeadKind kind;
    bool int8;
    int vocab, draft_vocab, rank, hidden;
    Acceptance mode;
};

//! Random weights and rows of one shape.
struct World {
    World(Shape const& s, uint64_t seed) : shape(s), random(seed) {
        size_t const v = size(s.vocab), vd = size(s.draft_vocab), r = size(s.rank), d = size(s.hidden);
        w1 = random.bells(v * r, 0.4f);
        w2 = random.bells(vd * r, 0.4f);
        w1_int8.resize(v * r);
        w2_int8.resize(vd * r);
        for (int8_t& x : w1_int8) x = static_cast<int8_t>(random.below(255) - 127);
        for (int8_t& x : w2_int8) x = static_cast<int8_t>(random.below(255) - 127);
        w1_scale = random.bells(v, 0.002f);
        w2_scale = random.bells(vd, 0.02f);
        gate = random.bells(r * (d + r), 0.2f);
        rnn = random.bells(3 * r * (2 * r + d), 0.2f);
        bias = random.bells(3 * r, 0.2f);
        hidden = random.bells(d);
        base = random.logits(vd);
        target = random.logits(v * 4);
        for (size_t i = 0; i < target.size(); ++i) target[i] += 0.5f * base[i % base.size()];
        target[0] = target[v] = target[2 * v] = target[3 * v] = 3.0f;
        ids.resize(vd);
        for (size_t i = 0; i < vd; ++i) ids[i] = static_cast<int32_t>(v - 1 - i);
        weights = {s.kind,         s.vocab,         s.draft_vocab,
                   s.rank,         s.hidden,        s.int8 ? nullptr : w1.data(),
                   s.int8 ? w1_int8.data() : nullptr, s.int8 ? w1_scale.data() : nullptr,
                   s.int8 ? nullptr : w2.data(), s.int8 ? w2_int8.data() : nullptr,
                   s.int8 ? w2_scale.data() : nullptr, gate.data(), bias.data(), rnn.data(), bias.data(),
                   s.vocab == s.draft_vocab ? nullptr : ids.data()};
    }
    static size_t size(int n) { return static_cast<size_t>(n); }

    Shape shape;
    Random random;
    std::vector<float> w1, w2, w1_scale, w2_scale, gate, rnn, bias, hidden, base, target;
    std::vector<int8_t> w1_int8, w2_int8;
    std::vector<int32_t> ids;
    HeadWeights weights;
};

//! Arrays the ranks of a team share while they run a scenario.
struct Buffers {
    explicit Buffers(Shape const& s)
        : embedding(n(s.rank)), latent(n(s.rank)), state(n(s.rank)), pre(3 * n(s.rank)), scale(1), latent_int8(n(s.rank)),
          tile_mass(n(numTiles(s.vocab))), mass(n(s.vocab)), rows(3 * n(s.draft_vocab)) {}
    static size_t n(int count) { return static_cast<size_t>(count); }
    HeadState head() {
        return {embedding.data(), latent.data(), state.data(), pre.data(), latent_int8.data(), scale.data()};
    }
    AcceptWorkspace workspace() { return {tile_mass.data(), mass.data()}; }

    std::vector<float> embedding, latent, state, pre, scale;
    std::vector<int8_t> latent_int8;
    std::vector<uint64_t> tile_mass, mass;
    std::vector<float> rows;
    DraftPick picks[3];
    int32_t tokens[3];
    int32_t out[4];
};

struct TargetRows {
    float const* first;
    int64_t vocab;
    float const* operator()(int step) const { return first + step * vocab; }
};

struct DraftLaws {
    Buffers const* buffers;
    HeadWeights const* heads;
    Proposal operator()(int step) const {
        DraftPick const& pick = buffers->picks[step];
        if (pick.total == 0) return {nullptr, nullptr, 0, 0, {}, 0};
        return {buffers->rows.data() + step * static_cast<int64_t>(heads->draft_vocab), heads->target_ids,
                heads->draft_vocab, pick.index, pick.law, pick.total};
    }
};

//! Draft three tokens and accept them; rank 0 appends what came out to `words`.
template <class Team>
void runScenario(Team const& team, World const& world, RequestParams const& params, Buffers* b,
                 std::vector<uint64_t>* words) {
    HeadWeights const& heads = world.weights;
    int previous = 1;
    for (int step = 0; step < 3; ++step) {
        float* const row = b->rows.data() + step * static_cast<int64_t>(heads.draft_vocab);
        DraftPick const pick = draftStep(team, world.shape.mode, heads, params, step, previous, world.base.data(),
                                         world.hidden.data(), b->head(), b->workspace(), row);
        previous = pick.index < 0 ? 0 : heads.target_ids ? heads.target_ids[pick.index] : pick.index;
        if (team.rank() == 0) {
            b->picks[step] = pick;
            b->tokens[step] = previous;
        }
        team.sync();
    }
    AcceptResult const result =
        acceptRequest(team, world.shape.mode, params, heads.vocab, 3, b->tokens, TargetRows{world.target.data(), heads.vocab},
                      DraftLaws{b, &heads}, b->workspace(), b->out);
    team.sync();
    if (team.rank() != 0) return;
    for (int step = 0; step < 3; ++step) {
        words->push_back(static_cast<uint64_t>(b->tokens[step]));
        words->push_back(b->picks[step].total);
        words->push_back(floatBits(b->picks[step].law.pivot));
    }
    for (float const x : b->rows) words->push_back(floatBits(x));
    words->push_back(static_cast<uint64_t>(result.emitted));
    for (int i = 0; i < result.emitted; ++i) words->push_back(static_cast<uint64_t>(b->out[i]));
}

//! Schedules of a random batch in every mode, and the packing of the last one.
template <class Team>
void runSchedules(Team const& team, int requests, int gamma, uint64_t seed, bool coarse, std::vector<uint32_t>* storage,
                  std::vector<int32_t>* lens, std::vector<uint64_t>* words) {
    Random random(seed);  // every rank draws the same inputs
    size_t const cells = static_cast<size_t>(requests) * static_cast<size_t>(gamma);
    std::vector<float> confidence(cells), table(cells + static_cast<size_t>(requests) + 1);
    for (float& c : confidence) c = coarse ? static_cast<float>(random.below(4)) / 3.0f : random.uniform();
    float time = 5.0f;
    for (float& t : table) t = time += coarse ? static_cast<float>(random.below(2)) * 0.4f : 0.2f * random.uniform();
    std::vector<int32_t> live(static_cast<size_t>(requests), 1), caps(live.size(), gamma);
    for (size_t row = 0; coarse && row < live.size(); ++row) {
        if (random.below(4) == 0) live[row] = caps[row] = 0;
    }
    ScheduleInput in = {};
    in.num_requests = requests;
    in.draft_stride = gamma;
    in.draft_len = 2;
    in.threshold = 0.4;
    in.budget = random.below(requests * gamma + 1);
    in.token_budget = coarse ? random.below(requests * gamma + 1) : -1;
    in.confidence = confidence.data();
    if (coarse) {
        in.caps = caps.data();
        in.live = live.data();
    }
    in.cost = {table.data(), requests, 1.5, 2.0};
    ScheduleWorkspace const ws = {storage->data(), storage->data() + cells, storage->data() + 2 * cells,
                                  storage->data() + 3 * cells};
    for (int mode = 0; mode < 4; ++mode) {
        in.mode = static_cast<ScheduleMode>(mode);
        ScheduleOutput out = {lens->data(), 0, 0};
        schedulePrefixes(team, in, ws, &out);
        if (team.rank() == 0) {
            for (int request = 0; request < requests; ++request) {
                words->push_back(static_cast<uint64_t>((*lens)[static_cast<size_t>(request)]));
            }
        }
        team.sync();
    }
    uint32_t warnings = 0;
    int64_t const budget = verifyBudget(team, in, ws, &warnings);
    if (team.rank() == 0) {
        words->push_back(static_cast<uint64_t>(budget));
        words->push_back(warnings);
    }
    team.sync();
}

inline std::vector<Shape> shapes() {
    std::vector<Shape> result;
    for (HeadKind const kind : {HeadKind::kNone, HeadKind::kVanilla, HeadKind::kGated, HeadKind::kRnn}) {
        for (bool const int8 : {false, true}) {
            for (Acceptance const mode : {Acceptance::kGreedy, Acceptance::kRejection, Acceptance::kCoupled}) {
                int const vocab = int8 ? 1100 : 130;
                result.push_back({kind, int8, vocab, mode == Acceptance::kGreedy ? vocab : vocab / 3, 7, 19, mode});
            }
        }
    }
    return result;
}

inline RequestParams paramsOf(Random* random) {
    int const k[] = {0, 3, 40};
    float const p[] = {1.0f, 0.9f, 0.3f};
    return {random->below(5) == 0 ? 0.0f : 0.3f + random->uniform(), k[random->below(3)], p[random->below(3)],
            random->bits(), random->bits() >> 20};
}

}  // namespace dspark::test
