#pragma once
//! AVX-512 bodies (F, BW, DQ, VL, VNNI), the same bits as portable.h.

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "dspark/host/portable.h"

#define DSPARK_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))

namespace dspark::host::avx512 {

DSPARK_AVX512 inline __mmask16 tailMask(int n) {
    return n >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << n) - 1u);
}

DSPARK_AVX512 inline uint64_t topKey(float const* row, int begin, int end) {
    constexpr int kBlock = 4096;
    __m512 const lowest = _mm512_set1_ps(bitsFloat(0xff800000u));
    float best = 0.0f;
    int best_begin = -1;
    __mmask16 nan = 0;
    for (int block = begin; block < end; block += kBlock) {
        int const stop = minOf(end, block + kBlock);
        __m512 m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
        int id = block;
        for (; id + 64 <= stop; id += 64) {
            __m512 const x0 = _mm512_loadu_ps(row + id), x1 = _mm512_loadu_ps(row + id + 16);
            __m512 const x2 = _mm512_loadu_ps(row + id + 32), x3 = _mm512_loadu_ps(row + id + 48);
            nan = _kor_mask16(nan, _kor_mask16(_mm512_cmp_ps_mask(x0, x1, _CMP_UNORD_Q),
                                               _mm512_cmp_ps_mask(x2, x3, _CMP_UNORD_Q)));
            m0 = _mm512_max_ps(m0, x0);
            m1 = _mm512_max_ps(m1, x1);
            m2 = _mm512_max_ps(m2, x2);
            m3 = _mm512_max_ps(m3, x3);
        }
        for (; id < stop; id += 16) {
            __m512 const x = _mm512_mask_loadu_ps(lowest, tailMask(stop - id), row + id);
            nan = _kor_mask16(nan, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q));
            m0 = _mm512_max_ps(m0, x);
        }
        float const top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(m0, m1), _mm512_max_ps(m2, m3)));
        if (best_begin < 0 || top > best) {
            best = top;
            best_begin = block;
        }
    }
    if (nan) return portable::topKey(row, begin, end);
    if (best_begin < 0) return 0;
    __m512 const target = _mm512_set1_ps(best);
    for (int id = best_begin;; id += 16) {
        __m512 const x = _mm512_mask_loadu_ps(lowest, tailMask(end - id), row + id);
        __mmask16 const equal = _mm512_cmp_ps_mask(x, target, _CMP_EQ_OQ);
        if (equal) return argmaxKey(best, id + __builtin_ctz(equal));
    }
}

struct Law {
    __m512 max, scale, pivot;
};

DSPARK_AVX512 inline Law lawOf(RowLaw const& law) {
    return {_mm512_set1_ps(law.max), _mm512_set1_ps(law.scale), _mm512_set1_ps(law.pivot)};
}

//! 2^z * 2^40 of 16 logits, 0 below the pivot.
DSPARK_AVX512 inline __m512 scaledMass(Law const& law, __m512 logit) {
    __m512 const magic = _mm512_set1_ps(kMagic);
    __m512 z = _mm512_mul_ps(_mm512_sub_ps(logit, law.max), law.scale);
    z = _mm512_max_ps(z, _mm512_set1_ps(-64.0f));
    __m512 const t = _mm512_add_ps(z, magic);
    __m512 const f = _mm512_sub_ps(z, _mm512_sub_ps(t, magic));
    __m512 y = _mm512_set1_ps(kExp2C6);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(kExp2C5));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(kExp2C4));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(kExp2C3));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(kExp2C2));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(kExp2C1));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    __m512i const shift =
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(kMassBits)), 23);
    __m512 const mass = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), shift));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(logit, law.pivot, _CMP_GE_OQ), mass);
}

DSPARK_AVX512 inline __m512i lowU64(__m512 mass) { return _mm512_cvtps_epu64(_mm512_castps512_ps256(mass)); }
DSPARK_AVX512 inline __m512i highU64(__m512 mass) { return _mm512_cvtps_epu64(_mm512_extractf32x8_ps(mass, 1)); }

DSPARK_AVX512 inline uint64_t tileMassesOf(float const* row, RowLaw const& law, int count, uint64_t* tile_mass) {
    Law const wide = lawOf(law);
    uint64_t total = 0;
    for (int tile = 0; tile < numTiles(count); ++tile) {
        int const begin = tile << kTileShift;
        int const end = minOf(count, begin + kTile);
        __m512i s0 = _mm512_setzero_si512(), s1 = s0, s2 = s0, s3 = s0;
        int id = begin;
        for (; id + 32 <= end; id += 32) {
            __m512 const a = scaledMass(wide, _mm512_loadu_ps(row + id));
            __m512 const b = scaledMass(wide, _mm512_loadu_ps(row + id + 16));
            s0 = _mm512_add_epi64(s0, lowU64(a));
            s1 = _mm512_add_epi64(s1, highU64(a));
            s2 = _mm512_add_epi64(s2, lowU64(b));
            s3 = _mm512_add_epi64(s3, highU64(b));
        }
        for (; id < end; id += 16) {
            __mmask16 const mask = tailMask(end - id);
            __m512 const a = _mm512_maskz_mov_ps(mask, scaledMass(wide, _mm512_maskz_loadu_ps(mask, row + id)));
            s0 = _mm512_add_epi64(s0, lowU64(a));
            s1 = _mm512_add_epi64(s1, highU64(a));
        }
        s0 = _mm512_add_epi64(_mm512_add_epi64(s0, s1), _mm512_add_epi64(s2, s3));
        tile_mass[tile] = static_cast<uint64_t>(_mm512_reduce_add_epi64(s0));
        total += tile_mass[tile];
    }
    return total;
}

DSPARK_AVX512 inline void masses(float const* row, RowLaw const& law, int count, uint64_t* out) {
    Law const wide = lawOf(law);
    for (int id = 0; id < count; id += 16) {
        __mmask16 const mask = tailMask(count - id);
        __m512 const a = scaledMass(wide, _mm512_maskz_loadu_ps(mask, row + id));
        _mm512_mask_storeu_epi64(out + id, static_cast<__mmask8>(mask), lowU64(a));
        if (mask >> 8) _mm512_mask_storeu_epi64(out + id + 8, static_cast<__mmask8>(mask >> 8), highU64(a));
    }
}

DSPARK_AVX512 inline __m512i toQ51(__m512i mass, __m512d factor) {
    return _mm512_cvtpd_epu64(_mm512_mul_pd(_mm512_cvtepu64_pd(mass), factor));
}

DSPARK_AVX512 inline void probabilities(float const* row, RowLaw const& law, int count, double factor, uint64_t* out) {
    Law const wide = lawOf(law);
    __m512d const wide_factor = _mm512_set1_pd(factor);
    for (int id = 0; id < count; id += 16) {
        __mmask16 const mask = tailMask(count - id);
        __m512 const a = scaledMass(wide, _mm512_maskz_loadu_ps(mask, row + id));
        _mm512_mask_storeu_epi64(out + id, static_cast<__mmask8>(mask), toQ51(lowU64(a), wide_factor));
        if (mask >> 8) {
            _mm512_mask_storeu_epi64(out + id + 8, static_cast<__mmask8>(mask >> 8), toQ51(highU64(a), wide_factor));
        }
    }
}

DSPARK_AVX512 inline void groupMax(float const* row, int count, float* out) {
    int begin = 0, group = 0;
    for (; begin + kGroup <= count; begin += kGroup, ++group) {
        __m512 const a = _mm512_max_ps(_mm512_loadu_ps(row + begin), _mm512_loadu_ps(row + begin + 16));
        __m512 const b = _mm512_max_ps(_mm512_loadu_ps(row + begin + 32), _mm512_loadu_ps(row + begin + 48));
        out[group] = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    }
    if (begin < count) portable::groupMax(row + begin, count - begin, out + group);
}

DSPARK_AVX512 inline int compress(float const* row, int count, float low, float high, float* out) {
    __m512 const wide_low = _mm512_set1_ps(low), wide_high = _mm512_set1_ps(high);
    int kept = 0;
    for (int id = 0; id < count; id += 16) {
        __mmask16 const valid = tailMask(count - id);
        __m512 const x = _mm512_maskz_loadu_ps(valid, row + id);
        __mmask16 const keep = _mm512_mask_cmp_ps_mask(_mm512_mask_cmp_ps_mask(valid, x, wide_low, _CMP_GE_OQ), x,
                                                       wide_high, _CMP_LT_OQ);
        _mm512_storeu_ps(out + kept, _mm512_maskz_compress_ps(keep, x));
        kept += __builtin_popcount(keep);
    }
    return kept;
}

DSPARK_AVX512 inline float dot(float const* a, float const* b, int n) {
    __m512 acc = _mm512_setzero_ps();
    int i = 0;
    for (; i + 16 <= n; i += 16) acc = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), acc);
    if (i < n) {
        __mmask16 const mask = tailMask(n - i);
        acc = _mm512_mask3_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i), acc, mask);
    }
    __m256 const eight = _mm256_add_ps(_mm512_castps512_ps256(acc), _mm512_extractf32x8_ps(acc, 1));
    __m128 const four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 const two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

//! One panel for kRequests requests starting at `first`.
template <int kRequests>
DSPARK_AVX512 inline void panelF32(PanelJob const& job, float const* panel, int first, int id, int valid) {
    float const* const latent = static_cast<float const*>(job.latent) + static_cast<int64_t>(first) * job.rank;
    __m512 acc[kRequests][4];
    for (int q = 0; q < kRequests; ++q) {
        for (int j = 0; j < 4; ++j) acc[q][j] = _mm512_setzero_ps();
    }
    for (int i = 0; i < job.rank; ++i) {
        __m512 const w0 = _mm512_loadu_ps(panel), w1 = _mm512_loadu_ps(panel + 16);
        __m512 const w2 = _mm512_loadu_ps(panel + 32), w3 = _mm512_loadu_ps(panel + 48);
        panel += kPanel;
        for (int q = 0; q < kRequests; ++q) {
            __m512 const x = _mm512_set1_ps(latent[static_cast<int64_t>(q) * job.rank + i]);
            acc[q][0] = _mm512_fmadd_ps(x, w0, acc[q][0]);
            acc[q][1] = _mm512_fmadd_ps(x, w1, acc[q][1]);
            acc[q][2] = _mm512_fmadd_ps(x, w2, acc[q][2]);
            acc[q][3] = _mm512_fmadd_ps(x, w3, acc[q][3]);
        }
    }
    for (int q = 0; q < kRequests; ++q) {
        float const* const base = job.base[first + q] + id;
        float* const out = job.out[first + q] + id;
        for (int j = 0; j < 4 && j * 16 < valid; ++j) {
            __mmask16 const mask = tailMask(valid - j * 16);
            __m512 const sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, base + j * 16), acc[q][j]);
            _mm512_mask_storeu_ps(out + j * 16, mask, sum);
        }
    }
}

//! One int8 panel; signed latents become unsigned by +128, which row_sum takes back.
template <int kRequests>
DSPARK_AVX512 inline void panelI8(PanelJob const& job, int8_t const* panel, int first, int id, int valid) {
    int const groups = (job.rank + 3) >> 2;
    auto const* const latent = static_cast<int8_t const*>(job.latent) + static_cast<int64_t>(first) * groups * 4;
    __m512i acc[kRequests][4];
    for (int j = 0; j < 4; ++j) {
        __mmask16 const mask = valid > j * 16 ? tailMask(valid - j * 16) : static_cast<__mmask16>(0);
        __m512i const sum = _mm512_maskz_loadu_epi32(mask, job.row_sum + id + j * 16);
        __m512i const offset = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7));
        for (int q = 0; q < kRequests; ++q) acc[q][j] = offset;
    }
    for (int group = 0; group < groups; ++group) {
        __m512i const w0 = _mm512_loadu_si512(panel), w1 = _mm512_loadu_si512(panel + 64);
        __m512i const w2 = _mm512_loadu_si512(panel + 128), w3 = _mm512_loadu_si512(panel + 192);
        panel += kPanel * 4;
        for (int q = 0; q < kRequests; ++q) {
            uint32_t four;
            std::memcpy(&four, latent + (static_cast<int64_t>(q) * groups + group) * 4, sizeof(four));
            __m512i const x = _mm512_set1_epi32(static_cast<int>(four ^ 0x80808080u));
            acc[q][0] = _mm512_dpbusd_epi32(acc[q][0], x, w0);
            acc[q][1] = _mm512_dpbusd_epi32(acc[q][1], x, w1);
            acc[q][2] = _mm512_dpbusd_epi32(acc[q][2], x, w2);
            acc[q][3] = _mm512_dpbusd_epi32(acc[q][3], x, w3);
        }
    }
    for (int q = 0; q < kRequests; ++q) {
        float const* const base = job.base[first + q] + id;
        float* const out = job.out[first + q] + id;
        __m512 const latent_scale = _mm512_set1_ps(job.latent_scale[first + q]);
        for (int j = 0; j < 4 && j * 16 < valid; ++j) {
            __mmask16 const mask = tailMask(valid - j * 16);
            __m512 const scale =
                _mm512_mul_ps(latent_scale, _mm512_maskz_loadu_ps(mask, job.scale + id + j * 16));
            __m512 const bias = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[q][j]), scale);
            _mm512_mask_storeu_ps(out + j * 16, mask,
                                  _mm512_add_ps(_mm512_maskz_loadu_ps(mask, base + j * 16), bias));
        }
    }
}

//! Blocks of at most six requests (24 accumulators), as equal as possible: a short last block would starve the FMA pipes.
#define DSPARK_DISPATCH_REQUESTS(function, panel)                                            \
    for (int first = 0, blocks = (job.num_requests + 5) / 6; blocks > 0; --blocks) {         \
        int const size = (job.num_requests - first + blocks - 1) / blocks;                   \
        switch (size) {                                                                      \
            case 1: function<1>(job, panel, first, id, valid); break;                        \
            case 2: function<2>(job, panel, first, id, valid); break;                        \
            case 3: function<3>(job, panel, first, id, valid); break;                        \
            case 4: function<4>(job, panel, first, id, valid); break;                        \
            case 5: function<5>(job, panel, first, id, valid); break;                        \
            default: function<6>(job, panel, first, id, valid); break;                       \
        }                                                                                    \
        first += size;                                                                       \
    }

DSPARK_AVX512 inline void panelsF32(PanelJob const& job) {
    for (int id = 0; id < job.count; id += kPanel) {
        float const* const panel = static_cast<float const*>(job.panels) + static_cast<int64_t>(id) * job.rank;
        int const valid = minOf(kPanel, job.count - id);
        DSPARK_DISPATCH_REQUESTS(panelF32, panel)
    }
}

DSPARK_AVX512 inline void panelsI8(PanelJob const& job) {
    int const r4 = (job.rank + 3) & ~3;
    for (int id = 0; id < job.count; id += kPanel) {
        int8_t const* const panel = static_cast<int8_t const*>(job.panels) + static_cast<int64_t>(id) * r4;
        int const valid = minOf(kPanel, job.count - id);
        DSPARK_DISPATCH_REQUESTS(panelI8, panel)
    }
}

inline constexpr Kernels kKernels = {"avx512", topKey,   tileMassesOf, masses,    probabilities,
                                     groupMax, compress, dot,          panelsF32, panelsI8};

}  // namespace dspark::host::avx512

#endif
