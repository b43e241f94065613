#pragma once

#include "markov_draft.h"

#include "proposals.cuh"

#include "dspark/heads.h"

namespace dspark {

constexpr int kBeginThreads = 256;
constexpr int kPickThreads = 256;
constexpr int kRowsPerBlock = 128;   // vocabulary rows of W2 a block holds in shared memory
constexpr int kRequestChunk = 8;     // requests that share one read of them

//! The scratch arrays of one launch (MarkovDraftLayout).
struct MarkovScratch {
    uint64_t* top_key;
    uint64_t* tile_mass;
    unsigned char* latent;
    float* latent_scale;
    float* state;
    float* pre;
    int32_t* counter;
    int64_t tiles;
    int64_t latent_bytes;
};

__device__ inline MarkovScratch markovScratch(MarkovDraftParams const& p) {
    MarkovDraftLayout const layout = markovDraftLayout(p.num_requests, p.vocab, p.draft_vocab, p.rank);
    unsigned char* const base = static_cast<unsigned char*>(p.workspace);
    return {reinterpret_cast<uint64_t*>(base + layout.top_key), reinterpret_cast<uint64_t*>(base + layout.tile_mass),
            base + layout.latent, reinterpret_cast<float*>(base + layout.latent_scale),
            reinterpret_cast<float*>(base + layout.state), reinterpret_cast<float*>(base + layout.pre),
            reinterpret_cast<int32_t*>(base + layout.counter), layout.tiles, layout.latent_bytes};
}

//! W1[token] in binary32, as embeddingElement of the core. The type is uniform in a launch.
struct EmbeddingRow {
    LogitRow row;
    int8_t const* row_int8;  // null for float weights
    float scale;
    __device__ float operator[](int i) const {
        return row_int8 ? mulRn(static_cast<float>(row_int8[i]), scale) : row[i];
    }
};

__device__ inline EmbeddingRow embeddingRow(MarkovDraftParams const& p, int token) {
    if (p.weight_type == ElementType::kInt8) {
        return {{}, static_cast<int8_t const*>(p.w1) + static_cast<int64_t>(token) * p.rank, p.w1_scale[token]};
    }
    return {logitRow(p.w1, p.weight_type, token, p.rank), nullptr, 0.0f};
}

//! gatedLatent and rnnLatent of the core, a half warp a row of the weights: pre-activations, then latent and state.
__device__ inline void computedLatent(BlockTeam const& team, MarkovDraftParams const& p, MarkovScratch const& s,
                                      int request, int step, EmbeddingRow const& embedding, float* latent) {
    int const r = p.rank, d = p.hidden_size;
    bool const gated = p.head_kind == static_cast<int32_t>(HeadKind::kGated);
    float* const pre = s.pre + static_cast<int64_t>(request) * 3 * r;
    float* const state = s.state + static_cast<int64_t>(request) * r;
    LogitRow const hidden = logitRow(p.hidden, p.hidden_type, static_cast<int64_t>(request) * p.draft_len + step, d);
    int const rows = gated ? r : 3 * r;
    for (int i = team.rank() >> 4; i < rows; i += team.size() >> 4) {
        float sum;
        if (gated) {
            float const* const weight = p.gate_weight + static_cast<int64_t>(i) * (d + r);
            float const from_hidden = halfWarpDot(weight, hidden, d);
            sum = addRn(from_hidden, halfWarpDot(weight + d, embedding, r));
            sum = addRn(sum, p.gate_bias ? p.gate_bias[i] : 0.0f);
        } else {
            float const* const weight = p.rnn_weight + static_cast<int64_t>(i) * (2 * r + d);
            float const from_state = halfWarpDot(weight, state, r);
            sum = addRn(from_state, halfWarpDot(weight + r, embedding, r));
            sum = addRn(sum, halfWarpDot(weight + 2 * r, hidden, d));
            sum = addRn(sum, p.rnn_bias ? p.rnn_bias[i] : 0.0f);
        }
        if ((team.rank() & 15) == 0) pre[i] = sum;
    }
    team.sync();  // pre complete, all reads of state done
    for (int i = team.rank(); i < r; i += team.size()) {
        float const gate = sigmoidExact(pre[i]);
        if (gated) {
            latent[i] = mulRn(gate, embedding[i]);
        } else {
            state[i] = addRn(mulRn(gate, state[i]), mulRn(subRn(1.0f, gate), tanhExact(pre[r + i])));
            latent[i] = tanhExact(pre[2 * r + i]);
        }
    }
    team.sync();  // latent and state visible to all ranks
}

//! Computes the latent that follows `token` into scratch (what W2 multiplies at `step`).
__device__ inline void nextLatent(BlockTeam const& team, MarkovDraftParams const& p, MarkovScratch const& s,
                                  int request, int step, int token) {
    HeadKind const kind = static_cast<HeadKind>(p.head_kind);
    if (kind == HeadKind::kNone) return;
    int const r = p.rank;
    EmbeddingRow const embedding = embeddingRow(p, token);
    float* const latent = reinterpret_cast<float*>(s.latent + request * s.latent_bytes);
    int8_t* const latent_int8 = reinterpret_cast<int8_t*>(s.latent + request * s.latent_bytes);
    if (kind == HeadKind::kVanilla) {
        for (int i = team.rank(); i < r; i += team.size()) {
            if (embedding.row_int8) {
                latent_int8[i] = embedding.row_int8[i];
            } else {
                latent[i] = embedding[i];
            }
        }
        if (embedding.row_int8 && team.rank() == 0) s.latent_scale[request] = embedding.scale;
        return;
    }
    // With int8 weights the float latent takes the first third of `pre`, which is read no more, and is quantised from there.
    if (!embedding.row_int8) return computedLatent(team, p, s, request, step, embedding, latent);
    float* const exact = s.pre + static_cast<int64_t>(request) * 3 * r;
    computedLatent(team, p, s, request, step, embedding, exact);
    HeadState quantised = {};
    quantised.latent = exact;
    quantised.latent_int8 = latent_int8;
    quantised.latent_scale = s.latent_scale + request;
    quantiseLatent(team, r, quantised);
}

//! First launch of a draft: empties the scratch and computes the latents that follow the anchors. One block a request.
static __global__ void __launch_bounds__(kBeginThreads, 1) markovBeginKernel(MarkovDraftParams const p) {
    BlockTeam const team = blockTeam();
    MarkovScratch const s = markovScratch(p);
    int const request = static_cast<int>(blockIdx.x);
    for (int i = team.rank(); i < p.rank; i += team.size()) {
        s.state[static_cast<int64_t>(request) * p.rank + i] = 0.0f;
    }
    if (team.rank() == 0) {
        s.top_key[request] = 0;
        s.counter[request] = 0;
        p.status[request] = kRowOk;
    }
    team.sync();  // state is zero before it is read
    nextLatent(team, p, s, request, 0, p.anchors[request]);
}

//! A launch parameter and the step it is for.
struct MarkovStep {
    MarkovDraftParams params;
    int32_t step;
};

//! Elements from one row of W2 to the next in shared memory: an odd number of words, so that the lanes of a warp read the
//! same column of 32 rows without bank conflicts.
template <class T>
DSPARK_HD constexpr int weightStride(int rank) {
    int const words = (rank * static_cast<int>(sizeof(T)) + 3) / 4;
    return (words | 1) * (4 / static_cast<int>(sizeof(T)));
}

//! 32-bit words of one request's latent: floats, or four int8 a word.
template <class T>
DSPARK_HD constexpr int latentWords(int rank) {
    return sizeof(T) == 1 ? (rank + 3) / 4 : rank;
}

//! Bytes of shared memory for `rows` rows of W2 and kChunk latents.
template <class T, int kChunk>
DSPARK_HD constexpr int64_t logitsSharedBytes(int rank, int rows) {
    int64_t const elements = (static_cast<int64_t>(rows) * weightStride<T>(rank) + 15) / 16 * 16;
    return elements * static_cast<int64_t>(sizeof(T)) + int64_t{kChunk} * latentWords<T>(rank) * 4;
}

//! Vocabulary rows a block takes: all devices from sm_80 on give a block 96 KiB of shared memory.
template <class T, int kChunk>
DSPARK_HD constexpr int weightRows(int rank) {
    int rows = kRowsPerBlock;
    while (rows > 1 && logitsSharedBytes<T, kChunk>(rank, rows) > 96 * 1024) rows >>= 1;
    return rows;
}

//! fma chains of kChunk requests over one row of W2; both in shared memory, rows end on a word.
template <class T, int kChunk>
__device__ inline void floatDots(T const* weight, float const* latent, int rank, int latent_stride,
                                 float (&acc)[kChunk]) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    int const whole = rank / kPerWord * kPerWord;
    for (int i = 0; i < whole; i += kPerWord) {
        T element[kPerWord];
        memcpy(element, weight + i, 4);
#pragma unroll
        for (int part = 0; part < kPerWord; ++part) {
            float const w = toFloat(element[part]);
#pragma unroll
            for (int q = 0; q < kChunk; ++q) acc[q] = fmaRn(latent[q * latent_stride + i + part], w, acc[q]);
        }
    }
    for (int i = whole; i < rank; ++i) {
        for (int q = 0; q < kChunk; ++q) acc[q] = fmaRn(latent[q * latent_stride + i], toFloat(weight[i]), acc[q]);
    }
}

template <int kChunk>
__device__ inline void int8Dots(int8_t const* weight, int const* latent, int words, int latent_stride,
                                int (&acc)[kChunk]) {
    int const* const packed = reinterpret_cast<int const*>(weight);
    for (int word = 0; word < words; ++word) {
        int const w = packed[word];
#pragma unroll
        for (int q = 0; q < kChunk; ++q) acc[q] = __dp4a(latent[q * latent_stride + word], w, acc[q]);
    }
}

//! Corrected logits of one step: a block owns weightRows() rows of W2 in shared memory and serves every request with them.
template <class T, int kChunk>
__global__ void __launch_bounds__(kRowsPerBlock, 4) markovLogitsKernel(MarkovStep const launch) {
    MarkovDraftParams const& p = launch.params;
    constexpr bool kInt8 = sizeof(T) == 1;
    MarkovScratch const s = markovScratch(p);
    int const r = p.rank, stride = weightStride<T>(r), rows = weightRows<T, kChunk>(r);
    int const first = static_cast<int>(blockIdx.x) * rows;
    int const count = minOf(rows, p.draft_vocab - first);
    bool const has_head = p.head_kind != 0;
    T* const weight = reinterpret_cast<T*>(sharedMemory());
    int const latent_words = latentWords<T>(r);
    int* const latent = reinterpret_cast<int*>(weight + ((static_cast<int64_t>(rows) * stride + 15) & ~int64_t{15}));

    if (has_head) {
        T const* const from = static_cast<T const*>(p.w2) + static_cast<int64_t>(first) * r;
        int const per_load = 16 / static_cast<int>(sizeof(T));
        bool const vector = r % per_load == 0 && reinterpret_cast<uintptr_t>(p.w2) % 16 == 0;
        if (vector) {
            int const loads = count * (r / per_load);
#pragma unroll 4
            for (int index = static_cast<int>(threadIdx.x); index < loads; index += kRowsPerBlock) {
                uint4 const word = reinterpret_cast<uint4 const*>(from)[index];
                int const row = index / (r / per_load), column = index % (r / per_load) * per_load;
                uint32_t* const to = reinterpret_cast<uint32_t*>(weight + row * stride + column);
                to[0] = word.x;
                to[1] = word.y;
                to[2] = word.z;
                to[3] = word.w;
            }
        } else {
            for (int index = static_cast<int>(threadIdx.x); index < count * r; index += kRowsPerBlock) {
                weight[index / r * stride + index % r] = from[index];
            }
        }
        if constexpr (kInt8) {  // the last word of a row is padded with zeros
            for (int row = static_cast<int>(threadIdx.x); row < count; row += kRowsPerBlock) {
                for (int i = r; i < (r + 3) / 4 * 4; ++i) weight[row * stride + i] = 0;
            }
        }
    }
    int const row = static_cast<int>(threadIdx.x);
    int const id = first + row;
    bool const live = row < count;
    float const row_scale = kInt8 && live && has_head ? p.w2_scale[id] : 0.0f;
    Acceptance const mode = static_cast<Acceptance>(p.acceptance);

    for (int chunk = 0; chunk < p.num_requests; chunk += kChunk) {
        int const chunk_size = minOf(kChunk, p.num_requests - chunk);
        __syncthreads();  // weights visible; the previous chunk's latents are read
        for (int index = static_cast<int>(threadIdx.x); has_head && index < kChunk * latent_words;
             index += kRowsPerBlock) {
            int const q = index / latent_words, word = index % latent_words;
            int value = 0;
            if (q < chunk_size) {
                unsigned char const* const source = s.latent + (chunk + q) * s.latent_bytes;
                value = reinterpret_cast<int const*>(source)[word];
                if (kInt8 && word == r / 4) value &= (1 << (8 * (r % 4))) - 1;  // bytes behind r are not the latent's
            }
            latent[q * latent_words + word] = value;
        }
        __syncthreads();  // latents visible
        float bias[kChunk];
        if constexpr (kInt8) {
            int dots[kChunk] = {};
            if (has_head && live) int8Dots<kChunk>(weight + row * stride, latent, latent_words, latent_words, dots);
#pragma unroll
            for (int q = 0; q < kChunk; ++q) bias[q] = static_cast<float>(dots[q]);
        } else {
#pragma unroll
            for (int q = 0; q < kChunk; ++q) bias[q] = 0.0f;
            if (has_head && live) {
                floatDots<T, kChunk>(weight + row * stride, reinterpret_cast<float const*>(latent), r, latent_words,
                                     bias);
            }
        }
#pragma unroll
        for (int q = 0; q < kChunk; ++q) {
            int const request = chunk + q;
            uint64_t key = 0;
            if (live && q < chunk_size) {
                int64_t const at = static_cast<int64_t>(request) * p.draft_len + launch.step;
                float logit = logitRow(p.base_logits, p.logits_type, at, p.draft_vocab)[id];
                if (kInt8) bias[q] = has_head ? mulRn(bias[q], mulRn(s.latent_scale[request], row_scale)) : 0.0f;
                if (has_head) logit = addRn(logit, bias[q]);
                if (mode != Acceptance::kGreedy) p.draft_logits[at * p.draft_vocab + id] = logit;
                key = argmaxKey(logit, id);
            }
            key = warpMax(key);
            if ((threadIdx.x & 31) == 0 && key != 0) {
                atomicMax(reinterpret_cast<unsigned long long*>(s.top_key) + request,
                          static_cast<unsigned long long>(key));
            }
        }
    }
}

//! Stores a pick, remembers the first bad row, and clears the request's tokens after the last step when there was one.
__device__ inline int storePick(BlockTeam const& team, MarkovDraftParams const& p, int request, int step,
                                DraftPick const& pick, int32_t const* candidates) {
    int64_t const at = static_cast<int64_t>(request) * p.draft_len + step;
    int token = -1;
    if (pick.status == kRowOk) {
        int const draft = candidates ? candidates[pick.index] : pick.index;
        token = p.target_of_draft ? p.target_of_draft[draft] : draft;
    }
    if (team.rank() == 0) {
        p.draft_tokens[at] = token;
        p.draft_entries[at] = pick.index;
        p.draft_laws[4 * at] = pick.total == 0 ? 0.0f : pick.law.max;
        p.draft_laws[4 * at + 1] = pick.total == 0 ? 0.0f : pick.law.scale;
        p.draft_laws[4 * at + 2] = pick.total == 0 ? 0.0f : pick.law.pivot;
        p.draft_laws[4 * at + 3] = 0.0f;
        p.draft_totals[at] = static_cast<int64_t>(pick.total);
        if (pick.status != kRowOk && p.status[request] == kRowOk) p.status[request] = pick.status;
    }
    team.sync();  // status visible to all ranks
    if (step + 1 == p.draft_len && p.status[request] != kRowOk) {
        for (int k = team.rank(); k < p.draft_len; k += team.size()) {
            p.draft_tokens[static_cast<int64_t>(request) * p.draft_len + k] = -1;
        }
    }
    return token < 0 ? 0 : token;  // a failed request keeps its place; its tokens are erased at the end
}

//! Second launch of a dense step: masses of the row by several blocks, the pick by the last of them to finish, then the
//! latent of the next step. blockIdx.x = part of the row, blockIdx.y = request.
static __global__ void __launch_bounds__(kPickThreads, 1) markovPickKernel(MarkovStep const launch) {
    MarkovDraftParams const& p = launch.params;
    BlockTeam const team = searchingTeam();
    MarkovScratch const s = markovScratch(p);
    int const request = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x);
    int const parts = static_cast<int>(gridDim.x);
    Acceptance const mode = static_cast<Acceptance>(p.acceptance);
    RequestParams const params = requestParams(p.temperature, p.top_k, p.top_p, p.seed, p.positions, request);
    RowTop const top = topOfKey(s.top_key[request]);
    uint64_t* const tile_mass = reinterpret_cast<uint64_t*>(sharedMemory() + kSearchingTeamBytes);  // [tiles]
    float const* const row =
        p.draft_logits + (static_cast<int64_t>(request) * p.draft_len + launch.step) * p.draft_vocab;
    EntryOfTarget const entry_of = {p.draft_of_target, nullptr, p.draft_vocab};
    bool const sampled = top.status == kRowOk && mode != Acceptance::kGreedy && !params.greedy();
    bool const split = sampled && !isFiltered(params, p.draft_vocab);  // a filter needs the whole row in one block
    bool const by_target = mode == Acceptance::kCoupled && !entry_of.identity();
    uint64_t total = 0;
    if (!split) {
        if (part != 0) return;
    } else {
        RowLaw const law = unfilteredLaw(top.max, params.temperature);
        TargetMass const target_mass = {row, law, entry_of};
        uint64_t* const published = s.tile_mass + request * s.tiles;
        int const count = by_target ? p.vocab : p.draft_vocab;
        WarpTeam const warp;
        int const warps = team.size() >> 5;
        for (int tile = part * warps + (team.rank() >> 5); tile < numTiles(count); tile += parts * warps) {
            int const end = minOf(count, (tile + 1) << kTileShift);
            uint64_t sum = 0;
            for (int id = (tile << kTileShift) + warp.rank(); id < end; id += 32) {
                sum += by_target ? target_mass(id) : lawMass(law, row[id]);
            }
            sum = warp.addU64(sum);
            if (warp.rank() == 0) published[tile] = sum;
        }
        __threadfence();  // this thread's tile masses are visible to the device before the block counts as finished
        team.sync();      // ... and those of the whole block
        uint64_t finished = 0;
        if (team.rank() == 0) finished = static_cast<uint64_t>(atomicAdd(s.counter + request, 1)) + 1;
        finished = team.maxU64(finished);
        if (static_cast<int>(finished) != parts) return;
        __threadfence();  // the other blocks' tile masses are read after their count
        total = collectMasses(team, published, numTiles(count), tile_mass);
    }
    DraftPick const pick = pickFromRow(team, mode, params, launch.step, p.vocab, row, p.draft_vocab, entry_of, top,
                                       tile_mass, split, total);
    int const token = storePick(team, p, request, launch.step, pick, nullptr);
    if (team.rank() == 0) {
        s.top_key[request] = 0;
        s.counter[request] = 0;
    }
    if (launch.step + 1 < p.draft_len) nextLatent(team, p, s, request, launch.step + 1, token);
}

}  // namespace dspark
