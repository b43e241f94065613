#include "confidence_schedule.cuh"

namespace dspark {

LaunchStatus launchConfidenceSchedule(ConfidenceScheduleParams const& p, cudaStream_t stream) noexcept {
    if (p.num_requests < 0 || p.num_requests > 65535) return refused("num_requests", "0 to 65535", p.num_requests);
    if (p.draft_len < 1 || p.draft_len > 64) return refused("draft_len", "1 to 64", p.draft_len);
    if (p.mode < 0 || p.mode > 3) return refused("mode", "0 to 3", p.mode);
    if (p.hidden_weight == nullptr && p.mode != 0) {
        return refused("hidden_weight", "a confidence head, or mode fixed (0) without one, in mode", p.mode);
    }
    if (p.hidden_weight != nullptr && p.hidden_size < 1) return refused("hidden_size", "at least 1", p.hidden_size);
    if (p.hidden_type == ElementType::kInt8) return refused("hidden_type", "a float type", 3);
    int64_t const rows = static_cast<int64_t>(p.num_requests) * (p.draft_len + 1);
    if (p.num_rows < rows) return refused("num_rows", "at least num_requests * (draft_len + 1)", p.num_rows);
    if (p.num_requests == 0) return launchOk();
    if (p.hidden_weight != nullptr) {
        int64_t const tokens = static_cast<int64_t>(p.num_requests) * p.draft_len;
        int64_t const per_block = kConfidenceThreads / 16;
        LaunchStatus const confidences =
            launchKernel(confidenceKernel, dim3(static_cast<unsigned>((tokens + per_block - 1) / per_block)),
                         dim3(kConfidenceThreads), 0, stream, p);
        if (!confidences.ok()) return confidences;
    }
    return launchKernel(scheduleKernel, dim3(1), dim3(kScheduleThreads), kBlockTeamBytes, stream, p);
}

}  // namespace dspark
