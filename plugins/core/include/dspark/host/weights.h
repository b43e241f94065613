#pragma once
//! Owned head weights of the host path: row-major factors as given, W2 packed in panels, the confidence table.

#include <memory>
#include <vector>

#include "dspark/host/host_team.h"

namespace dspark::host {

//! W2 in panels of kPanel vocabulary rows: what the panel kernels stream.
struct PackedW2 {
    std::vector<float> f32;     // [panel][r][64]
    std::vector<int8_t> i8;     // [panel][r4 / 4][64][4]
    std::vector<int32_t> row_sum;  // [Vd]

    void const* tile(int tile_index, int rank) const {
        int64_t const rows = static_cast<int64_t>(tile_index) << kTileShift;
        if (!i8.empty()) return i8.data() + rows * ((rank + 3) & ~3);
        return f32.data() + rows * rank;
    }
    size_t bytes() const { return f32.size() * 4 + i8.size() + row_sum.size() * 4; }
};

//! Pack float rows; `row(v)` yields the row of entry v, rows past `count` are zero.
template <class RowOf>
inline void packF32(RowOf const& row, int count, int rank, float* panels) {
    int const padded = (count + kPanel - 1) / kPanel * kPanel;
    for (int v = 0; v < padded; ++v) {
        float* const column = panels + static_cast<int64_t>(v / kPanel) * rank * kPanel + v % kPanel;
        float const* const from = v < count ? row(v) : nullptr;
        for (int i = 0; i < rank; ++i) column[static_cast<int64_t>(i) * kPanel] = from ? from[i] : 0.0f;
    }
}

template <class RowOf>
inline void packI8(RowOf const& row, int count, int rank, int8_t* panels, int32_t* row_sum) {
    int const r4 = (rank + 3) & ~3;
    int const padded = (count + kPanel - 1) / kPanel * kPanel;
    for (int v = 0; v < padded; ++v) {
        int8_t* const column = panels + static_cast<int64_t>(v / kPanel) * r4 * kPanel + (v % kPanel) * 4;
        int8_t const* const from = v < count ? row(v) : nullptr;
        int32_t sum = 0;
        for (int i = 0; i < r4; ++i) {
            int8_t const value = from && i < rank ? from[i] : static_cast<int8_t>(0);
            column[static_cast<int64_t>(i >> 2) * kPanel * 4 + (i & 3)] = value;
            sum += value;
        }
        if (v < count) row_sum[v] = sum;
    }
}

inline PackedW2 packW2(HeadWeights const& heads) {
    PackedW2 packed;
    if (heads.kind == HeadKind::kNone) return packed;
    int const rank = heads.rank;
    size_t const padded = static_cast<size_t>((heads.draft_vocab + kPanel - 1) / kPanel) * kPanel;
    if (heads.w2_int8) {
        packed.i8.resize(padded * static_cast<size_t>((rank + 3) & ~3));
        packed.row_sum.resize(static_cast<size_t>(heads.draft_vocab));
        auto const row = [&](int v) { return heads.w2_int8 + static_cast<int64_t>(v) * rank; };
        packI8(row, heads.draft_vocab, rank, packed.i8.data(), packed.row_sum.data());
    } else {
        packed.f32.resize(padded * static_cast<size_t>(rank));
        auto const row = [&](int v) { return heads.w2 + static_cast<int64_t>(v) * rank; };
        packF32(row, heads.draft_vocab, rank, packed.f32.data());
    }
    return packed;
}

//! w_m . W1[v] of every target id.
inline std::vector<float> markovTable(Kernels const* kernels, HeadWeights const& heads, float const* markov_weight) {
    HostTeam const team(kernels, nullptr);
    std::vector<float> table(static_cast<size_t>(heads.vocab));
    std::vector<float> embedding(static_cast<size_t>(heads.rank));
    for (int token = 0; token < heads.vocab; ++token) {
        table[static_cast<size_t>(token)] = markovTableEntry(team, heads, markov_weight, token, embedding.data());
    }
    return table;
}

}  // namespace dspark::host
