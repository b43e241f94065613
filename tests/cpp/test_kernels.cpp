//! Every SIMD body equals the portable one on exact-size heap arrays, so that a sanitizer sees any access beyond a tail.

#include "dspark/host/chain.h"
#include "scenario.h"

using namespace dspark;
using namespace dspark::test;

namespace {

host::Kernels const& portable() { return *host::kernelsOf(host::SimdLevel::kPortable); }

void testRows(host::Kernels const& k) {
    Random random(5);
    for (int count : {1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1023, 1024, 1025, 4095, 4096, 4097, 9000}) {
        size_t const n = static_cast<size_t>(count);
        std::vector<float> row = random.logits(n);
        CHECK(k.top_key(row.data(), 0, count) == portable().top_key(row.data(), 0, count));
        for (float const pivot : {bitsFloat(0xff800000u), 0.5f}) {
            RowLaw const law = {topOfKey(k.top_key(row.data(), 0, count)).max, 1.3f, pivot};
            std::vector<uint64_t> tiles(static_cast<size_t>(numTiles(count))), tiles2(tiles), a(n), b(n);
            CHECK(k.tile_masses(row.data(), law, count, tiles.data()) ==
                  portable().tile_masses(row.data(), law, count, tiles2.data()));
            CHECK(tiles == tiles2);
            k.masses(row.data(), law, count, a.data());
            portable().masses(row.data(), law, count, b.data());
            CHECK(a == b);
            k.probabilities(row.data(), law, count, 1.7, a.data());
            portable().probabilities(row.data(), law, count, 1.7, b.data());
            CHECK(a == b);
        }
        size_t const groups = (n + host::kGroup - 1) / host::kGroup;
        std::vector<float> group(groups), group2(groups);
        k.group_max(row.data(), count, group.data());
        portable().group_max(row.data(), count, group2.data());
        CHECK(group == group2);
        std::vector<float> kept(n + host::kCompressSlack), kept2(n + host::kCompressSlack);
        int const left = k.compress(row.data(), count, -1.0f, 0.75f, kept.data());
        CHECK(left == portable().compress(row.data(), count, -1.0f, 0.75f, kept2.data()));
        CHECK(std::equal(kept.begin(), kept.begin() + left, kept2.begin()));
        row[n / 2] = bitsFloat(0x7fc00000u);
        CHECK(topOfKey(k.top_key(row.data(), 0, count)).status == kRowNan);
        row.assign(n, bitsFloat(0xff800000u));
        CHECK(topOfKey(k.top_key(row.data(), 0, count)).status == kRowNoFinite);
        std::vector<float> const x = random.bells(n), y = random.bells(n);
        CHECK(floatBits(k.dot(x.data(), y.data(), count)) == floatBits(dot16(x.data(), y.data(), count)));
    }
}

void testPanels(host::Kernels const& k) {
    for (bool const int8 : {false, true}) {
        for (int const rank : {1, 3, 4, 5, 16, 30}) {
            for (int const vocab : {1, 15, 16, 63, 64, 65, 200, 1024}) {
                World const world({HeadKind::kVanilla, int8, vocab, vocab, rank, 1, Acceptance::kGreedy},
                                  static_cast<uint64_t>(rank * 10000 + vocab));
                host::PackedW2 const packed = host::packW2(world.weights);
                for (int const requests : {1, 2, 3, 4, 5, 6, 7, 13}) {
                    size_t const r4 = static_cast<size_t>((rank + 3) & ~3), n = static_cast<size_t>(requests);
                    Random random(9);
                    std::vector<float> const latent = random.bells(n * static_cast<size_t>(rank));
                    std::vector<float> const latent_scale = random.bells(n);
                    std::vector<int8_t> latent_int8(n * r4);
                    for (size_t i = 0; i < latent_int8.size(); ++i) {
                        bool const padding = i % r4 >= static_cast<size_t>(rank);
                        latent_int8[i] = static_cast<int8_t>(padding ? 0 : random.below(255) - 127);
                    }
                    std::vector<std::vector<float>> out(n, std::vector<float>(static_cast<size_t>(vocab)));
                    std::vector<float const*> base(n, world.base.data());
                    std::vector<float*> rows(n);
                    for (size_t q = 0; q < n; ++q) rows[q] = out[q].data();
                    host::PanelJob const job = {requests, rank, vocab, packed.tile(0, rank), world.weights.w2_scale,
                                                packed.row_sum.data(),
                                                int8 ? static_cast<void const*>(latent_int8.data()) : latent.data(),
                                                latent_scale.data(), base.data(), rows.data()};
                    (int8 ? k.panel_i8 : k.panel_f32)(job);
                    for (size_t q = 0; q < n; ++q) {
                        float scale = latent_scale[q];
                        HeadState const state = {nullptr, const_cast<float*>(latent.data()) + q * static_cast<size_t>(rank),
                                                 nullptr, nullptr, latent_int8.data() + q * r4, &scale};
                        bool same = true;
                        for (int id = 0; id < vocab; ++id) {
                            float const expected =
                                correctedLogit(world.weights, state, world.base[static_cast<size_t>(id)], id);
                            same = same && floatBits(expected) == floatBits(out[q][static_cast<size_t>(id)]);
                        }
                        CHECK(same);
                    }
                }
            }
        }
    }
}

void testCandidates(host::Kernels const& k) {
    host::FilterScratch scratch;
    HostTeam const team(&k, &scratch);
    Random random(6);
    for (int const vocab : {1, 5, 64, 65, 700}) {
        std::vector<float> const row = random.logits(static_cast<size_t>(vocab));
        for (int const count : {1, 2, 5, 64, 700}) {
            if (count > vocab) continue;
            std::vector<int32_t> ids(static_cast<size_t>(count)), order(static_cast<size_t>(vocab));
            CHECK(host::topCandidates(team, row.data(), vocab, count, ids.data()));
            for (int id = 0; id < vocab; ++id) order[static_cast<size_t>(id)] = id;
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
                return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)];
            });
            std::sort(order.begin(), order.begin() + count);
            CHECK(std::equal(ids.begin(), ids.end(), order.begin()));
        }
    }
}

}  // namespace

int main() {
    for (host::SimdLevel const level : {host::SimdLevel::kPortable, host::SimdLevel::kAvx2, host::SimdLevel::kAvx512}) {
        host::Kernels const* const kernels = host::kernelsOf(level);
        if (!kernels) {
            std::printf("level %d is not available on this machine\n", static_cast<int>(level));
            continue;
        }
        testRows(*kernels);
        testPanels(*kernels);
        testCandidates(*kernels);
    }
    return report("kernels");
}
