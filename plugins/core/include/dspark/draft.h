#pragma once
//! Choosing one draft token from a corrected logit row, and the chain over a block.

#include "dspark/accept.h"
#include "dspark/heads.h"

namespace dspark {

constexpr int kMaxDraftLen = 64;

//! Entry of the row that was drawn, and the law it was drawn from (total 0 = a point mass).
struct DraftPick {
    int32_t index;
    RowStatus status;
    RowLaw law;
    uint64_t total;
};

//! Entry whose target id is `token`.
DSPARK_TEAM template <class Team>
DSPARK_HD int entryOfTarget(Team const& team, int32_t const* ids, int size, int token) {
    uint64_t found = 0;
    for (int entry = team.rank(); entry < size; entry += team.size()) {
        if (ids[entry] == token) found = static_cast<uint64_t>(entry) + 1;
    }
    return static_cast<int>(team.maxU64(found)) - 1;
}

//! Draw draft token `step` from `row`.
//!
//! Reads      row [size] corrected logits; ids [size] target ids or null; top = topOfKey of the row
//! Workspace  ws.tile_mass [numTiles(V)]; ws.mass [V] only for coupled mode with ids
DSPARK_TEAM template <class Team>
DSPARK_HD DraftPick pickDraft(Team const& team, Acceptance mode, RequestParams const& params, int step, int vocab,
                              float const* row, int32_t const* ids, int size, RowTop const& top,
                              AcceptWorkspace const& ws) {
    if (top.status != kRowOk) return {-1, top.status, {}, 0};
    if (mode == Acceptance::kGreedy || params.greedy()) return {top.id, kRowOk, {}, 0};
    uint64_t total = 0;
    RowLaw const law = filteredLaw(team, row, size, top.max, params.temperature, params.top_k, params.top_p,
                                   ws.tile_mass, &total);
    auto const mass = rowMass(row, law);
    int index;
    if (mode == Acceptance::kRejection) {
        uint64_t const bits =
            streamBits64(params.seed, params.position, kStreamDraft, static_cast<uint32_t>(step));
        index = pickToken(team, mass, size, ws.tile_mass, total, bits);
    } else {
        uint64_t const position = params.position + 1 + static_cast<uint64_t>(step);
        if (ids) {
            for (int id = team.rank(); id < vocab; id += team.size()) ws.mass[id] = 0;
            team.sync();  // zeros before the scatter
            for (int entry = team.rank(); entry < size; entry += team.size()) ws.mass[ids[entry]] = mass(entry);
            team.sync();  // scatter before the sums
            tileMasses(team, ArrayMass{ws.mass}, vocab, ws.tile_mass);
            int const token =
                coupledToken(team, ArrayMass{ws.mass}, vocab, ws.tile_mass, params.seed, position);
            index = entryOfTarget(team, ids, size, token);
        } else {
            index = coupledToken(team, mass, size, ws.tile_mass, params.seed, position);
        }
    }
    team.sync();  // all ranks are done with the workspace
    return {index, kRowOk, law, total};
}

//! One step of the chain for one request: latent of the previous token, corrected row, pick.
//!
//! Reads   base [Vd] base logits of this step, hidden [d] or null
//! Writes  row [Vd] corrected logits (kept by the caller as q's support when the pick is sampled)
DSPARK_TEAM template <class Team>
DSPARK_HD DraftPick draftStep(Team const& team, Acceptance mode, HeadWeights const& heads, RequestParams const& params,
                              int step, int previous, float const* base, float const* hidden, HeadState const& state,
                              AcceptWorkspace const& ws, float* row) {
    headLatent(team, heads, previous, hidden, state);
    for (int id = team.rank(); id < heads.draft_vocab; id += team.size()) {
        row[id] = correctedLogit(heads, state, base[id], id);
    }
    team.sync();  // row visible to all ranks
    float const* const corrected = row;
    RowTop const top = topOfKey(rowTopKey(team, corrected, 0, heads.draft_vocab));
    return pickDraft(team, mode, params, step, heads.vocab, corrected, heads.target_ids, heads.draft_vocab, top, ws);
}

}  // namespace dspark
