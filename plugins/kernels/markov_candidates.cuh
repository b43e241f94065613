#pragma once

#include "markov_draft.cuh"

namespace dspark {

constexpr int kSelectThreads = 512;
constexpr int kSelectList = 2048;   // keys that the second pass may collect before the slow exact search is needed
constexpr int kWalkThreads = 128;
constexpr int kMaxCandidates = 256;

struct SelectShared {
    uint64_t team[32];
    uint64_t maximum[kSelectThreads];
    uint64_t list[kSelectList];
    uint64_t threshold;
    int32_t count;
    int32_t chosen[kMaxCandidates];
};

//! Largest key that at least `need` keys of the row reach: 64 halvings of the key space.
__device__ inline uint64_t keyOfRank(BlockTeam const& team, LogitRow const& row, int vocab, int need) {
    uint64_t key = 0;
    for (int bit = 63; bit >= 0; --bit) {
        uint64_t const trial = key | (uint64_t{1} << bit);
        uint64_t count = 0;
        for (int id = team.rank(); id < vocab; id += team.size()) count += argmaxKey(row[id], id) >= trial ? 1 : 0;
        if (team.addU64(count) >= static_cast<uint64_t>(need)) key = trial;
    }
    return key;
}

//! Collects every key >= threshold; returns how many there are (the list holds at most kSelectList of them).
__device__ inline int collectKeys(BlockTeam const& team, SelectShared& shared, LogitRow const& row, int vocab,
                                  bool aligned, uint64_t threshold) {
    if (team.rank() == 0) shared.count = 0;
    team.sync();  // count is zero
    for (int id = 8 * team.rank(); id < vocab; id += 8 * team.size()) {
        Eight const eight = loadEight(row, id, vocab, aligned, 0.0f);
        for (int lane = 0; lane < 8 && id + lane < vocab; ++lane) {
            uint64_t const key = argmaxKey(eight.value[lane], id + lane);
            if (key >= threshold) {
                int const at = atomicAdd(&shared.count, 1);
                if (at < kSelectList) shared.list[at] = key;
            }
        }
    }
    team.sync();  // list complete
    return shared.count;
}

struct SelectLaunch {
    MarkovDraftParams params;
    int32_t aligned;  // rows allow 16-byte loads
};

//! The C largest base logits of one position, ties to the lower id, in ascending id order. One block a position.
//!
//! The C-th largest of the threads' own maxima is a lower bound of the C-th largest logit, and a sharp one: the second
//! pass collects little more than C keys.
static __global__ void __launch_bounds__(kSelectThreads, 1) selectCandidatesKernel(SelectLaunch const launch) {
    MarkovDraftParams const& p = launch.params;
    SelectShared& shared = *reinterpret_cast<SelectShared*>(sharedMemory());
    BlockTeam const team = {shared.team, nullptr};
    int64_t const position = blockIdx.x;  // request * gamma + step
    LogitRow const row = logitRow(p.base_logits, p.logits_type, position, p.draft_vocab);
    int const vocab = p.draft_vocab, want = p.num_candidates;
    bool const aligned = launch.aligned != 0;
    int32_t* const out = p.candidates + position * want;

    uint64_t own = 0;
    for (int id = 8 * team.rank(); id < vocab; id += 8 * team.size()) {
        Eight const eight = loadEight(row, id, vocab, aligned, 0.0f);
        for (int lane = 0; lane < 8 && id + lane < vocab; ++lane) {
            own = maxOf(own, argmaxKey(eight.value[lane], id + lane));
        }
    }
    shared.maximum[team.rank()] = own;
    if (team.rank() == 0) shared.threshold = 1;  // every key is larger
    RowTop const top = topOfKey(team.maxU64(own));  // its barriers make the maxima visible
    if (team.rank() == 0) p.draft_entries[position] = top.status;  // handed to the walk, which overwrites it
    if (top.status != kRowOk) {
        for (int c = team.rank(); c < want; c += team.size()) out[c] = 0;
        return;
    }
    int above = 0;
    for (int thread = 0; thread < team.size(); ++thread) above += shared.maximum[thread] > own ? 1 : 0;
    if (own > 0 && above == want - 1) shared.threshold = own;
    team.sync();  // threshold visible
    int count = collectKeys(team, shared, row, vocab, aligned, shared.threshold);
    if (count > kSelectList) {
        uint64_t const exact = keyOfRank(team, row, vocab, want);
        count = collectKeys(team, shared, row, vocab, aligned, exact);
    }
    for (int index = team.rank(); index < count; index += team.size()) {
        int rank = 0;
        for (int other = 0; other < count; ++other) rank += shared.list[other] > shared.list[index] ? 1 : 0;
        if (rank < want) shared.chosen[rank] = static_cast<int32_t>(~static_cast<uint32_t>(shared.list[index]));
    }
    team.sync();  // chosen complete
    for (int c = team.rank(); c < want; c += team.size()) {
        int at = 0;
        for (int other = 0; other < want; ++other) at += shared.chosen[other] < shared.chosen[c] ? 1 : 0;
        out[at] = shared.chosen[c];
    }
}

template <class T>
__device__ inline float candidateChain(float const* latent, T const* weight, int rank) {
    float acc = 0.0f;
#pragma unroll 4
    for (int i = 0; i < rank; ++i) acc = fmaRn(latent[i], toFloat(weight[i]), acc);
    return acc;
}

//! Corrected logit of one candidate; the latent lies in scratch.
__device__ inline float candidateLogit(MarkovDraftParams const& p, MarkovScratch const& s, int request, float base,
                                       int draft_id) {
    if (p.head_kind == 0) return base;
    unsigned char const* const latent = s.latent + request * s.latent_bytes;
    float const* const values = reinterpret_cast<float const*>(latent);
    int64_t const at = static_cast<int64_t>(draft_id) * p.rank;
    switch (p.weight_type) {
        case ElementType::kFloat32:
            return addRn(base, candidateChain(values, static_cast<float const*>(p.w2) + at, p.rank));
        case ElementType::kFloat16:
            return addRn(base, candidateChain(values, static_cast<__half const*>(p.w2) + at, p.rank));
        case ElementType::kBFloat16:
            return addRn(base, candidateChain(values, static_cast<__nv_bfloat16 const*>(p.w2) + at, p.rank));
        case ElementType::kInt8: break;
    }
    int8_t const* const quantised = reinterpret_cast<int8_t const*>(latent);
    int8_t const* const weight = static_cast<int8_t const*>(p.w2) + at;
    int32_t dot = 0;
    for (int i = 0; i < p.rank; ++i) dot += static_cast<int32_t>(quantised[i]) * static_cast<int32_t>(weight[i]);
    return addRn(base, mulRn(static_cast<float>(dot), mulRn(s.latent_scale[request], p.w2_scale[draft_id])));
}

//! Walks one request's block over its candidates. Shared memory: team scratch, then the row [C].
static __global__ void __launch_bounds__(kWalkThreads, 1) candidateWalkKernel(MarkovDraftParams const p) {
    BlockTeam const team = searchingTeam();
    MarkovScratch const s = markovScratch(p);
    int const request = static_cast<int>(blockIdx.x), size = p.num_candidates;
    float* const row = reinterpret_cast<float*>(sharedMemory() + kSearchingTeamBytes);
    Acceptance const mode = static_cast<Acceptance>(p.acceptance);
    RequestParams const params = requestParams(p.temperature, p.top_k, p.top_p, p.seed, p.positions, request);
    for (int i = team.rank(); i < p.rank; i += team.size()) s.state[static_cast<int64_t>(request) * p.rank + i] = 0.0f;
    if (team.rank() == 0) p.status[request] = kRowOk;
    team.sync();  // state and status are set before they are read
    int previous = p.anchors[request];
    for (int step = 0; step < p.draft_len; ++step) {
        int64_t const at = static_cast<int64_t>(request) * p.draft_len + step;
        int32_t const* const candidates = p.candidates + at * size;
        RowStatus const selected = static_cast<RowStatus>(p.draft_entries[at]);
        nextLatent(team, p, s, request, step, previous);
        team.sync();  // latent visible; `selected` is read before the pick is stored
        LogitRow const base = logitRow(p.base_logits, p.logits_type, at, p.draft_vocab);
        uint64_t key = 0;
        for (int c = team.rank(); c < size && selected == kRowOk; c += team.size()) {
            float const logit = candidateLogit(p, s, request, base[candidates[c]], candidates[c]);
            row[c] = logit;
            if (mode != Acceptance::kGreedy) p.draft_logits[at * size + c] = logit;
            key = maxOf(key, argmaxKey(logit, c));
        }
        key = team.maxU64(key);  // its barriers make the row visible
        RowTop top = topOfKey(key);
        if (selected != kRowOk) top = {0.0f, -1, selected};
        EntryOfTarget const entry_of = {p.draft_of_target, candidates, size};
        DraftPick const pick = pickFromRow(team, mode, params, step, p.vocab, row, size, entry_of, top,
                                           s.tile_mass + request * s.tiles, false, 0);
        previous = storePick(team, p, request, step, pick, candidates);
    }
}

}  // namespace dspark
