#pragma once
//! The draft chain on the host: step by step, one pass over W2 a step for all requests together.

#include "dspark/host/weights.h"

namespace dspark::host {

struct ChainInput {
    HeadWeights const* heads;
    PackedW2 const* packed;
    Acceptance mode;
    int num_requests;     // R
    int num_steps;        // steps to draft, <= gamma
    int block_len;        // gamma of base_logits and hidden
    int num_candidates;   // 0 = the whole draft vocabulary
    float const* base_logits;  // [R, gamma, Vd]
    float const* hidden;       // [R, gamma, d] or null
    int64_t const* anchors;    // [R]
    RequestParams const* params;  // [R]
};

//! q of every draft token. Rows of greedy requests are not stored.
struct ChainOutput {
    int32_t* tokens;   // [R, num_steps] target ids, -1 after a row error
    int32_t* status;   // [R]
    DraftPick* picks;  // [R, num_steps]
    float* rows;       // [R, num_steps, width], width = C or Vd; null when no request is sampled
    int32_t* ids;      // [R, num_steps, C] target ids, candidate walk only
};

//! First `count` ids of a row by (logit descending, id ascending), in ascending id order; false on a bad row.
inline bool topCandidates(HostTeam const& team, float const* row, int vocab, int count, int32_t* ids) {
    RowTop const top = topOfKey(rowTopKey(team, row, 0, vocab));
    if (top.status != kRowOk) return false;
    float const pivot = topKPivot(team, row, vocab, count);
    int above = 0, ties = 0;
    int const groups = (vocab + kGroup - 1) / kGroup;
    std::vector<float>& group_max = team.scratch->group_max;
    group_max.resize(static_cast<size_t>(groups));
    team.kernels->group_max(row, vocab, group_max.data());
    auto const scan = [&](auto const& visit) {
        for (int group = 0; group < groups; ++group) {
            if (!(group_max[static_cast<size_t>(group)] >= pivot)) continue;
            int const end = minOf(vocab, (group + 1) * kGroup);
            for (int id = group * kGroup; id < end; ++id) {
                if (row[id] >= pivot) visit(id);
            }
        }
    };
    scan([&](int id) { above += row[id] > pivot; });
    int const tie_quota = count - above;
    int at = 0;
    scan([&](int id) {
        if (row[id] > pivot || ties++ < tie_quota) ids[at++] = id;
    });
    return true;
}

//! Distance of two requests' tiles: a power of two would put all of them into the same cache sets.
constexpr size_t kTileStride = kTile + 80;
constexpr size_t kStageFrom = 8;  // requests

class Chain {
public:
    Chain(Kernels const* kernels, FilterScratch* scratch, ChainInput const& in, ChainOutput const& out)
        : team_(kernels, scratch), kernels_(kernels), in_(in), out_(out) {
        size_t const requests = static_cast<size_t>(in.num_requests), rank = static_cast<size_t>(in.heads->rank);
        r4_ = (rank + 3) & ~size_t{3};
        latent_.resize(requests * rank);
        latent_int8_.resize(requests * r4_);
        latent_scale_.resize(requests);
        state_.resize(in.heads->kind == HeadKind::kRnn ? requests * rank : 0);
        embedding_.resize(rank);
        pre_.resize(3 * rank);
        tile_mass_.resize(static_cast<size_t>(numTiles(maxOf(in.heads->vocab, in.heads->draft_vocab))));
        top_key_.resize(requests);
        base_.resize(requests);
        row_.resize(requests);
        tile_.resize(requests * kTileStride);
        // Only the coupled walk over a mapped or cut vocabulary sums masses by target id.
        bool const scatter = in.mode == Acceptance::kCoupled && (in.heads->target_ids || in.num_candidates > 0);
        mass_.resize(scatter ? static_cast<size_t>(in.heads->vocab) : 0);
    }

    void run() {
        for (int request = 0; request < in_.num_requests; ++request) out_.status[request] = kRowOk;
        for (int step = 0; step < in_.num_steps; ++step) {
            for (int request = 0; request < in_.num_requests; ++request) computeLatent(request, step);
            if (in_.num_candidates > 0) {
                for (int request = 0; request < in_.num_requests; ++request) candidateStep(request, step);
            } else {
                denseStep(step);
            }
        }
        for (int request = 0; request < in_.num_requests; ++request) {
            if (out_.status[request] == kRowOk) continue;
            for (int step = 0; step < in_.num_steps; ++step) out_.tokens[at(request, step)] = -1;
        }
    }

private:
    size_t at(int request, int step) const {
        return static_cast<size_t>(request) * static_cast<size_t>(in_.num_steps) + static_cast<size_t>(step);
    }
    bool greedy(int request) const { return in_.mode == Acceptance::kGreedy || in_.params[request].greedy(); }
    float const* baseRow(int request, int step) const {
        return in_.base_logits +
               (static_cast<int64_t>(request) * in_.block_len + step) * in_.heads->draft_vocab;
    }
    //! Where the corrected row of a sampled request is kept as q's support; null for a greedy one. Dense chain only.
    float* keptRow(int request, int step) const {
        return greedy(request) ? nullptr : out_.rows + at(request, step) * static_cast<size_t>(in_.heads->draft_vocab);
    }
    int previous(int request, int step) const {
        if (step == 0) return static_cast<int>(in_.anchors[request]);
        int const token = out_.tokens[at(request, step - 1)];
        return token < 0 ? 0 : token;  // a failed request keeps its place; its tokens are erased at the end
    }

    void computeLatent(int request, int step) {
        size_t const r = static_cast<size_t>(in_.heads->rank), q = static_cast<size_t>(request);
        float const* const hidden =
            in_.hidden ? in_.hidden + (static_cast<int64_t>(request) * in_.block_len + step) * in_.heads->hidden
                       : nullptr;
        HeadState const state = {embedding_.data(),           latent_.data() + q * r, state_.data() + (state_.empty() ? 0 : q * r),
                                 pre_.data(),                 latent_int8_.data() + q * r4_,
                                 latent_scale_.data() + q};
        headLatent(team_, *in_.heads, previous(request, step), hidden, state);
    }

    PanelJob job(int first, int count) const {
        HeadWeights const& heads = *in_.heads;
        PanelJob job = {};
        job.num_requests = count;
        job.rank = heads.rank;
        if (heads.w2_int8) {
            job.latent = latent_int8_.data() + static_cast<size_t>(first) * r4_;
            job.latent_scale = latent_scale_.data() + first;
        } else {
            job.latent = latent_.data() + static_cast<size_t>(first) * static_cast<size_t>(heads.rank);
        }
        return job;
    }

    void runPanels(PanelJob const& panel_job) const {
        if (in_.heads->w2_int8) {
            kernels_->panel_i8(panel_job);
        } else {
            kernels_->panel_f32(panel_job);
        }
    }

    void denseStep(int step) {
        HeadWeights const& heads = *in_.heads;
        int const vocab = heads.draft_vocab;
        std::fill(top_key_.begin(), top_key_.end(), uint64_t{0});
        for (int tile = 0; tile < numTiles(vocab); ++tile) {
            int const begin = tile << kTileShift;
            int const count = minOf(kTile, vocab - begin);
            // The rows of many requests often lie a power of two apart and would evict each other while the panels pass:
            // each tile is brought into a dense buffer first, in one sequential read.
            bool const staged = heads.kind == HeadKind::kNone || top_key_.size() >= kStageFrom;
            for (size_t q = 0; q < top_key_.size(); ++q) {
                int const request = static_cast<int>(q);
                float* const kept = keptRow(request, step);
                float* const tile_row = tile_.data() + q * kTileStride;
                base_[q] = baseRow(request, step) + begin;
                row_[q] = staged || !kept ? tile_row : kept + begin;
                if (!staged) continue;
                std::copy(base_[q], base_[q] + count, tile_row);
                base_[q] = tile_row;
            }
            if (heads.kind != HeadKind::kNone) {
                PanelJob panel_job = job(0, in_.num_requests);
                panel_job.count = count;
                panel_job.panels = in_.packed->tile(tile, heads.rank);
                panel_job.scale = heads.w2_int8 ? heads.w2_scale + begin : nullptr;
                panel_job.row_sum = heads.w2_int8 ? in_.packed->row_sum.data() + begin : nullptr;
                panel_job.base = base_.data();
                panel_job.out = row_.data();
                runPanels(panel_job);
            }
            for (size_t q = 0; q < top_key_.size(); ++q) {
                uint64_t const key = kernels_->top_key(row_[q], 0, count);
                // Keys hold the complement of an id inside the tile: move it to the row.
                top_key_[q] = maxOf(top_key_[q], key - static_cast<uint64_t>(begin));
                float* const kept = keptRow(static_cast<int>(q), step);
                if (staged && kept) std::copy(row_[q], row_[q] + count, kept + begin);
            }
        }
        for (int request = 0; request < in_.num_requests; ++request) {
            size_t const q = static_cast<size_t>(request);
            finish(request, step, keptRow(request, step), heads.target_ids, vocab, topOfKey(top_key_[q]));
        }
    }

    void candidateStep(int request, int step) {
        HeadWeights const& heads = *in_.heads;
        int const count = in_.num_candidates;
        size_t const width = static_cast<size_t>(count);
        float const* const base = baseRow(request, step);
        entry_.resize(width);
        candidate_base_.resize(width);
        int32_t* const ids = out_.ids + at(request, step) * width;
        if (!topCandidates(team_, base, heads.draft_vocab, count, entry_.data())) {
            RowTop const top = topOfKey(rowTopKey(team_, base, 0, heads.draft_vocab));
            std::fill(ids, ids + width, 0);
            return finish(request, step, nullptr, ids, count, top);
        }
        for (size_t c = 0; c < width; ++c) {
            candidate_base_[c] = base[entry_[c]];
            ids[c] = heads.target_ids ? heads.target_ids[entry_[c]] : entry_[c];
        }
        float* row = candidate_base_.data();
        if (out_.rows) row = out_.rows + at(request, step) * width;
        correctCandidates(request, count, row);
        finish(request, step, row, ids, count, topOfKey(rowTopKey(team_, row, 0, count)));
    }

    void correctCandidates(int request, int count, float* row) {
        HeadWeights const& heads = *in_.heads;
        if (heads.kind == HeadKind::kNone) {
            if (row != candidate_base_.data()) std::copy(candidate_base_.begin(), candidate_base_.end(), row);
            return;
        }
        size_t const padded = static_cast<size_t>((count + kPanel - 1) / kPanel) * kPanel;
        PanelJob panel_job = job(request, 1);
        panel_job.count = count;
        if (heads.w2_int8) {
            candidate_i8_.resize(padded * r4_);
            candidate_sum_.resize(padded);
            candidate_scale_.resize(padded);
            auto const w2 = [&](int c) { return heads.w2_int8 + static_cast<int64_t>(entry_[static_cast<size_t>(c)]) * heads.rank; };
            packI8(w2, count, heads.rank, candidate_i8_.data(), candidate_sum_.data());
            for (size_t c = 0; c < entry_.size(); ++c) candidate_scale_[c] = heads.w2_scale[entry_[c]];
            panel_job.panels = candidate_i8_.data();
            panel_job.row_sum = candidate_sum_.data();
            panel_job.scale = candidate_scale_.data();
        } else {
            candidate_f32_.resize(padded * static_cast<size_t>(heads.rank));
            auto const w2 = [&](int c) { return heads.w2 + static_cast<int64_t>(entry_[static_cast<size_t>(c)]) * heads.rank; };
            packF32(w2, count, heads.rank, candidate_f32_.data());
            panel_job.panels = candidate_f32_.data();
        }
        float const* const base = candidate_base_.data();
        panel_job.base = &base;
        panel_job.out = &row;
        runPanels(panel_job);
    }

    void finish(int request, int step, float const* row, int32_t const* ids, int size, RowTop const& top) {
        AcceptWorkspace const ws = {tile_mass_.data(), mass_.data()};
        DraftPick const pick = pickDraft(team_, in_.mode, in_.params[request], step, in_.heads->vocab, row, ids, size,
                                         top, ws);
        out_.picks[at(request, step)] = pick;
        if (pick.status != kRowOk && out_.status[request] == kRowOk) out_.status[request] = pick.status;
        out_.tokens[at(request, step)] = pick.status != kRowOk ? -1 : ids ? ids[pick.index] : pick.index;
    }

    HostTeam team_;
    Kernels const* kernels_;
    ChainInput in_;
    ChainOutput out_;
    size_t r4_;
    std::vector<float> latent_, latent_scale_, state_, embedding_, pre_, tile_;
    std::vector<int8_t> latent_int8_;
    std::vector<uint64_t> tile_mass_, mass_, top_key_;
    std::vector<float const*> base_;
    std::vector<float*> row_;
    std::vector<int32_t> entry_, candidate_sum_;
    std::vector<float> candidate_base_, candidate_f32_, candidate_scale_;
    std::vector<int8_t> candidate_i8_;
};

}  // namespace dspark::host
