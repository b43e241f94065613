#pragma once
//! The portable bodies: plain loops over the shared definitions.

#include "dspark/host/kernels.h"

namespace dspark::host::portable {

inline uint64_t topKey(float const* row, int begin, int end) { return rowTopKey(SerialTeam{}, row, begin, end); }

inline uint64_t tileMassesOf(float const* row, RowLaw const& law, int count, uint64_t* tile_mass) {
    return tileMasses(SerialTeam{}, rowMass(row, law), count, tile_mass);
}

inline void masses(float const* row, RowLaw const& law, int count, uint64_t* out) {
    for (int i = 0; i < count; ++i) out[i] = lawMass(law, row[i]);
}

inline void probabilities(float const* row, RowLaw const& law, int count, double factor, uint64_t* out) {
    for (int i = 0; i < count; ++i) {
        out[i] = static_cast<uint64_t>(roundI64(mulRn(static_cast<double>(lawMass(law, row[i])), factor)));
    }
}

inline void groupMax(float const* row, int count, float* out) {
    for (int begin = 0, group = 0; begin < count; begin += kGroup, ++group) {
        int const end = minOf(count, begin + kGroup);
        float best = row[begin];
        for (int i = begin + 1; i < end; ++i) best = maxOf(best, row[i]);
        out[group] = best;
    }
}

inline int compress(float const* row, int count, float low, float high, float* out) {
    int kept = 0;
    for (int i = 0; i < count; ++i) {
        float const x = row[i];
        out[kept] = x;
        kept += (x >= low) & (x < high);
    }
    return kept;
}

inline void panelF32(PanelJob const& job) {
    auto const* const panels = static_cast<float const*>(job.panels);
    auto const* const latents = static_cast<float const*>(job.latent);
    for (int id = 0; id < job.count; ++id) {
        float const* const column = panels + static_cast<int64_t>(id / kPanel) * job.rank * kPanel + id % kPanel;
        for (int request = 0; request < job.num_requests; ++request) {
            float const* const latent = latents + static_cast<int64_t>(request) * job.rank;
            float acc = 0.0f;
            for (int i = 0; i < job.rank; ++i) acc = fmaRn(latent[i], column[static_cast<int64_t>(i) * kPanel], acc);
            job.out[request][id] = addRn(job.base[request][id], acc);
        }
    }
}

inline void panelI8(PanelJob const& job) {
    int const r4 = (job.rank + 3) & ~3;
    auto const* const panels = static_cast<int8_t const*>(job.panels);
    auto const* const latents = static_cast<int8_t const*>(job.latent);
    for (int id = 0; id < job.count; ++id) {
        int8_t const* const column = panels + static_cast<int64_t>(id / kPanel) * r4 * kPanel + (id % kPanel) * 4;
        for (int request = 0; request < job.num_requests; ++request) {
            int8_t const* const latent = latents + static_cast<int64_t>(request) * r4;
            int32_t dot = 0;
            for (int i = 0; i < r4; i += 4) {
                int8_t const* const four = column + static_cast<int64_t>(i) * kPanel;
                for (int j = 0; j < 4; ++j) dot += static_cast<int32_t>(latent[i + j]) * static_cast<int32_t>(four[j]);
            }
            float const scale = mulRn(job.latent_scale[request], job.scale[id]);
            job.out[request][id] = addRn(job.base[request][id], mulRn(static_cast<float>(dot), scale));
        }
    }
}

inline constexpr Kernels kKernels = {"portable", topKey,   tileMassesOf, masses,   probabilities,
                                     groupMax,   compress, dot16,        panelF32, panelI8};

}  // namespace dspark::host::portable
