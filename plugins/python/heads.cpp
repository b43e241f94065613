//! Sampling and DraftHeads: validated once, used every round.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "types.h"

namespace dspark::python {

namespace {

constexpr char const* kSampling = "Sampling";
constexpr char const* kHeads = "DraftHeads";

[[noreturn]] void failRequest(size_t request, std::string const& what) {
    throw NativeFailure(kSampling, Code::kBadArgument, "request " + std::to_string(request) + ": " + what);
}

Sampling* makeSampling(nb::object const& temperature, nb::object const& seed, nb::object const& top_k,
                       nb::object const& top_p) {
    View<float> const t = view<float>(kSampling, "temperature", temperature, {{"R", -1}});
    int64_t const r = t.size(0);
    View<uint64_t> const s = view<uint64_t>(kSampling, "seed", seed, {{"R", r}});
    View<int64_t> const k = optionalView<int64_t>(kSampling, "top_k", top_k, {{"R", r}});
    View<float> const p = optionalView<float>(kSampling, "top_p", top_p, {{"R", r}});
    if (r > kMaxRequests) throw NativeFailure(kSampling, Code::kBadArgument, "more than 2**20 requests");
    auto sampling = std::make_unique<Sampling>();
    for (size_t i = 0; i < static_cast<size_t>(r); ++i) {
        if (!isFinite(t.data[i]) || t.data[i] < 0.0f) failRequest(i, "temperature must be finite and >= 0");
        if (k && k.data[i] < 0) failRequest(i, "top_k must be >= 0 (0 = off)");
        if (p && !(p.data[i] > 0.0f && p.data[i] <= 1.0f)) failRequest(i, "top_p must be in (0, 1]");
        int32_t const clipped = k ? static_cast<int32_t>(minOf<int64_t>(k.data[i], kMaxVocab)) : 0;
        sampling->params.push_back({t.data[i], clipped, p ? p.data[i] : 1.0f, s.data[i], 0});
    }
    return sampling.release();
}

HeadKind kindOf(std::string const& name) {
    if (name == "none") return HeadKind::kNone;
    if (name == "vanilla") return HeadKind::kVanilla;
    if (name == "gated") return HeadKind::kGated;
    if (name == "rnn") return HeadKind::kRnn;
    throw NativeFailure(kHeads, Code::kBadArgument, "kind must be none, vanilla, gated or rnn, got '" + name + "'");
}

template <class T>
T const* keep(DraftHeads* heads, View<T> const& array) {
    if (array) heads->owners.push_back(array.owner);
    return array.data;
}

float const* keepFinite(DraftHeads* heads, char const* name, View<float> const& array) {
    if (!array) return nullptr;
    int64_t count = 1;
    for (int64_t const size : array.shape) count *= size;
    for (int64_t i = 0; i < count; ++i) {
        if (isFinite(array.data[i])) continue;
        throw NativeFailure(kHeads, Code::kBadWeights, std::string(name) + " has a value that is not finite");
    }
    return keep(heads, array);
}

[[noreturn]] void failMissing(char const* name) {
    throw NativeFailure(kHeads, Code::kMissing, std::string(name) + " is missing for this kind of head");
}

void refuse(nb::handle object, char const* name, char const* kind) {
    if (object.is_none()) return;
    throw NativeFailure(kHeads, Code::kMismatch, std::string(name) + " is only for a " + kind + " head");
}

void takeFactors(DraftHeads* heads, nb::object const& w1, nb::object const& w2, nb::object const& w1_scale,
                 nb::object const& w2_scale) {
    HeadWeights& w = heads->weights;
    if (w1.is_none()) failMissing("w1");
    if (w2.is_none()) failMissing("w2");
    nb::ndarray<nb::ro> probe;
    bool const int8 = nb::try_cast(w1, probe, false) && probe.dtype() == nb::dtype<int8_t>();
    int64_t rank = 0;
    if (int8) {
        View<int8_t> const a = view<int8_t>(kHeads, "w1", w1, {{"V", w.vocab}, {"r", -1}});
        rank = a.size(1);
        View<int8_t> const b = view<int8_t>(kHeads, "w2", w2, {{"Vd", w.draft_vocab}, {"r", rank}});
        if (w1_scale.is_none()) failMissing("w1_scale");
        if (w2_scale.is_none()) failMissing("w2_scale");
        w.w1_int8 = keep(heads, a);
        w.w2_int8 = keep(heads, b);
        w.w1_scale = keepFinite(heads, "w1_scale", view<float>(kHeads, "w1_scale", w1_scale, {{"V", w.vocab}}));
        w.w2_scale = keepFinite(heads, "w2_scale", view<float>(kHeads, "w2_scale", w2_scale, {{"Vd", w.draft_vocab}}));
    } else {
        View<float> const a = view<float>(kHeads, "w1", w1, {{"V", w.vocab}, {"r", -1}});
        rank = a.size(1);
        View<float> const b = view<float>(kHeads, "w2", w2, {{"Vd", w.draft_vocab}, {"r", rank}});
        refuse(w1_scale, "w1_scale", "int8");
        refuse(w2_scale, "w2_scale", "int8");
        w.w1 = keepFinite(heads, "w1", a);
        w.w2 = keepFinite(heads, "w2", b);
    }
    if (rank < 1 || rank > kMaxRank) {
        throw NativeFailure(kHeads, Code::kBadWeights, "rank must be in 1..4096, got " + std::to_string(rank));
    }
    w.rank = static_cast<int32_t>(rank);
}

void takeHiddenWeights(DraftHeads* heads, nb::object const& gate_weight, nb::object const& gate_bias,
                       nb::object const& rnn_weight, nb::object const& rnn_bias) {
    HeadWeights& w = heads->weights;
    int64_t const r = w.rank;
    if (w.kind == HeadKind::kGated) {
        if (gate_weight.is_none()) failMissing("gate_weight");
        View<float> const gate = view<float>(kHeads, "gate_weight", gate_weight, {{"r", r}, {"d + r", -1}});
        if (gate.size(1) <= r) failShape(kHeads, "gate_weight", "more than r columns", std::to_string(gate.size(1)));
        w.hidden = static_cast<int32_t>(gate.size(1) - r);
        w.gate_weight = keepFinite(heads, "gate_weight", gate);
        w.gate_bias = keepFinite(heads, "gate_bias", optionalView<float>(kHeads, "gate_bias", gate_bias, {{"r", r}}));
    } else {
        refuse(gate_weight, "gate_weight", "gated");
        refuse(gate_bias, "gate_bias", "gated");
    }
    if (w.kind == HeadKind::kRnn) {
        if (rnn_weight.is_none()) failMissing("rnn_weight");
        View<float> const rnn = view<float>(kHeads, "rnn_weight", rnn_weight, {{"3r", 3 * r}, {"2r + d", -1}});
        if (rnn.size(1) <= 2 * r) failShape(kHeads, "rnn_weight", "more than 2r columns", std::to_string(rnn.size(1)));
        w.hidden = static_cast<int32_t>(rnn.size(1) - 2 * r);
        w.rnn_weight = keepFinite(heads, "rnn_weight", rnn);
        w.rnn_bias = keepFinite(heads, "rnn_bias", optionalView<float>(kHeads, "rnn_bias", rnn_bias, {{"3r", 3 * r}}));
    } else {
        refuse(rnn_weight, "rnn_weight", "rnn");
        refuse(rnn_bias, "rnn_bias", "rnn");
    }
}

void takeConfidence(DraftHeads* heads, nb::object const& weight, nb::object const& bias, bool with_markov) {
    HeadWeights const& w = heads->weights;
    if (weight.is_none()) return refuse(bias, "confidence_bias", "confidence");
    if (with_markov && w.kind == HeadKind::kNone) {
        throw NativeFailure(kHeads, Code::kMismatch, "confidence_with_markov needs a Markov head; kind is none");
    }
    int64_t const markov = with_markov ? w.rank : 0;
    View<float> const array = view<float>(kHeads, "confidence_weight", weight, {{with_markov ? "d + r" : "d", -1}});
    int64_t const hidden = array.size(0) - markov;
    if (hidden < 1 || (w.hidden > 0 && hidden != w.hidden)) {
        failShape(kHeads, "confidence_weight",
                  "[" + std::to_string(w.hidden + markov) + "] float32 (d + r of the other weights)",
                  "[" + std::to_string(array.size(0)) + "]");
    }
    heads->confidence.hidden_weight = keepFinite(heads, "confidence_weight", array);
    View<float> const b = optionalView<float>(kHeads, "confidence_bias", bias, {{"1", 1}});
    float const* const value = keepFinite(heads, "confidence_bias", b);
    heads->confidence.bias = value ? *value : 0.0f;
    if (with_markov) {
        heads->markov_table = host::markovTable(kernels(), w, array.data + hidden);
        heads->confidence.markov_table = heads->markov_table.data();
    }
    heads->has_confidence = true;
    heads->confidence_hidden = static_cast<int>(hidden);
}

void takeIdMap(DraftHeads* heads, nb::object const& d2t) {
    HeadWeights& w = heads->weights;
    if (d2t.is_none()) {
        if (w.draft_vocab != w.vocab) {
            throw NativeFailure(kHeads, Code::kMissing, "d2t is missing: the draft vocabulary differs from the target's");
        }
        return;
    }
    View<int64_t> const map = view<int64_t>(kHeads, "d2t", d2t, {{"Vd", w.draft_vocab}});
    checkRange(kHeads, "d2t", map.data, w.draft_vocab, 0, w.vocab);
    std::vector<bool> seen(static_cast<size_t>(w.vocab));
    for (int draft_id = 0; draft_id < w.draft_vocab; ++draft_id) {
        size_t const target = static_cast<size_t>(map.data[draft_id]);
        if (seen[target]) {
            throw NativeFailure(kHeads, Code::kBadWeights, "d2t names target id " + std::to_string(target) + " twice");
        }
        seen[target] = true;
        heads->target_ids.push_back(static_cast<int32_t>(target));
    }
    w.target_ids = heads->target_ids.data();
}

}  // namespace

void registerHeads(nb::module_& m) {
    nb::class_<Sampling>(m, "Sampling")
        .def(
            "__init__",
            [](Sampling* self, nb::object const& temperature, nb::object const& seed, nb::object const& top_k,
               nb::object const& top_p) {
                std::unique_ptr<Sampling> made(makeSampling(temperature, seed, top_k, top_p));
                new (self) Sampling(std::move(*made));
            },
            nb::arg("temperature").none(), nb::arg("seed").none(), nb::arg("top_k") = nb::none(),
            nb::arg("top_p") = nb::none())
        .def_prop_ro("num_requests", [](Sampling const& self) { return self.params.size(); });

    nb::class_<DraftHeads>(m, "DraftHeads")
        .def(
            "__init__",
            [](DraftHeads* self, int64_t vocab_size, int64_t draft_vocab_size, std::string const& kind,
               nb::object const& w1, nb::object const& w2, nb::object const& w1_scale, nb::object const& w2_scale,
               nb::object const& gate_weight, nb::object const& gate_bias, nb::object const& rnn_weight,
               nb::object const& rnn_bias, nb::object const& confidence_weight, nb::object const& confidence_bias,
               bool confidence_with_markov, nb::object const& d2t) {
                checkRange(kHeads, "vocab_size", &vocab_size, 1, 1, kMaxVocab + 1);
                checkRange(kHeads, "draft_vocab_size", &draft_vocab_size, 1, 1, vocab_size + 1);
                DraftHeads heads;
                heads.weights.kind = kindOf(kind);
                heads.weights.vocab = static_cast<int32_t>(vocab_size);
                heads.weights.draft_vocab = static_cast<int32_t>(draft_vocab_size);
                if (heads.weights.kind != HeadKind::kNone) {
                    takeFactors(&heads, w1, w2, w1_scale, w2_scale);
                } else {
                    refuse(w1, "w1", "Markov");
                    refuse(w2, "w2", "Markov");
                }
                takeHiddenWeights(&heads, gate_weight, gate_bias, rnn_weight, rnn_bias);
                takeConfidence(&heads, confidence_weight, confidence_bias, confidence_with_markov);
                takeIdMap(&heads, d2t);
                heads.packed = host::packW2(heads.weights);
                new (self) DraftHeads(std::move(heads));
            },
            nb::kw_only(), nb::arg("vocab_size"), nb::arg("draft_vocab_size"), nb::arg("kind") = "vanilla",
            nb::arg("w1") = nb::none(), nb::arg("w2") = nb::none(), nb::arg("w1_scale") = nb::none(),
            nb::arg("w2_scale") = nb::none(), nb::arg("gate_weight") = nb::none(), nb::arg("gate_bias") = nb::none(),
            nb::arg("rnn_weight") = nb::none(), nb::arg("rnn_bias") = nb::none(),
            nb::arg("confidence_weight") = nb::none(), nb::arg("confidence_bias") = nb::none(),
            nb::arg("confidence_with_markov") = true, nb::arg("d2t") = nb::none())
        .def_prop_ro("kind",
                     [](DraftHeads const& self) {
                         constexpr char const* names[] = {"none", "vanilla", "gated", "rnn"};
                         return names[static_cast<int>(self.weights.kind)];
                     })
        .def_prop_ro("vocab_size", [](DraftHeads const& self) { return self.weights.vocab; })
        .def_prop_ro("draft_vocab_size", [](DraftHeads const& self) { return self.weights.draft_vocab; })
        .def_prop_ro("rank", [](DraftHeads const& self) { return self.weights.rank; })
        .def_prop_ro("hidden_size",
                     [](DraftHeads const& self) { return maxOf(self.weights.hidden, self.confidence_hidden); })
        .def_prop_ro("has_confidence", [](DraftHeads const& self) { return self.has_confidence; })
        .def_prop_ro("weight_dtype",
                     [](DraftHeads const& self) {
                         return self.weights.w1_int8 ? "int8" : self.weights.w1 ? "float32" : "none";
                     })
        .def_prop_ro("num_bytes", [](DraftHeads const& self) {
            return self.packed.bytes() + self.markov_table.size() * 4 + self.target_ids.size() * 4;
        });
}

}  // namespace dspark::python
