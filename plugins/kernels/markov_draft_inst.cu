#include "markov_candidates.cuh"

namespace dspark {
namespace {

template <class T, int kChunk>
LaunchStatus launchSteps(MarkovDraftParams const& p, cudaStream_t stream) {
    int const rows = weightRows<T, kChunk>(p.rank);
    dim3 const logits_grid(static_cast<unsigned>((p.draft_vocab + rows - 1) / rows));
    int const tiles = ((p.vocab > p.draft_vocab ? p.vocab : p.draft_vocab) + kTile - 1) / kTile;
    int const warps = kPickThreads / 32;
    // Enough blocks to fill the device at small R, none without a tile a warp.
    int const wanted = (264 + p.num_requests - 1) / p.num_requests, useful = (tiles + warps - 1) / warps;
    dim3 const pick_grid(static_cast<unsigned>(wanted < useful ? wanted : useful),
                         static_cast<unsigned>(p.num_requests));
    for (int step = 0; step < p.draft_len; ++step) {
        MarkovStep const launch = {p, step};
        LaunchStatus const logits = launchKernel(markovLogitsKernel<T, kChunk>, logits_grid, dim3(kRowsPerBlock),
                                                 static_cast<size_t>(logitsSharedBytes<T, kChunk>(p.rank, rows)), stream, launch);
        if (!logits.ok()) return logits;
        LaunchStatus const pick = launchKernel(markovPickKernel, pick_grid, dim3(kPickThreads),
                                               kSearchingTeamBytes + static_cast<size_t>(tiles) * 8, stream, launch);
        if (!pick.ok()) return pick;
    }
    return launchOk();
}

LaunchStatus launchCandidates(MarkovDraftParams const& p, cudaStream_t stream) {
    SelectLaunch const select = {p, rowsAligned(p.base_logits, p.logits_type, p.draft_vocab) ? 1 : 0};
    LaunchStatus const selected =
        launchKernel(selectCandidatesKernel, dim3(static_cast<unsigned>(p.num_requests * p.draft_len)),
                     dim3(kSelectThreads), sizeof(SelectShared), stream, select);
    if (!selected.ok()) return selected;
    size_t const shared = kSearchingTeamBytes + static_cast<size_t>(p.num_candidates) * 4;
    return launchKernel(candidateWalkKernel, dim3(static_cast<unsigned>(p.num_requests)), dim3(kWalkThreads), shared,
                        stream, p);
}

template <class T>
LaunchStatus launchDense(MarkovDraftParams const& p, cudaStream_t stream) {
    bool const wide = p.num_requests > 1 && p.rank <= 1024;  // latents of a chunk must fit beside the weights
    return wide ? launchSteps<T, kRequestChunk>(p, stream) : launchSteps<T, 1>(p, stream);
}

LaunchStatus check(MarkovDraftParams const& p) {
    if (p.num_requests < 0 || p.num_requests > 65535) return refused("num_requests", "0 to 65535", p.num_requests);
    if (p.draft_len < 1 || p.draft_len > kMaxDraftLen) return refused("draft_len", "1 to 64", p.draft_len);
    if (p.vocab < 1 || p.vocab > kMaxVocab) return refused("vocab", "1 to 1048576", p.vocab);
    if (p.draft_vocab < 1 || p.draft_vocab > p.vocab) return refused("draft_vocab", "1 to vocab", p.draft_vocab);
    if (p.head_kind < 0 || p.head_kind > 3) return refused("head_kind", "0 to 3", p.head_kind);
    if (p.head_kind == 0 ? p.rank != 0 : p.rank < 1 || p.rank > kMaxRank) {
        return refused("rank", "1 to 4096, or 0 without a head", p.rank);
    }
    if (static_cast<int32_t>(p.weight_type) < 0 || static_cast<int32_t>(p.weight_type) > 3) {
        return refused("weight_type", "0 to 3", static_cast<int64_t>(p.weight_type));
    }
    if (p.acceptance < 0 || p.acceptance > 2) return refused("acceptance", "0 to 2", p.acceptance);
    int const most = p.draft_vocab < kMaxCandidates ? p.draft_vocab : kMaxCandidates;
    if (p.num_candidates < 0 || p.num_candidates > most) {
        return refused("num_candidates", "0 to 256 and at most draft_vocab", p.num_candidates);
    }
    if (p.logits_type == ElementType::kInt8) return refused("logits_type", "a float type", 3);
    bool const needs_hidden = p.head_kind == 2 || p.head_kind == 3;
    if (needs_hidden && (p.hidden == nullptr || p.hidden_type == ElementType::kInt8)) {
        return refused("hidden", "float rows for a gated or rnn head", 0);
    }
    if (needs_hidden && p.hidden_size < 1) return refused("hidden_size", "at least 1", p.hidden_size);
    if (p.head_kind == 2 && p.gate_weight == nullptr) return refused("gate_weight", "weights for a gated head", 0);
    if (p.head_kind == 3 && p.rnn_weight == nullptr) return refused("rnn_weight", "weights for an rnn head", 0);
    if (p.head_kind != 0 && (p.w1 == nullptr || p.w2 == nullptr)) return refused("w1", "w1 and w2", 0);
    if (p.head_kind != 0 && p.weight_type == ElementType::kInt8 && (p.w1_scale == nullptr || p.w2_scale == nullptr)) {
        return refused("w1_scale", "w1_scale and w2_scale for int8 weights", 0);
    }
    if ((p.target_of_draft == nullptr) != (p.draft_of_target == nullptr)) {
        return refused("draft_of_target", "target_of_draft and draft_of_target together", 0);
    }
    if (p.target_of_draft == nullptr && p.draft_vocab != p.vocab) {
        return refused("target_of_draft", "a table when draft_vocab differs from vocab", 0);
    }
    if (p.acceptance != 0 && p.draft_logits == nullptr) return refused("draft_logits", "an array unless greedy", 0);
    if (p.num_candidates > 0 && p.candidates == nullptr) return refused("candidates", "an array", 0);
    return launchOk();
}

}  // namespace

LaunchStatus launchMarkovDraft(MarkovDraftParams const& p, cudaStream_t stream) noexcept {
    LaunchStatus const checked = check(p);
    if (!checked.ok() || p.num_requests == 0) return checked;
    if (p.num_candidates > 0) return launchCandidates(p, stream);
    LaunchStatus const begun = launchKernel(markovBeginKernel, dim3(static_cast<unsigned>(p.num_requests)),
                                            dim3(kBeginThreads), kBlockTeamBytes, stream, p);
    if (!begun.ok()) return begun;
    switch (p.weight_type) {
        case ElementType::kFloat32: return launchDense<float>(p, stream);
        case ElementType::kFloat16: return launchDense<__half>(p, stream);
        case ElementType::kBFloat16: return launchDense<__nv_bfloat16>(p, stream);
        case ElementType::kInt8: return launchDense<int8_t>(p, stream);
    }
    return refused("weight_type", "0 to 3", static_cast<int64_t>(p.weight_type));
}

}  // namespace dspark
