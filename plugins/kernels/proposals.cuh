//! Draft distributions as the device holds them, and picking from them.
#pragma once

#include "teams.cuh"

#include "dspark/draft.h"

namespace dspark {

//! Entry of a draft row that stands for a target id, -1 when none does.
struct EntryOfTarget {
    int32_t const* draft_of_target;  // [V] or null = identity
    int32_t const* candidates;       // [size] ascending draft ids, or null = every draft id is its own entry
    int32_t size;

    __device__ bool identity() const { return draft_of_target == nullptr && candidates == nullptr; }

    __device__ int operator()(int target) const {
        int const draft = draft_of_target ? draft_of_target[target] : target;
        if (candidates == nullptr) return draft < size ? draft : -1;
        int low = 0, high = size;
        while (low < high) {
            int const middle = (low + high) >> 1;
            if (candidates[middle] < draft) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return draft >= 0 && low < size && candidates[low] == draft ? low : -1;
    }
};

//! Mass of a draft row by target id.
struct TargetMass {
    float const* row;
    RowLaw law;
    EntryOfTarget entry_of;
    __device__ uint64_t operator()(int target) const {
        int const entry = entry_of(target);
        return entry < 0 ? 0 : lawMass(law, row[entry]);
    }
};

//! Parameters of one request as the core wants them.
__device__ inline RequestParams requestParams(float const* temperature, int32_t const* top_k, float const* top_p,
                                              int64_t const* seed, int32_t const* positions, int request) {
    return {temperature[request], top_k[request], top_p[request], static_cast<uint64_t>(seed[request]),
            static_cast<uint64_t>(static_cast<uint32_t>(positions[request]))};
}

__device__ inline bool isFiltered(RequestParams const& params, int size) {
    return (params.top_k > 0 && params.top_k < size) || params.top_p < 1.0f;
}

//! pickDraft of plugins/core without a V-sized scatter: coupled mode over a cut vocabulary looks entries up instead.
//!
//! Reads   row [size]; tile_mass [numTiles(max(V, size))] and `total` already hold the unfiltered masses when masses_ready
__device__ inline DraftPick pickFromRow(BlockTeam const& team, Acceptance mode, RequestParams const& params, int step,
                                        int vocab, float const* row, int size, EntryOfTarget const& entry_of,
                                        RowTop const& top, uint64_t* tile_mass, bool masses_ready, uint64_t ready_total) {
    if (top.status != kRowOk) return {-1, top.status, {}, 0};
    if (mode == Acceptance::kGreedy || params.greedy()) return {top.id, kRowOk, {}, 0};
    RowLaw law = unfilteredLaw(top.max, params.temperature);
    uint64_t total = ready_total;
    if (!masses_ready) {
        law = filteredLaw(team, row, size, top.max, params.temperature, params.top_k, params.top_p, tile_mass, &total);
    }
    auto const mass = rowMass(row, law);
    int index;
    if (mode == Acceptance::kRejection) {
        uint64_t const bits = streamBits64(params.seed, params.position, kStreamDraft, static_cast<uint32_t>(step));
        index = pickToken(team, mass, size, tile_mass, total, bits);
    } else {
        uint64_t const position = params.position + 1 + static_cast<uint64_t>(step);
        if (entry_of.identity()) {
            index = coupledToken(team, mass, size, tile_mass, params.seed, position);
        } else {
            TargetMass const by_target = {row, law, entry_of};
            if (!masses_ready) {
                team.sync();  // all ranks have read tile_mass before it is written again
                tileMasses(team, by_target, vocab, tile_mass);
            }
            int const token = coupledToken(team, by_target, vocab, tile_mass, params.seed, position);
            index = token < 0 ? -1 : entry_of(token);
        }
    }
    team.sync();  // all ranks are done with tile_mass
    return {index, kRowOk, law, total};
}

}  // namespace dspark
