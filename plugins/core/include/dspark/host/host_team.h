#pragma once
//! HostTeam: one thread with SIMD bodies. The shared algorithms pick up the overloads below by argument-dependent lookup.

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "dspark/confidence.h"
#include "dspark/draft.h"
#include "dspark/host/dispatch.h"

namespace dspark {

namespace host {

//! Buffers of one calling thread, grown on demand.
struct FilterScratch {
    std::vector<float> group_max;
    std::vector<float> values;
    std::vector<uint64_t> mass;
    std::vector<std::pair<float, uint64_t>> kept;
};

}  // namespace host

struct HostTeam : SerialTeam {
    host::Kernels const* kernels;
    host::FilterScratch* scratch;
    HostTeam(host::Kernels const* k, host::FilterScratch* s) : kernels(k), scratch(s) {}
};

inline uint64_t rowTopKey(HostTeam const& team, float const* row, int begin, int end) {
    return team.kernels->top_key(row, begin, end);
}

inline uint64_t tileMasses(HostTeam const& team, RowMass<float const*> const& mass, int count, uint64_t* tile_mass) {
    return team.kernels->tile_masses(mass.row, mass.law, count, tile_mass);
}

inline void probabilityRow(HostTeam const& team, RowMass<float const*> const& mass, int count, uint64_t total,
                           uint64_t* out) {
    team.kernels->probabilities(mass.row, mass.law, count, divRn(kResidualOne, static_cast<double>(total)), out);
}

inline void subtractProposal(HostTeam const& team, RowMass<float const*> const& mass, int32_t const* ids, int size,
                             uint64_t total, uint64_t* row) {
    double const factor = divRn(kResidualOne, static_cast<double>(total));
    uint64_t q[kTile];
    for (int begin = 0; begin < size; begin += kTile) {
        int const count = minOf(kTile, size - begin);
        team.kernels->probabilities(mass.row + begin, mass.law, count, factor, q);
        for (int i = 0; i < count; ++i) {
            uint64_t* const p = row + (ids ? ids[begin + i] : begin + i);
            *p = *p > q[i] ? *p - q[i] : 0;
        }
    }
}

inline float teamDot(HostTeam const& team, float const* a, float const* b, int n) {
    return team.kernels->dot(a, b, n);
}

//! The k-th largest entry: groups whose maximum is below the k-th largest group maximum cannot hold it.
inline float topKPivot(HostTeam const& team, float const* row, int count, int top_k) {
    host::FilterScratch& s = *team.scratch;
    int const groups = (count + host::kGroup - 1) / host::kGroup;
    s.values.clear();
    if (top_k <= groups) {
        s.group_max.resize(static_cast<size_t>(groups));
        team.kernels->group_max(row, count, s.group_max.data());
        s.values.assign(s.group_max.begin(), s.group_max.end());
        std::nth_element(s.values.begin(), s.values.begin() + (top_k - 1), s.values.end(), std::greater<float>());
        float const bound = s.values[static_cast<size_t>(top_k - 1)];
        s.values.clear();
        for (int group = 0; group < groups; ++group) {
            if (!(s.group_max[static_cast<size_t>(group)] >= bound)) continue;
            int const end = minOf(count, (group + 1) * host::kGroup);
            for (int id = group * host::kGroup; id < end; ++id) {
                if (row[id] >= bound) s.values.push_back(row[id]);
            }
        }
    } else {
        s.values.assign(row, row + count);
    }
    std::nth_element(s.values.begin(), s.values.begin() + (top_k - 1), s.values.end(), std::greater<float>());
    return addRn(s.values[static_cast<size_t>(top_k - 1)], 0.0f);
}

//! Entries lighter than (total - need) / count cannot decide the pivot; the others are bucketed by mass and one bucket sorted.
inline float topPPivot(HostTeam const& team, float const* row, int count, RowLaw const& law, uint64_t need,
                       uint64_t total) {
    host::FilterScratch& s = *team.scratch;
    size_t const groups = static_cast<size_t>((count + host::kGroup - 1) / host::kGroup);
    s.group_max.resize(groups);
    s.mass.resize(groups);
    team.kernels->group_max(row, count, s.group_max.data());
    team.kernels->masses(s.group_max.data(), law, static_cast<int>(groups), s.mass.data());
    uint64_t const floor = maxOf<uint64_t>(1, (total - need) / static_cast<uint64_t>(count));
    constexpr int kBuckets = 1024;  // eight buckets an octave of mass; mass < 2^41
    uint64_t bucket_mass[kBuckets] = {};
    auto const bucketOf = [](uint64_t mass) {
        return static_cast<int>((floatBits(static_cast<float>(mass)) >> 20) - (127u << 3));
    };
    s.kept.clear();
    uint64_t mass[host::kGroup];
    for (size_t group = 0; group < groups; ++group) {
        if (s.mass[group] < floor) continue;
        int const begin = static_cast<int>(group) * host::kGroup;
        int const size = minOf(host::kGroup, count - begin);
        team.kernels->masses(row + begin, law, size, mass);
        for (int i = 0; i < size; ++i) {
            if (mass[i] < floor) continue;
            s.kept.emplace_back(row[begin + i], mass[i]);
            bucket_mass[bucketOf(mass[i])] += mass[i];
        }
    }
    uint64_t above = 0;
    int bucket = kBuckets - 1;
    while (bucket > 0 && above + bucket_mass[bucket] < need) above += bucket_mass[bucket--];
    auto const outside = [&](auto const& entry) { return bucketOf(entry.second) != bucket; };
    s.kept.erase(std::remove_if(s.kept.begin(), s.kept.end(), outside), s.kept.end());
    std::sort(s.kept.begin(), s.kept.end(), [](auto const& a, auto const& b) { return a.first > b.first; });
    for (auto const& entry : s.kept) {
        above += entry.second;
        if (above >= need) return addRn(entry.first, 0.0f);
    }
    return law.pivot;  // not reached: need never exceeds the mass of the row
}

}  // namespace dspark
