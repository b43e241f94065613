#pragma once
//! Confidence head (docs/core_numerics.md, section 7).
//! Source: DSpark paper, equation 7; per-position temperature: section 3.2.1.

#include "dspark/heads.h"

namespace dspark {

struct ConfidenceWeights {
    float const* hidden_weight;  // [d]
    float const* markov_table;   // [V] = w_m . W1[v], or null without the Markov half
    float bias;
};

//! Calibrated probability that a draft token survives; `previous` is the target id of the token before it.
DSPARK_TEAM template <class Team>
DSPARK_HD inline float confidenceOf(Team const& team, ConfidenceWeights const& weights, float const* hidden, int d,
                                    int previous, float inv_temperature, float bias) {
    float z = teamDot(team, weights.hidden_weight, hidden, d);
    if (weights.markov_table) z = addRn(z, weights.markov_table[previous]);
    z = addRn(z, weights.bias);
    return sigmoidExact(addRn(mulRn(z, inv_temperature), bias));
}

//! Entry `token` of the Markov half: w_m . W1[token]; `embedding` is scratch [r].
DSPARK_TEAM template <class Team>
DSPARK_HD inline float markovTableEntry(Team const& team, HeadWeights const& heads, float const* markov_weight,
                                        int token, float* embedding) {
    for (int i = 0; i < heads.rank; ++i) embedding[i] = embeddingElement(heads, token, i);
    return teamDot(team, markov_weight, embedding, heads.rank);
}

}  // namespace dspark
