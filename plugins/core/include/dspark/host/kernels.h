#pragma once
//! Inner loops of the host path, one set per instruction set; all sets give the same bits.

#include "dspark/heads.h"
#include "dspark/row.h"

namespace dspark::host {

constexpr int kPanel = 64;  // vocabulary rows of one packed W2 panel
constexpr int kGroup = 64;  // entries of one group maximum
constexpr int kCompressSlack = 16;  // compress writes up to this many entries past the last kept one

//! Corrected logits of one vocabulary tile for all requests: out = base + W2 tile * latent.
struct PanelJob {
    int num_requests;
    int rank;        // r; int8 latents and panels are padded with zeros to a multiple of 4
    int count;       // vocabulary entries of the tile
    void const* panels;         // float [panel][r][64], or int8 [panel][r4 / 4][64][4]
    float const* scale;         // [count] int8 only
    int32_t const* row_sum;     // [count] int8 only: sum of each row's integers
    void const* latent;         // float [R][r] or int8 [R][r4]
    float const* latent_scale;  // [R] int8 only
    float const* const* base;   // [R] pointers to the tile's base logits
    float* const* out;          // [R] pointers to the tile's corrected logits, may equal base
};

struct Kernels {
    char const* name;
    //! argmaxKey of the largest of row[begin, end).
    uint64_t (*top_key)(float const* row, int begin, int end);
    //! Masses summed per tile; returns the total.
    uint64_t (*tile_masses)(float const* row, RowLaw const& law, int count, uint64_t* tile_mass);
    //! out[i] = lawMass(row[i]).
    void (*masses)(float const* row, RowLaw const& law, int count, uint64_t* out);
    //! out[i] = rint(lawMass(row[i]) * factor).
    void (*probabilities)(float const* row, RowLaw const& law, int count, double factor, uint64_t* out);
    //! out[g] = largest of group g (kGroup entries, the last may be short).
    void (*group_max)(float const* row, int count, float* out);
    //! Copies the entries with low <= x < high to out (may be row itself) in order; returns how many.
    int (*compress)(float const* row, int count, float low, float high, float* out);
    float (*dot)(float const* a, float const* b, int n);
    void (*panel_f32)(PanelJob const& job);
    void (*panel_i8)(PanelJob const& job);
};

}  // namespace dspark::host
