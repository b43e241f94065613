#pragma once
//! Acceptance of one request's draft prefix (docs/core_numerics.md, section 9).
//! Source: Leviathan et al. 2023, Algorithm 1; coupled mode: Daliri et al. 2024.

#include "dspark/pivot.h"

namespace dspark {

enum class Acceptance : int32_t { kGreedy = 0, kRejection = 1, kCoupled = 2 };

//! Sampling parameters of one request; `position` is the absolute position of its anchor.
struct RequestParams {
    float temperature;
    int32_t top_k;   // 0 = off
    float top_p;     // 1 = off
    uint64_t seed;
    uint64_t position;
    DSPARK_HD bool greedy() const { return temperature < kGreedyTemperature; }
};

//! The distribution one draft token was sampled from. A null `row` is a point mass.
struct Proposal {
    float const* row;    // [size] corrected draft logits
    int32_t const* ids;  // [size] target id of each entry, all different; null = identity
    int32_t size;
    int32_t index;  // entry of the drawn token
    RowLaw law;
    uint64_t total;
};

//! Shared by the team; contents undefined on entry and exit.
struct AcceptWorkspace {
    uint64_t* tile_mass;  // [numTiles(V)]
    uint64_t* mass;       // [V]
};

constexpr double kResidualOne = 2251799813685248.0;  // 2^51

//! Whether a draft token with target probability p_mass / p_total and draft probability q_mass / q_total is accepted.
DSPARK_HD inline bool acceptTest(uint64_t bits, uint64_t p_mass, uint64_t p_total, uint64_t q_mass, uint64_t q_total) {
    double const p = divRn(static_cast<double>(p_mass), static_cast<double>(p_total));
    double const q = divRn(static_cast<double>(q_mass), static_cast<double>(q_total));
    return mulRn(unit53(bits), q) < p;
}

DSPARK_HD inline uint64_t probabilityQ51(uint64_t mass, double factor) {
    return static_cast<uint64_t>(roundI64(mulRn(static_cast<double>(mass), factor)));
}

//! out[v] = p(v) in Q.51.
DSPARK_TEAM template <class Team, class Mass>
DSPARK_HD void probabilityRow(Team const& team, Mass const& mass, int count, uint64_t total, uint64_t* out) {
    double const factor = divRn(kResidualOne, static_cast<double>(total));
    for (int id = team.rank(); id < count; id += team.size()) out[id] = probabilityQ51(mass(id), factor);
    team.sync();  // out visible to all ranks
}

//! row[target id] = max(row[target id] - q, 0) for every entry of a proposal.
DSPARK_TEAM template <class Team, class Mass>
DSPARK_HD void subtractProposal(Team const& team, Mass const& mass, int32_t const* ids, int size, uint64_t total,
                                uint64_t* row) {
    double const factor = divRn(kResidualOne, static_cast<double>(total));
    for (int entry = team.rank(); entry < size; entry += team.size()) {
        uint64_t const q = probabilityQ51(mass(entry), factor);
        uint64_t* const p = row + (ids ? ids[entry] : entry);
        *p = *p > q ? *p - q : 0;
    }
    team.sync();  // row visible to all ranks
}

//! Token that replaces rejected draft token `token`; `tile_mass` of ws holds the target row's tiles on entry.
DSPARK_TEAM template <class Team, class Row>
DSPARK_HD int residualToken(Team const& team, Row const& row, int vocab, RowLaw const& law, uint64_t total,
                            Proposal const& proposal, int token, uint64_t bits, AcceptWorkspace const& ws) {
    probabilityRow(team, rowMass(row, law), vocab, total, ws.mass);
    if (proposal.row) {
        subtractProposal(team, rowMass(proposal.row, proposal.law), proposal.ids, proposal.size, proposal.total,
                         ws.mass);
    } else {
        if (team.rank() == 0) ws.mass[token] = 0;
        team.sync();  // ws.mass visible to all ranks
    }
    uint64_t const residual = tileMasses(team, ArrayMass{ws.mass}, vocab, ws.tile_mass);
    if (residual > 0) return pickToken(team, ArrayMass{ws.mass}, vocab, ws.tile_mass, residual, bits);
    team.sync();  // all ranks have read tile_mass before it is written again
    tileMasses(team, rowMass(row, law), vocab, ws.tile_mass);
    return pickToken(team, rowMass(row, law), vocab, ws.tile_mass, total, bits);
}

struct AcceptResult {
    int32_t emitted;  // tokens written to out; 0 on a row error
    RowStatus status;
};

//! Decide one request. `rows(k)` is the target's logit row after k draft tokens, `proposal(k)` the law of draft token k.
//!
//! Reads   draft_tokens [verify_len] target ids, rows 0..verify_len (only as far as the walk gets)
//! Writes  out [verify_len + 1] by rank 0
DSPARK_TEAM template <class Team, class Rows, class Proposals>
DSPARK_HD AcceptResult acceptRequest(Team const& team, Acceptance mode, RequestParams const& params, int vocab,
                                     int verify_len, int32_t const* draft_tokens, Rows const& rows,
                                     Proposals const& proposal, AcceptWorkspace const& ws, int32_t* out) {
    bool const greedy = mode == Acceptance::kGreedy || params.greedy();
    for (int step = 0; step <= verify_len; ++step) {
        auto const row = rows(step);
        uint64_t const position = params.position + 1 + static_cast<uint64_t>(step);
        RowTop const top = topOfKey(rowTopKey(team, row, 0, vocab));
        if (top.status != kRowOk) return {0, top.status};
        int const draft = step < verify_len ? draft_tokens[step] : -1;
        int token = top.id;
        if (!greedy) {
            uint64_t total = 0;
            RowLaw const law = filteredLaw(team, row, vocab, top.max, params.temperature, params.top_k, params.top_p,
                                           ws.tile_mass, &total);
            if (mode == Acceptance::kCoupled) {
                token = coupledToken(team, rowMass(row, law), vocab, ws.tile_mass, params.seed, position);
            } else if (draft < 0) {
                uint64_t const bits = streamBits64(params.seed, position, kStreamBonus, 0);
                token = pickToken(team, rowMass(row, law), vocab, ws.tile_mass, total, bits);
            } else {
                Proposal const q = proposal(step);
                uint64_t const q_mass = q.row ? lawMass(q.law, q.row[q.index]) : 1;
                uint64_t const test = streamBits64(params.seed, position, kStreamAccept, 0);
                if (acceptTest(test, lawMass(law, row[draft]), total, q_mass, q.row ? q.total : 1)) {
                    token = draft;
                } else {
                    uint64_t const bits = streamBits64(params.seed, position, kStreamResidual, 0);
                    token = residualToken(team, row, vocab, law, total, q, draft, bits, ws);
                    // A residual never has mass on the rejected token, except when p == q everywhere.
                    if (team.rank() == 0) out[step] = token;
                    return {step + 1, kRowOk};
                }
            }
            team.sync();  // all ranks are done with the workspace before the next row
        }
        if (team.rank() == 0) out[step] = token;
        if (token != draft) return {step + 1, kRowOk};
    }
    return {verify_len + 1, kRowOk};
}

}  // namespace dspark
