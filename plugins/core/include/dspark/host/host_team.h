#pragma once
//! HostTeam: one thread with SIMD bodies. The shared algorithms pick up the overloads below by argument-dependent lookup.

#include <algorithm>
#include <functional>
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

//! Masses of at most one tile, as an array that starts at id `begin`.
struct TileBuffer {
    uint64_t mass[kTile];
    ArrayMass from(HostTeam const& team, RowMass<float const*> const& row, int begin, int end) {
        team.kernels->masses(row.row + begin, row.law, end - begin, mass);
        return {mass};
    }
};

inline int pickInRange(HostTeam const& team, RowMass<float const*> const& mass, int begin, int end, uint64_t target) {
    TileBuffer buffer;
    return begin + pickInRange(SerialTeam{}, buffer.from(team, mass, begin, end), 0, end - begin, target);
}

inline int raceWinner(HostTeam const& team, RowMass<float const*> const& mass, int begin, int end, uint64_t seed,
                      uint64_t position, Stream stream) {
    TileBuffer buffer;
    ArrayMass const tile = buffer.from(team, mass, begin, end);
    auto const shifted = [&](int id) { return tile(id - begin); };
    return raceWinner(SerialTeam{}, shifted, begin, end, seed, position, stream);
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

//! Selection of the top-p pivot: bracket it with a sample, weigh the bracket's ends, keep only what lies between.
class TopPSelection {
public:
    TopPSelection(HostTeam const& team, RowLaw const& law, uint64_t need, uint64_t total)
        : team_(team), law_(law), need_(need), left_(total) {}

    float select(float const* row, int count) {
        if (lawMass(law_, law_.max) >= need_) return law_.max;
        team_.scratch->values.resize(static_cast<size_t>(count) + host::kCompressSlack);
        float const* from = row;
        while (count > kSample) {
            int const kept = narrow(from, count);
            if (kept == count) break;  // many equal entries: sorting them is cheap
            from = team_.scratch->values.data();
            count = kept;
        }
        float* const rest = team_.scratch->values.data();
        if (from == row) std::copy(row, row + count, rest);
        std::sort(rest, rest + count, std::greater<float>());
        for (int i = 0; i < count; ++i) {
            above_ += lawMass(law_, rest[i]);
            if (above_ >= need_) return addRn(rest[i], 0.0f);
        }
        return law_.pivot;  // not reached: need never exceeds the mass of the row
    }

private:
    static constexpr int kSample = 64;
    static constexpr int kMargin = 3;  // sample ranks to each side of the estimate

    uint64_t massAtLeast(float const* from, int count, float logit) {
        RowLaw law = law_;
        law.pivot = maxOf(law.pivot, logit);
        team_.scratch->mass.resize(static_cast<size_t>(numTiles(count)));
        return team_.kernels->tile_masses(from, law, count, team_.scratch->mass.data());
    }

    int keep(float const* from, int count, float low, float high) {
        return team_.kernels->compress(from, count, low, high, team_.scratch->values.data());
    }

    //! One round; returns how many entries are left at the front of scratch->values.
    int narrow(float const* from, int count) {
        float sample[kSample];
        for (int i = 0; i < kSample; ++i) {
            sample[i] = from[static_cast<int64_t>(i) * (count - 1) / (kSample - 1)];
        }
        std::sort(sample, sample + kSample, std::greater<float>());
        double mass[kSample], all = 0.0;
        for (int i = 0; i < kSample; ++i) all += mass[i] = static_cast<double>(lawMass(law_, sample[i]));
        double const wanted = all * static_cast<double>(need_ - above_) / static_cast<double>(left_);
        int at = 0;
        for (double sum = mass[0]; at + 1 < kSample && sum < wanted; sum += mass[at]) ++at;
        float const high = sample[maxOf(0, at - kMargin)];
        float const low = sample[minOf(kSample - 1, at + kMargin)];
        float const infinity = bitsFloat(0x7f800000u);
        uint64_t const at_high = massAtLeast(from, count, high);
        if (above_ + at_high >= need_) {
            left_ = at_high;
            return keep(from, count, high, infinity);
        }
        uint64_t const at_low = massAtLeast(from, count, low);
        if (above_ + at_low >= need_) {
            above_ += at_high;
            left_ = at_low - at_high;
            return keep(from, count, low, high);
        }
        above_ += at_low;
        left_ -= at_low;
        return keep(from, count, -infinity, low);
    }

    HostTeam team_;
    RowLaw law_;
    uint64_t need_;
    uint64_t above_ = 0;  // mass of everything above the bracket
    uint64_t left_;       // mass inside the bracket
};

inline float topPPivot(HostTeam const& team, float const* row, int count, RowLaw const& law, uint64_t need,
                       uint64_t total) {
    return TopPSelection(team, law, need, total).select(row, count);
}

}  // namespace dspark
