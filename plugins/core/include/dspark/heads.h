#pragma once
//! Sequential heads: what a previous token (and the hidden row) adds to the base logits (docs/core_numerics.md, section 6).
//! Source: DSpark paper, section 3.1, equations 4-6; gated head and joint rnn projection as in DeepSpec.

#include "dspark/math.h"
#include "dspark/team.h"

namespace dspark {

constexpr int kMaxRank = 4096;

enum class HeadKind : int32_t { kNone = 0, kVanilla = 1, kGated = 2, kRnn = 3 };

//! Weights of one head, row-major; exactly one of the float and int8 factors is set unless kind is kNone.
struct HeadWeights {
    HeadKind kind;
    int32_t vocab;        // V
    int32_t draft_vocab;  // Vd
    int32_t rank;         // r
    int32_t hidden;       // d, 0 when no weight reads the hidden row
    float const* w1;      // [V, r]
    int8_t const* w1_int8;
    float const* w1_scale;     // [V]
    float const* w2;           // [Vd, r]
    int8_t const* w2_int8;
    float const* w2_scale;     // [Vd]
    float const* gate_weight;  // [r, d + r]
    float const* gate_bias;    // [r] or null
    float const* rnn_weight;   // [3r, 2r + d]
    float const* rnn_bias;     // [3r] or null
    int32_t const* target_ids; // [Vd] or null = identity
};

//! Element i of W1[token] in binary32.
DSPARK_HD inline float embeddingElement(HeadWeights const& heads, int token, int i) {
    int64_t const at = static_cast<int64_t>(token) * heads.rank + i;
    return heads.w1_int8 ? mulRn(static_cast<float>(heads.w1_int8[at]), heads.w1_scale[token]) : heads.w1[at];
}

//! dot16 behind the team, so that a host team can bring its own instruction set.
DSPARK_TEAM template <class Team>
DSPARK_HD inline float teamDot(Team const&, float const* a, float const* b, int n) {
    return dot16(a, b, n);
}

//! Shared by the team.
struct HeadState {
    float* embedding;  // [r]
    float* latent;     // [r] what W2 multiplies, binary32
    float* state;      // [r] rnn state, zero before the first step
    float* pre;        // [3r]
    int8_t* latent_int8;  // [r]
    float* latent_scale;  // [1]
};

DSPARK_TEAM template <class Team>
DSPARK_HD void gatedLatent(Team const& team, HeadWeights const& heads, float const* hidden, HeadState const& s) {
    int const r = heads.rank, d = heads.hidden;
    for (int i = team.rank(); i < r; i += team.size()) {
        float const* const weight = heads.gate_weight + static_cast<int64_t>(i) * (d + r);
        float const sum = addRn(teamDot(team, weight, hidden, d), teamDot(team, weight + d, s.embedding, r));
        float const gate = sigmoidExact(addRn(sum, heads.gate_bias ? heads.gate_bias[i] : 0.0f));
        s.latent[i] = mulRn(gate, s.embedding[i]);
    }
}

DSPARK_TEAM template <class Team>
DSPARK_HD void rnnLatent(Team const& team, HeadWeights const& heads, float const* hidden, HeadState const& s) {
    int const r = heads.rank, d = heads.hidden;
    for (int i = team.rank(); i < 3 * r; i += team.size()) {
        float const* const weight = heads.rnn_weight + static_cast<int64_t>(i) * (2 * r + d);
        float const sum = addRn(addRn(teamDot(team, weight, s.state, r), teamDot(team, weight + r, s.embedding, r)),
                                teamDot(team, weight + 2 * r, hidden, d));
        s.pre[i] = addRn(sum, heads.rnn_bias ? heads.rnn_bias[i] : 0.0f);
    }
    team.sync();  // pre complete, all reads of state done
    for (int i = team.rank(); i < r; i += team.size()) {
        float const gate = sigmoidExact(s.pre[i]);
        s.state[i] = addRn(mulRn(gate, s.state[i]), mulRn(subRn(1.0f, gate), tanhExact(s.pre[r + i])));
        s.latent[i] = tanhExact(s.pre[2 * r + i]);
    }
}

//! Per-row symmetric int8 of a computed latent.
DSPARK_TEAM template <class Team>
DSPARK_HD void quantiseLatent(Team const& team, int rank, HeadState const& s) {
    uint64_t largest = 0;
    for (int i = team.rank(); i < rank; i += team.size()) {
        largest = maxOf<uint64_t>(largest, floatBits(s.latent[i]) & 0x7fffffffu);
    }
    float const a = bitsFloat(static_cast<uint32_t>(team.maxU64(largest)));
    // A quotient that overflows (subnormal latents) carries no information worth keeping.
    float const k = a > 0.0f ? divRn(127.0f, a) : 0.0f;
    bool const usable = a > 0.0f && isFinite(a) && isFinite(k);
    for (int i = team.rank(); i < rank; i += team.size()) {
        s.latent_int8[i] = usable ? static_cast<int8_t>(roundI32(mulRn(s.latent[i], k))) : static_cast<int8_t>(0);
    }
    if (team.rank() == 0) *s.latent_scale = usable ? divRn(a, 127.0f) : 0.0f;
}

//! Fill latent (float weights) or latent_int8 and latent_scale (int8 weights) for the token after `token`.
DSPARK_TEAM template <class Team>
DSPARK_HD void headLatent(Team const& team, HeadWeights const& heads, int token, float const* hidden,
                          HeadState const& s) {
    int const r = heads.rank;
    if (heads.kind == HeadKind::kNone) return;
    if (heads.kind == HeadKind::kVanilla && heads.w1_int8) {
        for (int i = team.rank(); i < r; i += team.size()) {
            s.latent_int8[i] = heads.w1_int8[static_cast<int64_t>(token) * r + i];
        }
        if (team.rank() == 0) *s.latent_scale = heads.w1_scale[token];
        team.sync();  // latent visible to all ranks
        return;
    }
    float* const embedding = heads.kind == HeadKind::kVanilla ? s.latent : s.embedding;
    for (int i = team.rank(); i < r; i += team.size()) embedding[i] = embeddingElement(heads, token, i);
    team.sync();  // embedding visible to all ranks
    if (heads.kind == HeadKind::kGated) gatedLatent(team, heads, hidden, s);
    if (heads.kind == HeadKind::kRnn) rnnLatent(team, heads, hidden, s);
    team.sync();  // latent and state visible to all ranks
    if (heads.w2_int8) {
        quantiseLatent(team, r, s);
        team.sync();  // quantised latent visible to all ranks
    }
}

//! s(v) = U(v) + bias(v) of one draft id; w2 rows are read from the row-major factor.
DSPARK_HD inline float correctedLogit(HeadWeights const& heads, HeadState const& s, float base, int draft_id) {
    if (heads.kind == HeadKind::kNone) return base;
    int64_t const at = static_cast<int64_t>(draft_id) * heads.rank;
    if (heads.w2_int8) {
        int32_t dot = 0;
        for (int i = 0; i < heads.rank; ++i) {
            dot += static_cast<int32_t>(s.latent_int8[i]) * static_cast<int32_t>(heads.w2_int8[at + i]);
        }
        return addRn(base, mulRn(static_cast<float>(dot), mulRn(*s.latent_scale, heads.w2_scale[draft_id])));
    }
    float acc = 0.0f;
    for (int i = 0; i < heads.rank; ++i) acc = fmaRn(s.latent[i], heads.w2[at + i], acc);
    return addRn(base, acc);
}

}  // namespace dspark
