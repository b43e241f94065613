#pragma once

#include "ragged_accept.h"

#include "packed_rows.cuh"
#include "proposals.cuh"

namespace dspark {

constexpr int kRowThreads = 256;
constexpr int kAcceptThreads = 256;

//! The scratch arrays of one launch (RaggedAcceptLayout).
struct AcceptScratch {
    uint64_t* top_key;
    uint64_t* row_total;
    int32_t* counter;
    float* pivot;
    uint64_t* tile_mass;
    uint64_t* residual_mass;
    int64_t tiles;
};

__device__ inline AcceptScratch acceptScratch(RaggedAcceptParams const& p) {
    RaggedAcceptLayout const layout = raggedAcceptLayout(p.num_tokens, p.num_requests, p.vocab);
    unsigned char* const base = static_cast<unsigned char*>(p.workspace);
    return {reinterpret_cast<uint64_t*>(base + layout.top_key),   reinterpret_cast<uint64_t*>(base + layout.row_total),
            reinterpret_cast<int32_t*>(base + layout.counter),    reinterpret_cast<float*>(base + layout.pivot),
            reinterpret_cast<uint64_t*>(base + layout.tile_mass),
            reinterpret_cast<uint64_t*>(base + layout.residual_mass), layout.tiles};
}

enum RowPhase : int32_t { kRowKeys = 1, kRowMasses = 2 };

struct RowLaunch {
    RaggedAcceptParams params;
    int32_t phases;   // RowPhase bits; both only when gridDim.x is 1
    int32_t aligned;  // rows allow 16-byte loads
};

//! Argmax key of this block's share of a row: tiles of 1,024 ids, a warp a tile.
__device__ inline uint64_t shareKey(LogitRow const& row, int vocab, bool aligned, int first_tile, int tile_step) {
    int const lane = static_cast<int>(threadIdx.x) & 31;
    float const minus_inf = bitsFloat(0xff800000u);
    uint64_t key = 0;
    for (int tile = first_tile; tile < numTiles(vocab); tile += tile_step) {
#pragma unroll
        for (int part = 0; part < kTile / 256; ++part) {
            int const id = (tile << kTileShift) + part * 256 + lane * 8;
            if (id >= vocab) continue;
            Eight const eight = loadEight(row, id, vocab, aligned, minus_inf);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (id + i < vocab) key = maxOf(key, argmaxKey(eight.value[i], id + i));
            }
        }
    }
    return key;
}

//! Tile masses of this block's share of an unfiltered row; returns the lane's part of the sum (lane 0 only).
__device__ inline uint64_t shareMasses(LogitRow const& row, RowLaw const& law, int vocab, bool aligned, int first_tile,
                                       int tile_step, uint64_t* tile_mass) {
    WarpTeam const warp;
    uint64_t total = 0;
    for (int tile = first_tile; tile < numTiles(vocab); tile += tile_step) {
        uint64_t sum = 0;
#pragma unroll
        for (int part = 0; part < kTile / 256; ++part) {
            int const id = (tile << kTileShift) + part * 256 + warp.rank() * 8;
            if (id >= vocab) continue;
            Eight const eight = loadEight(row, id, vocab, aligned, 0.0f);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += id + i < vocab ? lawMass(law, eight.value[i]) : 0;
        }
        sum = warp.addU64(sum);
        if (warp.rank() == 0) {
            tile_mass[tile] = sum;
            total += sum;
        }
    }
    return total;
}

//! Statistics of one packed row: argmax key, then (sampled requests) pivot, tile masses and total.
//! blockIdx.x = share of the row, blockIdx.y + gridDim.y * blockIdx.z = row.
static __global__ void __launch_bounds__(kRowThreads, 1) rowStatisticsKernel(RowLaunch const launch) {
    RaggedAcceptParams const& p = launch.params;
    int32_t const token = static_cast<int32_t>(blockIdx.y + gridDim.y * blockIdx.z);
    if (token >= p.num_tokens) return;
    int32_t const request = requestOfToken(p.cu_tokens, p.num_requests, token);
    if (request < 0) return;
    BlockTeam const team = searchingTeam();
    AcceptScratch const s = acceptScratch(p);
    LogitRow const row = logitRow(p.target_logits, p.logits_type, token, p.logits_stride);
    bool const aligned = launch.aligned != 0;
    int const warps = kRowThreads / 32, warp = static_cast<int>(threadIdx.x) >> 5;
    int const first_tile = static_cast<int>(blockIdx.x) * warps + warp;
    int const tile_step = static_cast<int>(gridDim.x) * warps;

    if (launch.phases & kRowKeys) {
        uint64_t const key = team.maxU64(shareKey(row, p.vocab, aligned, first_tile, tile_step));
        if (team.rank() == 0) {
            atomicMax(reinterpret_cast<unsigned long long*>(s.top_key) + token, static_cast<unsigned long long>(key));
        }
        __syncthreads();  // the key is in place for the second phase of the same launch
    }
    RequestParams const params = requestParams(p.temperature, p.top_k, p.top_p, p.seed, p.positions, request);
    bool const greedy = static_cast<Acceptance>(p.acceptance) == Acceptance::kGreedy || params.greedy();
    if (!(launch.phases & kRowMasses) || greedy) return;
    RowTop const top = topOfKey(s.top_key[token]);
    if (top.status != kRowOk) return;
    uint64_t* const tile_mass = s.tile_mass + token * s.tiles;
    if (isFiltered(params, p.vocab)) {
        if (blockIdx.x != 0) return;  // a filter needs the whole row in one block
        uint64_t total = 0;
        RowLaw const law = filteredLaw(team, row, p.vocab, top.max, params.temperature, params.top_k, params.top_p,
                                       tile_mass, &total);
        if (team.rank() == 0) {
            s.pivot[token] = law.pivot;
            s.row_total[token] = total;
        }
        return;
    }
    RowLaw const law = unfilteredLaw(top.max, params.temperature);
    if (team.rank() == 0 && blockIdx.x == 0) s.pivot[token] = law.pivot;
    uint64_t const total =
        team.addU64(shareMasses(row, law, p.vocab, aligned, first_tile, tile_step, tile_mass));
    if (team.rank() == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(s.row_total) + token, static_cast<unsigned long long>(total));
    }
}

//! q of one draft token.
struct DeviceProposal {
    float const* row;  // null = point mass at token
    RowLaw law;
    uint64_t total;
    int index;
    int token;
    EntryOfTarget entry_of;
};

__device__ inline DeviceProposal proposalOf(RaggedAcceptParams const& p, int request, int step, int token) {
    int64_t const at = static_cast<int64_t>(request) * p.draft_len + step;
    int const size = p.num_candidates > 0 ? p.num_candidates : p.draft_vocab;
    int32_t const* const candidates = p.num_candidates > 0 ? p.candidates + at * size : nullptr;
    DeviceProposal q = {nullptr, {}, 1, 0, token, {p.draft_of_target, candidates, size}};
    if (p.draft_logits == nullptr || p.draft_totals[at] == 0) return q;
    q.row = p.draft_logits + at * size;
    q.law = {p.draft_laws[4 * at], p.draft_laws[4 * at + 1], p.draft_laws[4 * at + 2]};
    q.total = static_cast<uint64_t>(p.draft_totals[at]);
    q.index = p.draft_entries[at];
    return q;
}

//! Residual of one id: max(p - q, 0) in Q.51, computed when asked for.
struct ResidualMass {
    LogitRow row;
    RowLaw law;
    double factor;
    DeviceProposal q;
    double q_factor;
    __device__ uint64_t operator()(int id) const {
        uint64_t const p_mass = probabilityQ51(lawMass(law, row[id]), factor);
        if (q.row == nullptr) return id == q.token ? 0 : p_mass;
        int const entry = q.entry_of(id);
        uint64_t const q_mass = entry < 0 ? 0 : probabilityQ51(lawMass(q.law, q.row[entry]), q_factor);
        return p_mass > q_mass ? p_mass - q_mass : 0;
    }
};

//! Where the walk over a request's draft ended.
struct Verdict {
    int32_t emitted;  // tokens that come out, the last of them yet to be picked unless `token` is set
    RowStatus status;
    int32_t token;    // last token when it needs no pick, else -1
    bool residual;    // pick from the residual of row emitted - 1, else from the row itself
};

//! The row's law as the row launch left it.
__device__ inline RowLaw storedLaw(AcceptScratch const& s, int64_t row_index, float temperature) {
    RowLaw law = unfilteredLaw(topOfKey(s.top_key[row_index]).max, temperature);
    law.pivot = s.pivot[row_index];
    return law;
}

//! The acceptance chain of acceptRequest; every thread computes the same from a few loads.
__device__ inline Verdict judge(BlockTeam const& team, RaggedAcceptParams const& p, AcceptScratch const& s,
                                RequestParams const& params, int request, int32_t first, int verify_len) {
    Acceptance const mode = static_cast<Acceptance>(p.acceptance);
    bool const greedy = mode == Acceptance::kGreedy || params.greedy();
    int32_t const* const drafts = p.draft_tokens + static_cast<int64_t>(request) * p.draft_len;
    for (int step = 0; step <= verify_len; ++step) {
        int64_t const at = first + step;
        RowTop const top = topOfKey(s.top_key[at]);
        if (top.status != kRowOk) return {0, top.status, -1, false};
        int const draft = step < verify_len && drafts[step] < p.vocab ? drafts[step] : -1;
        LogitRow const row = logitRow(p.target_logits, p.logits_type, at, p.logits_stride);
        uint64_t const position = params.position + 1 + static_cast<uint64_t>(step);
        int token = top.id;
        if (!greedy && mode == Acceptance::kCoupled) {
            RowLaw const law = storedLaw(s, at, params.temperature);
            token = coupledToken(team, rowMass(row, law), p.vocab, s.tile_mass + at * s.tiles, params.seed, position);
        } else if (!greedy) {
            if (draft < 0) return {step + 1, kRowOk, -1, false};
            RowLaw const law = storedLaw(s, at, params.temperature);
            DeviceProposal const q = proposalOf(p, request, step, draft);
            uint64_t const q_mass = q.row ? lawMass(q.law, q.row[q.index]) : 1;
            uint64_t const bits = streamBits64(params.seed, position, kStreamAccept, 0);
            if (!acceptTest(bits, lawMass(law, row[draft]), s.row_total[at], q_mass, q.total)) {
                return {step + 1, kRowOk, -1, true};
            }
            continue;
        }
        if (token != draft) return {step + 1, kRowOk, token, false};
    }
    return {0, kRowOk, -1, false};  // not reached: no draft equals the last row's token
}

//! Walks one request, picks its last token, writes its outputs. blockIdx.x = part of the residual row, blockIdx.y = request.
//! Shared memory: team scratch, tile masses.
static __global__ void __launch_bounds__(kAcceptThreads, 1) acceptKernel(RaggedAcceptParams const p) {
    BlockTeam const team = blockTeam();
    AcceptScratch const s = acceptScratch(p);
    int const request = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x);
    int const parts = static_cast<int>(gridDim.x);
    int32_t const first = p.cu_tokens[request];
    int const rows = p.cu_tokens[request + 1] - first;
    RequestParams const params = requestParams(p.temperature, p.top_k, p.top_p, p.seed, p.positions, request);
    bool const walks_alone = static_cast<Acceptance>(p.acceptance) == Acceptance::kCoupled;
    if (walks_alone && part != 0) return;
    Verdict verdict = {0, kRowOk, -1, false};
    if (rows > 0) verdict = judge(team, p, s, params, request, first, minOf(rows - 1, p.draft_len));
    if (!verdict.residual && part != 0) return;

    int token = verdict.token;
    if (verdict.emitted > 0 && token < 0) {
        int const step = verdict.emitted - 1;
        int64_t const at = first + step;
        uint64_t const position = params.position + 1 + static_cast<uint64_t>(step);
        LogitRow const row = logitRow(p.target_logits, p.logits_type, at, p.logits_stride);
        RowLaw const law = storedLaw(s, at, params.temperature);
        uint64_t const total = s.row_total[at];
        uint64_t const* const tile_mass = s.tile_mass + at * s.tiles;
        if (!verdict.residual) {
            uint64_t const bits = streamBits64(params.seed, position, kStreamBonus, 0);
            token = pickToken(team, rowMass(row, law), p.vocab, tile_mass, total, bits);
        } else {
            DeviceProposal const q =
                proposalOf(p, request, step, p.draft_tokens[static_cast<int64_t>(request) * p.draft_len + step]);
            ResidualMass const residual = {row, law, divRn(kResidualOne, static_cast<double>(total)), q,
                                           divRn(kResidualOne, static_cast<double>(q.total))};
            uint64_t* const residual_mass = s.residual_mass + request * s.tiles;
            WarpTeam const warp;
            int const warps = team.size() >> 5;
            for (int tile = part * warps + (team.rank() >> 5); tile < numTiles(p.vocab); tile += parts * warps) {
                int const end = minOf(p.vocab, (tile + 1) << kTileShift);
                uint64_t sum = 0;
                for (int id = (tile << kTileShift) + warp.rank(); id < end; id += 32) sum += residual(id);
                sum = warp.addU64(sum);
                if (warp.rank() == 0) residual_mass[tile] = sum;
            }
            __threadfence();  // this thread's masses are visible to the device before the block counts as finished
            team.sync();      // ... and those of the whole block
            uint64_t finished = 0;
            if (team.rank() == 0) finished = static_cast<uint64_t>(atomicAdd(s.counter + request, 1)) + 1;
            finished = team.maxU64(finished);
            if (static_cast<int>(finished) != parts) return;
            __threadfence();  // the other blocks' masses are read after their count
            uint64_t* const collected = reinterpret_cast<uint64_t*>(sharedMemory() + kBlockTeamBytes);
            uint64_t const residual_total = collectMasses(team, residual_mass, numTiles(p.vocab), collected);
            uint64_t const bits = streamBits64(params.seed, position, kStreamResidual, 0);
            token = residual_total > 0
                        ? pickToken(team, residual, p.vocab, collected, residual_total, bits)
                        : pickToken(team, rowMass(row, law), p.vocab, tile_mass, total, bits);
        }
    }
    int32_t* const out = p.out_tokens + static_cast<int64_t>(request) * (p.draft_len + 1);
    int32_t const* const drafts = p.draft_tokens + static_cast<int64_t>(request) * p.draft_len;
    for (int k = team.rank(); k <= p.draft_len; k += team.size()) {
        out[k] = k < verdict.emitted - 1 ? drafts[k] : k == verdict.emitted - 1 ? token : -1;
    }
    if (team.rank() == 0) {
        p.emitted_len[request] = verdict.emitted;
        p.status[request] = verdict.status;
    }
}

}  // namespace dspark
