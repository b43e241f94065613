#include "ragged_accept.cuh"

namespace dspark {
namespace {

LaunchStatus check(RaggedAcceptParams const& p) {
    if (p.num_tokens < 0) return refused("num_tokens", "at least 0", p.num_tokens);
    if (p.num_requests < 0 || p.num_requests > 65535) return refused("num_requests", "0 to 65535", p.num_requests);
    if (p.draft_len < 1 || p.draft_len > kMaxDraftLen) return refused("draft_len", "1 to 64", p.draft_len);
    if (p.vocab < 1 || p.vocab > kMaxVocab) return refused("vocab", "1 to 1048576", p.vocab);
    if (p.draft_vocab < 1 || p.draft_vocab > p.vocab) return refused("draft_vocab", "1 to vocab", p.draft_vocab);
    if (p.draft_of_target == nullptr && p.draft_vocab != p.vocab) {
        return refused("draft_of_target", "a table when draft_vocab differs from vocab", 0);
    }
    if (p.num_candidates < 0 || p.num_candidates > p.draft_vocab) {
        return refused("num_candidates", "0 to draft_vocab", p.num_candidates);
    }
    if (p.num_candidates > 0 && p.candidates == nullptr) return refused("candidates", "an array", 0);
    if (p.acceptance < 0 || p.acceptance > 2) return refused("acceptance", "0 to 2", p.acceptance);
    if (p.logits_type == ElementType::kInt8) return refused("logits_type", "a float type", 3);
    if (p.logits_stride < p.vocab) return refused("logits_stride", "at least vocab", p.logits_stride);
    bool const needs_law = p.draft_logits != nullptr;
    if (needs_law && (p.draft_laws == nullptr || p.draft_totals == nullptr || p.draft_entries == nullptr)) {
        return refused("draft_laws", "draft_laws, draft_totals and draft_entries with draft_logits", 0);
    }
    return launchOk();
}

}  // namespace

LaunchStatus launchRaggedAccept(RaggedAcceptParams const& p, cudaStream_t stream) noexcept {
    LaunchStatus const checked = check(p);
    if (!checked.ok() || p.num_requests == 0) return checked;
    RaggedAcceptLayout const layout = raggedAcceptLayout(p.num_tokens, p.num_requests, p.vocab);
    cudaError_t const cleared = cudaMemsetAsync(p.workspace, 0, static_cast<size_t>(layout.cleared), stream);
    if (cleared != cudaSuccess) return launched(cleared);
    int64_t const useful = (layout.tiles + kRowThreads / 32 - 1) / (kRowThreads / 32);
    auto const sharesFor = [&](int64_t rows) {  // enough blocks to fill the device, none without a tile a warp
        int64_t const wanted = (264 + rows - 1) / rows;
        return static_cast<unsigned>(wanted < useful ? wanted : useful);
    };
    if (p.num_tokens > 0) {
        unsigned const shares = p.num_tokens >= 132 ? 1u : sharesFor(p.num_tokens);
        unsigned const rows = static_cast<unsigned>(p.num_tokens < 32768 ? p.num_tokens : 32768);
        dim3 const grid(shares, rows, (static_cast<unsigned>(p.num_tokens) + rows - 1) / rows);
        RowLaunch launch = {p, kRowKeys | kRowMasses,
                            rowsAligned(p.target_logits, p.logits_type, p.logits_stride) ? 1 : 0};
        // Several blocks a row need the row's maximum from all of them before the masses.
        if (shares > 1) {
            launch.phases = kRowKeys;
            LaunchStatus const keys =
                launchKernel(rowStatisticsKernel, grid, dim3(kRowThreads), kSearchingTeamBytes, stream, launch);
            if (!keys.ok()) return keys;
            launch.phases = kRowMasses;
        }
        LaunchStatus const masses =
            launchKernel(rowStatisticsKernel, grid, dim3(kRowThreads), kSearchingTeamBytes, stream, launch);
        if (!masses.ok()) return masses;
    }
    dim3 const requests(sharesFor(p.num_requests), static_cast<unsigned>(p.num_requests));
    return launchKernel(acceptKernel, requests, dim3(kAcceptThreads),
                        kBlockTeamBytes + static_cast<size_t>(layout.tiles) * 8, stream, p);
}

}  // namespace dspark
