#pragma once
//! A logit row as exact integers: argmax key, probability masses in Q.40, picking (docs/core_numerics.md, sections 3-5).
//!
//! `Row` is anything indexable that yields float; `Mass` is a functor id -> uint64 mass. Arrays passed in are shared by the team.

#include "dspark/math.h"
#include "dspark/philox.h"
#include "dspark/status.h"
#include "dspark/team.h"

namespace dspark {

constexpr int kTile = 1024;
constexpr int kTileShift = 10;
constexpr int kMassBits = 40;
constexpr int kMaxVocab = 1 << 20;
constexpr float kGreedyTemperature = 1e-5f;

DSPARK_HD inline int numTiles(int count) { return (count + kTile - 1) >> kTileShift; }

//! Key whose unsigned order is (value ascending, id descending); NaN is above everything, -0 equals +0.
DSPARK_HD inline uint64_t argmaxKey(float value, int id) {
    uint32_t const bits = floatBits(addRn(value, 0.0f));
    uint32_t const ordered = isNan(value) ? 0xffffffffu : (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return (static_cast<uint64_t>(ordered) << 32) | static_cast<uint32_t>(~id);
}

//! Largest logit of a row and its lowest id.
struct RowTop {
    float max;
    int id;
    RowStatus status;
};

DSPARK_HD inline RowTop topOfKey(uint64_t key) {
    uint32_t const ordered = static_cast<uint32_t>(key >> 32);
    int const id = static_cast<int>(~static_cast<uint32_t>(key));
    float const value = bitsFloat((ordered & 0x80000000u) ? ordered & 0x7fffffffu : ~ordered);
    if (ordered >= 0xff800000u) return {value, id, kRowNan};
    if (ordered <= 0x007fffffu) return {value, id, kRowNoFinite};
    return {value, id, kRowOk};
}

DSPARK_TEAM template <class Team, class Row>
DSPARK_HD uint64_t rowTopKey(Team const& team, Row const& row, int begin, int end) {
    uint64_t key = 0;
    for (int id = begin + team.rank(); id < end; id += team.size()) key = maxOf(key, argmaxKey(row[id], id));
    return team.maxU64(key);
}

//! The law of one row: mass(l) = l >= pivot ? rint(2^((l - max) * scale) * 2^40) : 0.
struct RowLaw {
    float max;
    float scale;  // log2(e) / temperature
    float pivot;  // -inf = keep everything
};

DSPARK_HD inline RowLaw unfilteredLaw(float max, float temperature) {
    return {max, divRn(kLog2e, temperature), bitsFloat(0xff800000u)};
}

DSPARK_HD inline float lawExponent(RowLaw const& law, float logit) {
    float const z = mulRn(subRn(logit, law.max), law.scale);
    return z > -64.0f ? z : -64.0f;
}

DSPARK_HD inline uint64_t lawMass(RowLaw const& law, float logit) {
    if (!(logit >= law.pivot)) return 0;
    return roundU64(exp2Shifted(lawExponent(law, logit), kMassBits));
}

template <class Row>
struct RowMass {
    Row row;
    RowLaw law;
    DSPARK_HD uint64_t operator()(int id) const { return lawMass(law, row[id]); }
};

template <class Row>
DSPARK_HD inline RowMass<Row> rowMass(Row row, RowLaw const& law) {
    return {row, law};
}

struct ArrayMass {
    uint64_t const* mass;
    DSPARK_HD uint64_t operator()(int id) const { return mass[id]; }
};

//! Fill tile_mass[numTiles(count)] and return the total.
DSPARK_TEAM template <class Team, class Mass>
DSPARK_HD uint64_t tileMasses(Team const& team, Mass const& mass, int count, uint64_t* tile_mass) {
    uint64_t total = 0;
    for (int tile = 0; tile < numTiles(count); ++tile) {
        int const end = minOf(count, (tile + 1) << kTileShift);
        uint64_t sum = 0;
        for (int id = (tile << kTileShift) + team.rank(); id < end; id += team.size()) sum += mass(id);
        sum = team.addU64(sum);
        if (team.rank() == 0) tile_mass[tile] = sum;
        total += sum;
    }
    team.sync();  // tile_mass visible to all ranks
    return total;
}

//! Lowest id in [begin, end) whose inclusive prefix sum of masses exceeds `target`; the caller knows it exists.
DSPARK_TEAM template <class Team, class Mass>
DSPARK_HD int pickInRange(Team const& team, Mass const& mass, int begin, int end, uint64_t target) {
    Span const span = chunkOf(team, end - begin);
    uint64_t sum = 0;
    for (int id = begin + span.begin; id < begin + span.end; ++id) sum += mass(id);
    uint64_t total = 0;
    uint64_t prefix = team.exclusiveAddU64(sum, &total);
    uint64_t found = 0;
    if (target >= prefix && target - prefix < sum) {
        for (int id = begin + span.begin; id < begin + span.end; ++id) {
            prefix += mass(id);
            if (prefix > target) {
                found = static_cast<uint64_t>(id) + 1;
                break;
            }
        }
    }
    return static_cast<int>(team.maxU64(found)) - 1;
}

//! Token that 64 random bits select by the two-level inverse CDF; -1 when total is 0.
DSPARK_TEAM template <class Team, class Mass>
DSPARK_HD int pickToken(Team const& team, Mass const& mass, int count, uint64_t const* tile_mass, uint64_t total,
                        uint64_t bits) {
    if (total == 0) return -1;
    uint64_t target = mulHi64(bits, total);
    int tile = 0;  // every rank scans the few tile masses itself: cheaper than a collective
    while (target >= tile_mass[tile]) target -= tile_mass[tile++];
    int const begin = tile << kTileShift;
    return pickInRange(team, mass, begin, minOf(count, begin + kTile), target);
}

//! Index in [begin, end) of the smallest exponential / mass, lowest index on ties; -1 when all masses are 0.
//! The exponential of index i is word i & 3 of block i >> 2 of the stream.
DSPARK_TEAM template <class Team, class Mass>
DSPARK_HD int raceWinner(Team const& team, Mass const& mass, int begin, int end, uint64_t seed, uint64_t position,
                         Stream stream) {
    uint64_t best = 0;  // ~bits(r): r > 0, so the order of its bits is its order
    int winner = -1;
    for (int block = (begin >> 2) + team.rank(); block <= (end - 1) >> 2; block += team.size()) {
        PhiloxBlock const noise = streamBlock(seed, position, stream, static_cast<uint32_t>(block));
        for (int word = 0; word < 4; ++word) {
            int const id = (block << 2) + word;
            if (id < begin || id >= end) continue;
            uint64_t const m = mass(id);
            if (m == 0) continue;
            double const r =
                divRn(static_cast<double>(exponentialExact(noise.word[word])), static_cast<double>(m));
            uint64_t const key = ~doubleBits(r);
            if (key > best) {
                best = key;
                winner = id;
            }
        }
    }
    uint64_t const team_best = team.maxU64(best);
    if (team_best == 0) return -1;
    uint64_t const mine = (best == team_best && winner >= 0) ? static_cast<uint64_t>(0x7fffffff - winner) : 0;
    return 0x7fffffff - static_cast<int>(team.maxU64(mine));
}

//! Token that the coupled noise of (seed, position) selects: a race of tiles, then a race inside the winning tile.
DSPARK_TEAM template <class Team, class Mass>
DSPARK_HD int coupledToken(Team const& team, Mass const& mass, int count, uint64_t const* tile_mass, uint64_t seed,
                           uint64_t position) {
    int const tile =
        raceWinner(team, ArrayMass{tile_mass}, 0, numTiles(count), seed, position, kStreamCoupledTile);
    if (tile < 0) return -1;
    int const begin = tile << kTileShift;
    return raceWinner(team, mass, begin, minOf(count, begin + kTile), seed, position, kStreamCoupledToken);
}

}  // namespace dspark
