#pragma once
//! Objects shared by the parts of the extension.

#include <mutex>

#include "arrays.h"
#include "dspark/host/chain.h"

namespace dspark::python {

//! Kernels of the instruction set in use.
host::Kernels const* kernels();

//! Scratch of the calling thread.
host::FilterScratch* scratch();

//! Validated sampling parameters of R requests; positions are filled per call.
struct Sampling {
    std::vector<RequestParams> params;
    std::vector<RequestParams> at(int64_t const* positions) const {
        std::vector<RequestParams> result = params;
        for (size_t request = 0; request < result.size(); ++request) {
            result[request].position = static_cast<uint64_t>(positions[request]);
        }
        return result;
    }
};

//! Large float buffers that are reused from round to round: fresh pages would cost more than the arithmetic.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
public:
    using Buffer = std::unique_ptr<float, void (*)(float*)>;
    std::shared_ptr<float> take(size_t count);

private:
    struct Entry {
        size_t count;
        std::unique_ptr<float[]> data;
    };
    std::mutex mutex_;
    std::vector<Entry> free_;
};

struct DraftHeads {
    HeadWeights weights{};
    ConfidenceWeights confidence{};
    bool has_confidence = false;
    int confidence_hidden = 0;  // d the confidence head reads
    host::PackedW2 packed;
    std::vector<int32_t> target_ids;
    std::vector<float> markov_table;
    std::vector<nb::object> owners;
    std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>();
};

struct Draft {
    int num_requests = 0, num_steps = 0, vocab = 0, width = 0;
    bool candidates = false;
    Acceptance mode = Acceptance::kGreedy;
    std::vector<int32_t> tokens, status, ids, target_ids;  // target_ids: copy of d2t, empty = identity
    std::vector<DraftPick> picks;
    std::shared_ptr<float> rows;

    Proposal proposal(int request, int step) const {
        size_t const at = static_cast<size_t>(request) * static_cast<size_t>(num_steps) + static_cast<size_t>(step);
        DraftPick const& pick = picks[at];
        if (pick.total == 0) return {nullptr, nullptr, 0, 0, {}, 0};
        size_t const offset = at * static_cast<size_t>(width);
        int32_t const* const entry_ids =
            candidates ? ids.data() + offset : target_ids.empty() ? nullptr : target_ids.data();
        return {rows.get() + offset, entry_ids, width, pick.index, pick.law, pick.total};
    }
};

Acceptance acceptanceOf(char const* op, std::string const& name);

//! Throw unless every value is in [low, high).
void checkRange(char const* op, char const* name, int64_t const* values, int64_t count, int64_t low, int64_t high);

constexpr int64_t kMaxRequests = 1 << 20;
constexpr int64_t kMaxPosition = int64_t{1} << 55;

}  // namespace dspark::python
