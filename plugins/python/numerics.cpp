//! The pinned functions and decision functions by themselves, for twins and proofs.

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "types.h"

namespace dspark::python {

namespace {

template <class In, class Function>
nb::object elementwise(char const* op, nb::object const& object, Function const& function) {
    View<In> const x = view<In>(op, "x", object, {{"n", -1}});
    std::vector<float> out(static_cast<size_t>(x.size(0)));
    for (size_t i = 0; i < out.size(); ++i) out[i] = function(x.data[i]);
    size_t const count = out.size();
    return toNumpy(std::move(out), {count});
}

nb::tuple words(PhiloxBlock const& block) {
    return nb::make_tuple(block.word[0], block.word[1], block.word[2], block.word[3]);
}

nb::tuple philox(uint64_t seed, int64_t position, int64_t stream, int64_t block) {
    checkRange("philox", "position", &position, 1, 0, kMaxPosition * 2);
    checkRange("philox", "stream", &stream, 1, 0, 6);
    checkRange("philox", "block", &block, 1, 0, int64_t{1} << 32);
    return words(streamBlock(seed, static_cast<uint64_t>(position), static_cast<Stream>(stream),
                             static_cast<uint32_t>(block)));
}

nb::object rowMasses(nb::object const& logits, float temperature, int64_t top_k, float top_p) {
    constexpr char const* op = "row_masses";
    View<float> const row = view<float>(op, "logits", logits, {{"V", -1}});
    if (row.size(0) < 1 || row.size(0) > kMaxVocab) failShape(op, "logits", "V in 1..2**20", std::to_string(row.size(0)));
    if (!isFinite(temperature) || temperature < kGreedyTemperature) {
        throw NativeFailure(op, Code::kBadArgument, "temperature must be finite and >= 1e-5");
    }
    checkRange(op, "top_k", &top_k, 1, 0, int64_t{1} << 62);
    if (!(top_p > 0.0f && top_p <= 1.0f)) throw NativeFailure(op, Code::kBadArgument, "top_p must be in (0, 1]");
    int const vocab = static_cast<int>(row.size(0));
    HostTeam const team(kernels(), scratch());
    RowTop const top = topOfKey(rowTopKey(team, row.data, 0, vocab));
    if (top.status != kRowOk) {
        throw NativeFailure(op, Code::kBadArgument,
                            top.status == kRowNan ? "a logit is NaN or +inf" : "every logit is -inf");
    }
    std::vector<uint64_t> tile_mass(static_cast<size_t>(numTiles(vocab))), masses(static_cast<size_t>(vocab));
    uint64_t total = 0;
    RowLaw const law = filteredLaw(team, row.data, vocab, top.max, temperature,
                                   static_cast<int>(minOf<int64_t>(top_k, kMaxVocab)), top_p, tile_mass.data(), &total);
    team.kernels->masses(row.data, law, vocab, masses.data());
    return toNumpy(std::move(masses), {static_cast<size_t>(vocab)});
}

//! Masses given by a caller: at most 2^40 each, as the core makes them, so that sums cannot overflow.
View<uint64_t> massView(char const* op, char const* name, nb::object const& object, int64_t size, int bits = kMassBits) {
    View<uint64_t> const masses = view<uint64_t>(op, name, object, {{"V", size}});
    if (masses.size(0) < 1 || masses.size(0) > kMaxVocab) {
        failShape(op, name, "V in 1..2**20", std::to_string(masses.size(0)));
    }
    uint64_t sum = 0;
    for (int64_t i = 0; i < masses.size(0); ++i) {
        sum += masses.data[i];
        if (masses.data[i] > (uint64_t{1} << bits) || sum > (uint64_t{1} << 62)) {
            throw NativeFailure(op, Code::kBadArgument, std::string(name) + " is too large");
        }
    }
    return masses;
}

nb::object residualMasses(nb::object const& target, nb::object const& draft) {
    constexpr char const* op = "residual_masses";
    View<uint64_t> const p = massView(op, "target", target, -1);
    View<uint64_t> const q = massView(op, "draft", draft, p.size(0));
    int const vocab = static_cast<int>(p.size(0));
    uint64_t p_total = 0, q_total = 0;
    for (int id = 0; id < vocab; ++id) {
        p_total += p.data[id];
        q_total += q.data[id];
    }
    if (p_total == 0 || q_total == 0) throw NativeFailure(op, Code::kBadArgument, "a row of masses is all 0");
    std::vector<uint64_t> out(static_cast<size_t>(vocab));
    probabilityRow(SerialTeam{}, ArrayMass{p.data}, vocab, p_total, out.data());
    subtractProposal(SerialTeam{}, ArrayMass{q.data}, nullptr, vocab, q_total, out.data());
    return toNumpy(std::move(out), {static_cast<size_t>(vocab)});
}

bool acceptTestOf(uint64_t bits, uint64_t target_mass, uint64_t target_total, uint64_t draft_mass, uint64_t draft_total) {
    if (target_total == 0 || draft_total == 0) {
        throw NativeFailure("accept_test", Code::kBadArgument, "a total is 0");
    }
    return acceptTest(bits, target_mass, target_total, draft_mass, draft_total);
}

int64_t pickOf(nb::object const& object, uint64_t bits) {
    View<uint64_t> const masses = massView("pick", "masses", object, -1, 62);
    int const count = static_cast<int>(masses.size(0));
    std::vector<uint64_t> tile_mass(static_cast<size_t>(numTiles(count)));
    ArrayMass const mass = {masses.data};
    uint64_t const total = tileMasses(SerialTeam{}, mass, count, tile_mass.data());
    return pickToken(SerialTeam{}, mass, count, tile_mass.data(), total, bits);
}

int64_t coupledPick(nb::object const& object, uint64_t seed, int64_t position) {
    View<uint64_t> const masses = massView("coupled_pick", "masses", object, -1);
    checkRange("coupled_pick", "position", &position, 1, 0, kMaxPosition * 2);
    int const count = static_cast<int>(masses.size(0));
    std::vector<uint64_t> tile_mass(static_cast<size_t>(numTiles(count)));
    ArrayMass const mass = {masses.data};
    tileMasses(SerialTeam{}, mass, count, tile_mass.data());
    return coupledToken(SerialTeam{}, mass, count, tile_mass.data(), seed, static_cast<uint64_t>(position));
}

}  // namespace

void registerNumerics(nb::module_& m) {
    m.def("philox", &philox, nb::arg("seed"), nb::arg("position"), nb::arg("stream"), nb::arg("block") = 0);
    m.def(
        "philox_raw",
        [](std::array<uint32_t, 4> const& counter, std::array<uint32_t, 2> const& key) {
            return words(philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]));
        },
        nb::arg("counter"), nb::arg("key"));
    m.def("row_masses", &rowMasses, nb::arg("logits").none(), nb::arg("temperature"), nb::arg("top_k") = 0,
          nb::arg("top_p") = 1.0f);
    m.def("residual_masses", &residualMasses, nb::arg("target").none(), nb::arg("draft").none());
    m.def("accept_test", &acceptTestOf, nb::arg("bits"), nb::arg("target_mass"), nb::arg("target_total"),
          nb::arg("draft_mass"), nb::arg("draft_total"));
    m.def("pick", &pickOf, nb::arg("masses").none(), nb::arg("bits"));
    m.def("coupled_pick", &coupledPick, nb::arg("masses").none(), nb::arg("seed"), nb::arg("position"));
    m.def("exp2_exact", [](nb::object const& x) {
        return elementwise<float>("exp2_exact", x, [](float v) {
            if (!(v >= -126.0f && v <= 126.0f)) {
                throw NativeFailure("exp2_exact", Code::kBadArgument, "|x| must be <= 126");
            }
            return exp2Exact(v);
        });
    }, nb::arg("x").none());
    m.def("exponential_exact", [](nb::object const& x) {
        return elementwise<uint32_t>("exponential_exact", x, [](uint32_t v) { return exponentialExact(v); });
    }, nb::arg("bits").none());
    m.def("sigmoid_exact", [](nb::object const& x) {
        return elementwise<float>("sigmoid_exact", x, [](float v) { return sigmoidExact(v); });
    }, nb::arg("x").none());
    m.def("tanh_exact", [](nb::object const& x) {
        return elementwise<float>("tanh_exact", x, [](float v) { return tanhExact(v); });
    }, nb::arg("x").none());
}

}  // namespace dspark::python
