#include "round_state.cuh"

namespace dspark {

namespace {

dim3 threadsFor(int64_t count) { return dim3(static_cast<unsigned>((count + kRoundThreads - 1) / kRoundThreads)); }

LaunchStatus checkRequests(int32_t num_requests) {
    if (num_requests < 0 || num_requests > 65535) return refused("num_requests", "0 to 65535", num_requests);
    return launchOk();
}

}  // namespace

LaunchStatus launchRoundBegin(RoundBeginParams const& p, cudaStream_t stream) noexcept {
    LaunchStatus const requests = checkRequests(p.num_requests);
    if (!requests.ok()) return requests;
    if (p.block_size < 0 || p.block_size > 64) return refused("block_size", "0 to 64", p.block_size);
    if (p.block_size > 0 && p.block_ids == nullptr) return refused("block_ids", "an array for the block's inputs", 0);
    if (p.num_requests == 0) return launchOk();
    int64_t const width = p.block_size > 0 ? p.block_size : 1;
    return launchKernel(roundBeginKernel, threadsFor(p.num_requests * width), dim3(kRoundThreads), 0, stream, p);
}

LaunchStatus launchRoundCaps(RoundCapsParams const& p, cudaStream_t stream) noexcept {
    LaunchStatus const requests = checkRequests(p.num_requests);
    if (!requests.ok()) return requests;
    if (p.num_requests == 0) return launchOk();
    return launchKernel(roundCapsKernel, threadsFor(p.num_requests), dim3(kRoundThreads), 0, stream, p);
}

LaunchStatus launchRoundRows(RoundRowsParams const& p, cudaStream_t stream) noexcept {
    LaunchStatus const requests = checkRequests(p.num_requests);
    if (!requests.ok()) return requests;
    if (p.row_len < 1) return refused("row_len", "at least 1", p.row_len);
    if (p.num_tokens < p.num_requests) return refused("num_tokens", "at least num_requests", p.num_tokens);
    if (p.num_requests == 0) return launchOk();
    int64_t const padded = static_cast<int64_t>(p.num_requests) * p.row_len;
    int64_t const count = padded > p.num_tokens ? padded : p.num_tokens;
    return launchKernel(roundRowsKernel, threadsFor(count), dim3(kRoundThreads), 0, stream, p);
}

LaunchStatus launchRoundBan(RoundBanParams const& p, cudaStream_t stream) noexcept {
    LaunchStatus const requests = checkRequests(p.num_requests);
    if (!requests.ok()) return requests;
    if (p.vocab < 1) return refused("vocab", "at least 1", p.vocab);
    if (p.max_banned < 0) return refused("max_banned", "at least 0", p.max_banned);
    if (p.num_requests == 0 || p.num_tokens <= 0 || p.max_banned == 0) return launchOk();
    dim3 const grid(static_cast<unsigned>(p.num_requests));
    return launchKernel(roundBanKernel, grid, dim3(kRoundThreads), 0, stream, p);
}

LaunchStatus launchRoundCommit(RoundCommitParams const& p, cudaStream_t stream) noexcept {
    LaunchStatus const requests = checkRequests(p.num_requests);
    if (!requests.ok()) return requests;
    if (p.draft_len < 0 || p.draft_len > 64) return refused("draft_len", "0 to 64", p.draft_len);
    if (p.num_requests == 0) return launchOk();
    return launchKernel(roundCommitKernel, threadsFor(p.num_requests), dim3(kRoundThreads), 0, stream, p);
}

}  // namespace dspark
