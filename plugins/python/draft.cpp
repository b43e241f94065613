//! draft_chain and confidence.

#include <nanobind/stl/string.h>

#include "types.h"

namespace dspark::python {

namespace {

constexpr char const* kChain = "draft_chain";
constexpr char const* kConfidence = "confidence";

void checkRequests(char const* op, Sampling const& sampling, int64_t requests) {
    if (static_cast<int64_t>(sampling.params.size()) == requests) return;
    failShape(op, "sampling", std::to_string(requests) + " requests", std::to_string(sampling.params.size()));
}

Draft* draftChain(DraftHeads const& heads, nb::object const& base_logits, nb::object const& anchors,
                                  nb::object const& positions, Sampling const& sampling, nb::object const& hidden,
                                  std::string const& acceptance, int64_t num_candidates, int64_t num_steps) {
    HeadWeights const& w = heads.weights;
    View<float> const base =
        view<float>(kChain, "base_logits", base_logits, {{"R", -1}, {"gamma", -1}, {"Vd", w.draft_vocab}});
    int64_t const requests = base.size(0), gamma = base.size(1);
    View<int64_t> const anchor = view<int64_t>(kChain, "anchors", anchors, {{"R", requests}});
    View<int64_t> const position = view<int64_t>(kChain, "positions", positions, {{"R", requests}});
    checkRequests(kChain, sampling, requests);
    if (gamma < 1 || gamma > kMaxDraftLen) {
        failShape(kChain, "base_logits", "gamma in 1..64", std::to_string(gamma));
    }
    bool const reads_hidden = w.kind == HeadKind::kGated || w.kind == HeadKind::kRnn;
    if (reads_hidden && hidden.is_none()) {
        throw NativeFailure(kChain, Code::kMissing, "hidden is missing: gated and rnn heads read it");
    }
    View<float> h;
    if (reads_hidden) h = view<float>(kChain, "hidden", hidden, {{"R", requests}, {"gamma", gamma}, {"d", w.hidden}});
    checkRange(kChain, "anchors", anchor.data, requests, 0, w.vocab);
    checkRange(kChain, "positions", position.data, requests, 0, kMaxPosition);
    checkRange(kChain, "num_candidates", &num_candidates, 1, 0, w.draft_vocab + 1);
    checkRange(kChain, "num_steps", &num_steps, 1, 0, gamma + 1);
    Acceptance const mode = acceptanceOf(kChain, acceptance);

    auto draft = std::make_unique<Draft>();
    draft->num_requests = static_cast<int>(requests);
    draft->num_steps = static_cast<int>(num_steps ? num_steps : gamma);
    draft->vocab = w.vocab;
    draft->candidates = num_candidates > 0;
    draft->width = draft->candidates ? static_cast<int>(num_candidates) : w.draft_vocab;
    draft->mode = mode;
    nb::gil_scoped_release const release;
    size_t const cells = static_cast<size_t>(requests) * static_cast<size_t>(draft->num_steps);
    draft->tokens.resize(cells);
    draft->status.resize(static_cast<size_t>(requests));
    draft->picks.resize(cells);
    if (draft->candidates) {
        draft->ids.resize(cells * static_cast<size_t>(draft->width));
    } else {
        draft->target_ids = heads.target_ids;
    }
    std::vector<RequestParams> const params = sampling.at(position.data);
    bool sampled = false;
    for (RequestParams const& p : params) sampled = sampled || (mode != Acceptance::kGreedy && !p.greedy());
    if (sampled) draft->rows = heads.pool->take(cells * static_cast<size_t>(draft->width));
    host::ChainInput const in = {&w,
                                 &heads.packed,
                                 mode,
                                 draft->num_requests,
                                 draft->num_steps,
                                 static_cast<int>(gamma),
                                 static_cast<int>(num_candidates),
                                 base.data,
                                 h.data,
                                 anchor.data,
                                 params.data()};
    host::ChainOutput const out = {draft->tokens.data(), draft->status.data(), draft->picks.data(), draft->rows.get(),
                                   draft->ids.data()};
    host::Chain(kernels(), scratch(), in, out).run();
    return draft.release();
}

nb::object confidenceOfBlock(DraftHeads const& heads, nb::object const& hidden, nb::object const& anchors,
                             nb::object const& draft_tokens, nb::object const& temperature, nb::object const& bias) {
    if (!heads.has_confidence) {
        throw NativeFailure(kConfidence, Code::kMissing, "these heads have no confidence weights");
    }
    int const d = heads.confidence_hidden, vocab = heads.weights.vocab;
    View<float> const h = view<float>(kConfidence, "hidden", hidden, {{"R", -1}, {"gamma", -1}, {"d", d}});
    int64_t const requests = h.size(0), gamma = h.size(1);
    View<int64_t> const anchor = view<int64_t>(kConfidence, "anchors", anchors, {{"R", requests}});
    View<int64_t> const drafts = view<int64_t>(kConfidence, "draft_tokens", draft_tokens, {{"R", requests}, {"n", -1}});
    int64_t const steps = drafts.size(1);
    if (steps > gamma) failShape(kConfidence, "draft_tokens", "at most gamma columns", std::to_string(steps));
    View<float> const t = optionalView<float>(kConfidence, "temperature", temperature, {{"n", steps}});
    View<float> const b = optionalView<float>(kConfidence, "bias", bias, {{"n", steps}});
    checkRange(kConfidence, "anchors", anchor.data, requests, 0, vocab);
    checkRange(kConfidence, "draft_tokens", drafts.data, requests * steps, -1, vocab);
    std::vector<float> inverse(static_cast<size_t>(steps), 1.0f), offset(static_cast<size_t>(steps), 0.0f);
    for (size_t step = 0; step < inverse.size(); ++step) {
        if (t && !(t.data[step] > 0.0f && isFinite(t.data[step]))) {
            throw NativeFailure(kConfidence, Code::kBadArgument,
                                "temperature[" + std::to_string(step) + "] must be finite and > 0");
        }
        if (b && !isFinite(b.data[step])) {
            throw NativeFailure(kConfidence, Code::kBadArgument, "bias[" + std::to_string(step) + "] must be finite");
        }
        if (t) inverse[step] = divRn(1.0f, t.data[step]);
        if (b) offset[step] = b.data[step];
    }
    std::vector<float> out(static_cast<size_t>(requests * steps));
    {
        nb::gil_scoped_release const release;
        HostTeam const team(kernels(), nullptr);
        for (int64_t request = 0; request < requests; ++request) {
            int64_t const* const row = drafts.data + request * steps;
            for (int64_t step = 0; step < steps; ++step) {
                int64_t const previous = step == 0 ? anchor.data[request] : row[step - 1];
                size_t const k = static_cast<size_t>(step);
                bool const drafted = row[step] >= 0 && previous >= 0;
                out[static_cast<size_t>(request * steps) + k] =
                    drafted ? confidenceOf(team, heads.confidence, h.data + (request * gamma + step) * d, d,
                                           static_cast<int>(previous), inverse[k], offset[k])
                            : 0.0f;
            }
        }
    }
    return toNumpy(std::move(out), {static_cast<size_t>(requests), static_cast<size_t>(steps)});
}

nb::object draftMasses(Draft const& draft, int64_t request, int64_t step) {
    checkRange("Draft.masses", "request", &request, 1, 0, draft.num_requests);
    checkRange("Draft.masses", "step", &step, 1, 0, draft.num_steps);
    std::vector<uint64_t> masses(static_cast<size_t>(draft.vocab));
    Proposal const q = draft.proposal(static_cast<int>(request), static_cast<int>(step));
    if (q.row) {
        for (int entry = 0; entry < q.size; ++entry) {
            masses[static_cast<size_t>(q.ids ? q.ids[entry] : entry)] = lawMass(q.law, q.row[entry]);
        }
    } else {
        int32_t const token = draft.tokens[static_cast<size_t>(request * draft.num_steps + step)];
        if (token >= 0) masses[static_cast<size_t>(token)] = uint64_t{1} << kMassBits;
    }
    return toNumpy(std::move(masses), {static_cast<size_t>(draft.vocab)});
}

}  // namespace

void registerDraft(nb::module_& m) {
    nb::class_<Draft>(m, "Draft")
        .def_prop_ro("tokens",
                     [](Draft const& self) {
                         std::vector<int64_t> tokens(self.tokens.begin(), self.tokens.end());
                         return toNumpy(std::move(tokens), {static_cast<size_t>(self.num_requests),
                                                            static_cast<size_t>(self.num_steps)});
                     })
        .def_prop_ro("status",
                     [](Draft const& self) {
                         std::vector<int64_t> status(self.status.begin(), self.status.end());
                         return toNumpy(std::move(status), {static_cast<size_t>(self.num_requests)});
                     })
        .def_prop_ro("num_requests", [](Draft const& self) { return self.num_requests; })
        .def_prop_ro("num_steps", [](Draft const& self) { return self.num_steps; })
        .def("masses", &draftMasses, nb::arg("request"), nb::arg("step"));
    m.def("draft_chain", &draftChain, nb::arg("heads"), nb::arg("base_logits").none(), nb::arg("anchors").none(),
          nb::arg("positions").none(), nb::arg("sampling"), nb::kw_only(), nb::arg("hidden") = nb::none(),
          nb::arg("acceptance") = "rejection", nb::arg("num_candidates") = 0, nb::arg("num_steps") = 0);
    m.def("confidence", &confidenceOfBlock, nb::arg("heads"), nb::arg("hidden").none(), nb::arg("anchors").none(),
          nb::arg("draft_tokens").none(), nb::kw_only(), nb::arg("temperature") = nb::none(),
          nb::arg("bias") = nb::none());
}

}  // namespace dspark::python
