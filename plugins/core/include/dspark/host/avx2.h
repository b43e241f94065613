#pragma once
//! AVX2 + FMA bodies, the same bits as portable.h.

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "dspark/host/portable.h"

#define DSPARK_AVX2 __attribute__((target("avx2,fma")))

namespace dspark::host::avx2 {

DSPARK_AVX2 inline float reduceMax(__m256 x) {
    __m128 const four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 const two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

DSPARK_AVX2 inline uint64_t topKey(float const* row, int begin, int end) {
    constexpr int kBlock = 4096;
    __m256 const lowest = _mm256_set1_ps(bitsFloat(0xff800000u));
    __m256 nan = _mm256_setzero_ps();
    float best = 0.0f;
    int best_begin = -1, best_end = -1;
    int const whole = begin + ((end - begin) & ~15);
    for (int block = begin; block < whole; block += kBlock) {
        int const stop = minOf(whole, block + kBlock);
        __m256 m0 = lowest, m1 = lowest;
        for (int id = block; id < stop; id += 16) {
            __m256 const x0 = _mm256_loadu_ps(row + id), x1 = _mm256_loadu_ps(row + id + 8);
            nan = _mm256_or_ps(nan, _mm256_cmp_ps(x0, x1, _CMP_UNORD_Q));
            m0 = _mm256_max_ps(m0, x0);
            m1 = _mm256_max_ps(m1, x1);
        }
        float const top = reduceMax(_mm256_max_ps(m0, m1));
        if (best_begin < 0 || top > best) {
            best = top;
            best_begin = block;
            best_end = stop;
        }
    }
    if (_mm256_movemask_ps(nan)) return portable::topKey(row, begin, end);
    uint64_t key = whole < end ? portable::topKey(row, whole, end) : 0;
    for (int id = best_begin; id < best_end; ++id) {
        if (row[id] == best) {
            key = maxOf(key, argmaxKey(best, id));
            break;
        }
    }
    return key;
}

struct Law {
    __m256 max, scale, pivot;
};

DSPARK_AVX2 inline Law lawOf(RowLaw const& law) {
    return {_mm256_set1_ps(law.max), _mm256_set1_ps(law.scale), _mm256_set1_ps(law.pivot)};
}

//! 2^z * 2^40 of 8 logits, 0 below the pivot.
DSPARK_AVX2 inline __m256 scaledMass(Law const& law, __m256 logit) {
    __m256 const magic = _mm256_set1_ps(kMagic);
    __m256 z = _mm256_mul_ps(_mm256_sub_ps(logit, law.max), law.scale);
    z = _mm256_max_ps(z, _mm256_set1_ps(-64.0f));
    __m256 const t = _mm256_add_ps(z, magic);
    __m256 const f = _mm256_sub_ps(z, _mm256_sub_ps(t, magic));
    __m256 y = _mm256_set1_ps(kExp2C6);
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2C5));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2C4));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2C3));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2C2));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2C1));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0f));
    __m256i const shift =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(kMassBits)), 23);
    __m256 const mass = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), shift));
    return _mm256_and_ps(mass, _mm256_cmp_ps(logit, law.pivot, _CMP_GE_OQ));
}

//! 2^52 + rint(mass) of four masses; the low mantissa bits are the integer.
DSPARK_AVX2 inline __m256d biased(__m128 mass) {
    return _mm256_add_pd(_mm256_cvtps_pd(mass), _mm256_set1_pd(4503599627370496.0));
}
DSPARK_AVX2 inline __m256i integerOf(__m256d biased_value) {
    return _mm256_xor_si256(_mm256_castpd_si256(biased_value), _mm256_castpd_si256(_mm256_set1_pd(4503599627370496.0)));
}
DSPARK_AVX2 inline __m256i lowU64(__m256 mass) { return integerOf(biased(_mm256_castps256_ps128(mass))); }
DSPARK_AVX2 inline __m256i highU64(__m256 mass) { return integerOf(biased(_mm256_extractf128_ps(mass, 1))); }

DSPARK_AVX2 inline uint64_t tileMassesOf(float const* row, RowLaw const& law, int count, uint64_t* tile_mass) {
    Law const wide = lawOf(law);
    uint64_t total = 0;
    for (int tile = 0; tile < numTiles(count); ++tile) {
        int const begin = tile << kTileShift;
        int const end = minOf(count, begin + kTile);
        __m256i s0 = _mm256_setzero_si256(), s1 = s0;
        int id = begin;
        for (; id + 8 <= end; id += 8) {
            __m256 const a = scaledMass(wide, _mm256_loadu_ps(row + id));
            s0 = _mm256_add_epi64(s0, lowU64(a));
            s1 = _mm256_add_epi64(s1, highU64(a));
        }
        alignas(32) uint64_t part[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(part), _mm256_add_epi64(s0, s1));
        uint64_t sum = part[0] + part[1] + part[2] + part[3];
        for (; id < end; ++id) sum += lawMass(law, row[id]);
        tile_mass[tile] = sum;
        total += sum;
    }
    return total;
}

DSPARK_AVX2 inline void masses(float const* row, RowLaw const& law, int count, uint64_t* out) {
    Law const wide = lawOf(law);
    int id = 0;
    for (; id + 8 <= count; id += 8) {
        __m256 const a = scaledMass(wide, _mm256_loadu_ps(row + id));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + id), lowU64(a));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + id + 4), highU64(a));
    }
    for (; id < count; ++id) out[id] = lawMass(law, row[id]);
}

DSPARK_AVX2 inline __m256i toQ51(__m128 mass, __m256d factor) {
    __m256d const bias = _mm256_set1_pd(4503599627370496.0);
    __m256d const integer = _mm256_sub_pd(biased(mass), bias);
    return integerOf(_mm256_add_pd(_mm256_mul_pd(integer, factor), bias));
}

DSPARK_AVX2 inline void probabilities(float const* row, RowLaw const& law, int count, double factor, uint64_t* out) {
    Law const wide = lawOf(law);
    __m256d const wide_factor = _mm256_set1_pd(factor);
    int id = 0;
    for (; id + 8 <= count; id += 8) {
        __m256 const a = scaledMass(wide, _mm256_loadu_ps(row + id));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + id), toQ51(_mm256_castps256_ps128(a), wide_factor));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + id + 4), toQ51(_mm256_extractf128_ps(a, 1), wide_factor));
    }
    portable::probabilities(row + id, law, count - id, factor, out + id);
}

DSPARK_AVX2 inline void groupMax(float const* row, int count, float* out) {
    int begin = 0, group = 0;
    for (; begin + kGroup <= count; begin += kGroup, ++group) {
        __m256 best = _mm256_loadu_ps(row + begin);
        for (int i = 8; i < kGroup; i += 8) best = _mm256_max_ps(best, _mm256_loadu_ps(row + begin + i));
        out[group] = reduceMax(best);
    }
    if (begin < count) portable::groupMax(row + begin, count - begin, out + group);
}

DSPARK_AVX2 inline float dot(float const* a, float const* b, int n) {
    __m256 low = _mm256_setzero_ps(), high = low;
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        low = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), low);
        high = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), high);
    }
    if (i < n) {
        alignas(32) float lane[16];
        _mm256_store_ps(lane, low);
        _mm256_store_ps(lane + 8, high);
        for (int c = 0; i + c < n; ++c) lane[c] = fmaRn(a[i + c], b[i + c], lane[c]);
        low = _mm256_load_ps(lane);
        high = _mm256_load_ps(lane + 8);
    }
    __m256 const eight = _mm256_add_ps(low, high);
    __m128 const four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 const two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

//! Store kWidth * 8 corrected logits, the last ones maybe cut off by `valid`.
template <int kWidth>
DSPARK_AVX2 inline void storeCorrected(__m256 const* bias, float const* base, float* out, int valid) {
    for (int j = 0; j < kWidth && j * 8 < valid; ++j) {
        if (valid - j * 8 >= 8) {
            _mm256_storeu_ps(out + j * 8, _mm256_add_ps(_mm256_loadu_ps(base + j * 8), bias[j]));
        } else {
            alignas(32) float lane[8];
            _mm256_store_ps(lane, bias[j]);
            for (int c = 0; j * 8 + c < valid; ++c) out[j * 8 + c] = addRn(base[j * 8 + c], lane[c]);
        }
    }
}

//! kWidth * 8 columns of one panel for kRequests requests.
template <int kRequests, int kWidth>
DSPARK_AVX2 inline void sliceF32(PanelJob const& job, float const* panel, int first, int id, int valid) {
    float const* const latent = static_cast<float const*>(job.latent) + static_cast<int64_t>(first) * job.rank;
    __m256 acc[kRequests][kWidth];
    for (int q = 0; q < kRequests; ++q) {
        for (int j = 0; j < kWidth; ++j) acc[q][j] = _mm256_setzero_ps();
    }
    for (int i = 0; i < job.rank; ++i, panel += kPanel) {
        for (int q = 0; q < kRequests; ++q) {
            __m256 const x = _mm256_set1_ps(latent[static_cast<int64_t>(q) * job.rank + i]);
            for (int j = 0; j < kWidth; ++j) acc[q][j] = _mm256_fmadd_ps(x, _mm256_loadu_ps(panel + j * 8), acc[q][j]);
        }
    }
    for (int q = 0; q < kRequests; ++q) {
        storeCorrected<kWidth>(acc[q], job.base[first + q] + id, job.out[first + q] + id, valid);
    }
}

template <int kRequests, int kWidth>
DSPARK_AVX2 inline void panelF32(PanelJob const& job, float const* panel, int first, int id, int valid) {
    for (int column = 0; column < valid; column += kWidth * 8) {
        sliceF32<kRequests, kWidth>(job, panel + column, first, id + column, valid - column);
    }
}

DSPARK_AVX2 inline void panelsF32(PanelJob const& job) {
    for (int id = 0; id < job.count; id += kPanel) {
        float const* const panel = static_cast<float const*>(job.panels) + static_cast<int64_t>(id) * job.rank;
        int const valid = minOf(kPanel, job.count - id);
        int first = 0;
        for (; first + 4 <= job.num_requests; first += 4) panelF32<4, 2>(job, panel, first, id, valid);
        for (; first < job.num_requests; ++first) panelF32<1, 8>(job, panel, first, id, valid);
    }
}

//! Eight rows of one int8 panel: products of int16 pairs are exact where maddubs would saturate.
DSPARK_AVX2 inline void rowsI8(PanelJob const& job, int8_t const* rows, int request, int id, int valid) {
    int const groups = (job.rank + 3) >> 2;
    auto const* const latent = static_cast<int8_t const*>(job.latent) + static_cast<int64_t>(request) * groups * 4;
    __m256i low = _mm256_setzero_si256(), high = low;
    for (int group = 0; group < groups; ++group, rows += kPanel * 4) {
        int32_t four;
        std::memcpy(&four, latent + group * 4, sizeof(four));
        __m256i const x = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
        __m256i const w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<__m128i const*>(rows)));
        __m256i const w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<__m128i const*>(rows + 16)));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(x, w0));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(x, w1));
    }
    __m256i const dot = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
    alignas(32) float scale[8] = {};
    for (int c = 0; c < 8 && c < valid; ++c) scale[c] = mulRn(job.latent_scale[request], job.scale[id + c]);
    __m256 const bias = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_load_ps(scale));
    storeCorrected<1>(&bias, job.base[request] + id, job.out[request] + id, valid);
}

DSPARK_AVX2 inline void panelsI8(PanelJob const& job) {
    int const r4 = (job.rank + 3) & ~3;
    for (int id = 0; id < job.count; id += 8) {
        int8_t const* const panel = static_cast<int8_t const*>(job.panels) + static_cast<int64_t>(id / kPanel) * kPanel * r4;
        for (int request = 0; request < job.num_requests; ++request) {
            rowsI8(job, panel + (id % kPanel) * 4, request, id, job.count - id);
        }
    }
}

inline constexpr Kernels kKernels = {"avx2",   topKey,             tileMassesOf, masses,    probabilities,
                                     groupMax, portable::compress, dot,          panelsF32, panelsI8};

}  // namespace dspark::host::avx2

#endif
