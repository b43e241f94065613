#pragma once
//! Exact top-k and top-p as one pivot on raw logits; everything equal to the pivot is kept.

#include "dspark/row.h"

namespace dspark {

DSPARK_HD inline uint32_t orderedKey(float value) { return static_cast<uint32_t>(argmaxKey(value, 0) >> 32); }

DSPARK_HD inline float orderedValue(uint32_t ordered) {
    return bitsFloat((ordered & 0x80000000u) ? ordered & 0x7fffffffu : ~ordered);
}

//! Mass that top-p must keep of `total`.
DSPARK_HD inline uint64_t topPNeed(float top_p, uint64_t total) {
    double const product = mulRn(static_cast<double>(top_p), static_cast<double>(total));
    uint64_t const floor = static_cast<uint64_t>(product);
    uint64_t const need = floor + (static_cast<double>(floor) < product ? 1 : 0);
    return maxOf<uint64_t>(1, minOf(total, need));
}

//! Largest key such that the sum of weight(id) over ids with key >= it reaches `need`: 32 halvings of the key space.
DSPARK_TEAM template <class Team, class Row, class Weight>
DSPARK_HD uint32_t pivotKey(Team const& team, Row const& row, int count, Weight const& weight, uint64_t need) {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; --bit) {
        uint32_t const trial = key | (1u << bit);
        uint64_t sum = 0;
        for (int id = team.rank(); id < count; id += team.size()) {
            if (orderedKey(row[id]) >= trial) sum += weight(id);
        }
        if (team.addU64(sum) >= need) key = trial;
    }
    return key;
}

struct UnitWeight {
    DSPARK_HD uint64_t operator()(int) const { return 1; }
};

DSPARK_TEAM template <class Team, class Row>
DSPARK_HD float topKPivot(Team const& team, Row const& row, int count, int top_k) {
    return orderedValue(pivotKey(team, row, count, UnitWeight{}, static_cast<uint64_t>(top_k)));
}

DSPARK_TEAM template <class Team, class Row>
DSPARK_HD float topPPivot(Team const& team, Row const& row, int count, RowLaw const& law, uint64_t need, uint64_t) {
    return orderedValue(pivotKey(team, row, count, rowMass(row, law), need));
}

//! Law of a row after temperature, top-k and top-p; fills tile_mass and returns the total in `total`.
DSPARK_TEAM template <class Team, class Row>
DSPARK_HD RowLaw filteredLaw(Team const& team, Row const& row, int count, float max, float temperature, int top_k,
                             float top_p, uint64_t* tile_mass, uint64_t* total) {
    RowLaw law = unfilteredLaw(max, temperature);
    if (top_k > 0 && top_k < count) law.pivot = topKPivot(team, row, count, top_k);
    *total = tileMasses(team, rowMass(row, law), count, tile_mass);
    if (top_p < 1.0f) {
        law.pivot = topPPivot(team, row, count, law, topPNeed(top_p, *total), *total);
        team.sync();  // all ranks have read tile_mass before it is written again
        *total = tileMasses(team, rowMass(row, law), count, tile_mass);
    }
    return law;
}

}  // namespace dspark
