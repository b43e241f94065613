//! accept_ragged.

#include <nanobind/stl/string.h>

#include "types.h"

namespace dspark::python {

namespace {

constexpr char const* kAccept = "accept_ragged";

struct Accepted {
    size_t num_requests, width;
    std::vector<int64_t> tokens, emitted_len, accepted_len, status;
    std::vector<float> logprobs;
    bool has_logprobs;
};

struct Rows {
    float const* first;
    int64_t vocab;
    float const* operator()(int step) const { return first + step * vocab; }
};

struct Proposals {
    Draft const* draft;
    int row;
    Proposal operator()(int step) const {
        return draft ? draft->proposal(row, step) : Proposal{nullptr, nullptr, 0, 0, {}, 0};
    }
};

//! Natural log-probability at temperature 1 from the integer masses.
float logProbability(HostTeam const& team, float const* row, int vocab, int token, uint64_t* tile_mass) {
    RowTop const top = topOfKey(rowTopKey(team, row, 0, vocab));
    RowLaw const law = unfilteredLaw(top.max, 1.0f);
    uint64_t const total = tileMasses(team, rowMass(row, law), vocab, tile_mass);
    double const log_total = std::log(static_cast<double>(total)) - kMassBits * 0.6931471805599453;
    return static_cast<float>(static_cast<double>(row[token]) - static_cast<double>(top.max) - log_total);
}

//! Everything accept_ragged was given, checked.
struct Arguments {
    View<float> logits;
    View<int64_t> lens, positions, rows, tokens;
    Draft const* draft;
    Acceptance mode;
    int64_t requests, vocab, draft_width;
    std::vector<int64_t> first_row;  // of each request

    Arguments(nb::object const& target_logits, nb::object const& verify_len, nb::object const& anchor_positions,
              Sampling const& sampling, nb::object const& draft_object, nb::object const& draft_rows,
              nb::object const& draft_tokens, std::string const& acceptance) {
        logits = view<float>(kAccept, "target_logits", target_logits, {{"T", -1}, {"V", -1}});
        lens = view<int64_t>(kAccept, "verify_len", verify_len, {{"R", -1}});
        requests = lens.size(0);
        vocab = logits.size(1);
        positions = view<int64_t>(kAccept, "positions", anchor_positions, {{"R", requests}});
        if (static_cast<int64_t>(sampling.params.size()) != requests) {
            failShape(kAccept, "sampling", std::to_string(requests) + " requests", std::to_string(sampling.params.size()));
        }
        if (vocab < 1 || vocab > kMaxVocab) failShape(kAccept, "target_logits", "V in 1..2**20", std::to_string(vocab));
        checkRange(kAccept, "positions", positions.data, requests, 0, kMaxPosition);
        mode = acceptanceOf(kAccept, acceptance);
        takeDraft(draft_object, draft_rows, draft_tokens);
        checkRange(kAccept, "verify_len", lens.data, requests, 0, draft_width + 1);
        int64_t total = 0;
        for (int64_t request = 0; request < requests; ++request) {
            first_row.push_back(total);
            total += 1 + lens.data[request];
        }
        if (logits.size(0) != total) {
            failShape(kAccept, "target_logits", "[sum(1 + verify_len)=" + std::to_string(total) + ", V] float32",
                      "[" + std::to_string(logits.size(0)) + ", " + std::to_string(vocab) + "]");
        }
        checkDrafts();
    }

    void takeDraft(nb::object const& draft_object, nb::object const& draft_rows, nb::object const& draft_tokens) {
        draft = nullptr;
        draft_width = 0;
        if (!draft_object.is_none() && !draft_tokens.is_none()) {
            throw NativeFailure(kAccept, Code::kMismatch, "give draft or draft_tokens, not both");
        }
        if (!draft_tokens.is_none()) {
            tokens = view<int64_t>(kAccept, "draft_tokens", draft_tokens, {{"R", requests}, {"n", -1}});
            draft_width = tokens.size(1);
        }
        if (!draft_object.is_none()) {
            if (!nb::try_cast(draft_object, draft)) {
                failShape(kAccept, "draft", "a Draft", nb::type_name(draft_object.type()).c_str());
            }
            draft_width = draft->num_steps;
            if (draft->vocab != vocab) {
                failShape(kAccept, "target_logits", "V=" + std::to_string(draft->vocab) + " as the draft's",
                          std::to_string(vocab));
            }
            if (draft->mode != mode) {
                throw NativeFailure(kAccept, Code::kMismatch, "the draft was made for another acceptance mode");
            }
        }
        rows = optionalView<int64_t>(kAccept, "draft_rows", draft_rows, {{"R", requests}});
        if (!draft && rows) throw NativeFailure(kAccept, Code::kMismatch, "draft_rows needs draft");
        if (rows) checkRange(kAccept, "draft_rows", rows.data, requests, -1, draft->num_requests);
        if (draft && !rows && draft->num_requests != requests) {
            failShape(kAccept, "draft", std::to_string(requests) + " requests (or pass draft_rows)",
                      std::to_string(draft->num_requests));
        }
        if (draft_width > kMaxDraftLen) failShape(kAccept, "draft_tokens", "at most 64 columns", std::to_string(draft_width));
    }

    int draftRow(int64_t request) const {
        return static_cast<int>(rows ? rows.data[request] : request);
    }

    //! Draft token of a request, unchecked.
    int64_t token(int64_t request, int64_t step) const {
        if (tokens) return tokens.data[request * draft_width + step];
        return draft->tokens[static_cast<size_t>(draftRow(request) * draft_width + step)];
    }

    void checkDrafts() const {
        for (int64_t request = 0; request < requests; ++request) {
            if (lens.data[request] > 0 && draft && draftRow(request) < 0) {
                throw NativeFailure(kAccept, Code::kMismatch,
                                    "request " + std::to_string(request) + " has verify_len > 0 but no row in draft");
            }
            for (int64_t step = 0; step < lens.data[request]; ++step) {
                int64_t const id = token(request, step);
                if (id >= 0 && id < vocab) continue;
                throw NativeFailure(kAccept, Code::kBadArgument,
                                    "draft token " + std::to_string(step) + " of request " + std::to_string(request) +
                                        " is " + std::to_string(id) + ", expected 0 <= id < " + std::to_string(vocab));
            }
        }
    }
};

Accepted* accept(nb::object const& target_logits, nb::object const& verify_len,
                                 nb::object const& positions, Sampling const& sampling, nb::object const& draft,
                                 nb::object const& draft_rows, nb::object const& draft_tokens,
                                 std::string const& acceptance, bool logprobs) {
    Arguments const args(target_logits, verify_len, positions, sampling, draft, draft_rows, draft_tokens, acceptance);
    nb::gil_scoped_release const release;
    size_t const requests = static_cast<size_t>(args.requests), width = static_cast<size_t>(args.draft_width) + 1;
    auto result = std::make_unique<Accepted>();
    result->num_requests = requests;
    result->width = width;
    result->has_logprobs = logprobs;
    result->tokens.assign(requests * width, -1);
    result->emitted_len.resize(requests);
    result->accepted_len.resize(requests);
    result->status.resize(requests);
    if (logprobs) result->logprobs.assign(requests * width, bitsFloat(0x7fc00000u));
    int const vocab = static_cast<int>(args.vocab);
    static thread_local std::vector<uint64_t> tile_mass, mass;
    tile_mass.resize(static_cast<size_t>(numTiles(vocab)));
    mass.resize(static_cast<size_t>(vocab));
    HostTeam const team(kernels(), scratch());
    AcceptWorkspace const ws = {tile_mass.data(), mass.data()};
    int32_t drafts[kMaxDraftLen], out[kMaxDraftLen + 1];
    for (size_t request = 0; request < requests; ++request) {
        int64_t const id = static_cast<int64_t>(request);
        int const len = static_cast<int>(args.lens.data[request]);
        for (int step = 0; step < len; ++step) drafts[step] = static_cast<int32_t>(args.token(id, step));
        RequestParams params = sampling.params[request];
        params.position = static_cast<uint64_t>(args.positions.data[request]);
        Rows const rows = {args.logits.data + args.first_row[request] * args.vocab, args.vocab};
        Proposals const proposals = {args.draft, args.draftRow(id)};
        AcceptResult const outcome =
            acceptRequest(team, args.mode, params, vocab, len, drafts, rows, proposals, ws, out);
        result->status[request] = outcome.status;
        result->emitted_len[request] = outcome.emitted;
        result->accepted_len[request] = outcome.emitted > 0 ? outcome.emitted - 1 : 0;
        for (int step = 0; step < outcome.emitted; ++step) {
            size_t const at = request * width + static_cast<size_t>(step);
            result->tokens[at] = out[step];
            if (logprobs) result->logprobs[at] = logProbability(team, rows(step), vocab, out[step], tile_mass.data());
        }
    }
    return result.release();
}

template <std::vector<int64_t> Accepted::*member>
nb::object column(Accepted const& self) {
    std::vector<int64_t> values = self.*member;
    return toNumpy(std::move(values), {self.num_requests});
}

}  // namespace

void registerAccept(nb::module_& m) {
    nb::class_<Accepted>(m, "Accepted")
        .def_prop_ro("tokens",
                     [](Accepted const& self) {
                         std::vector<int64_t> tokens = self.tokens;
                         return toNumpy(std::move(tokens), {self.num_requests, self.width});
                     })
        .def_prop_ro("emitted_len", &column<&Accepted::emitted_len>)
        .def_prop_ro("accepted_len", &column<&Accepted::accepted_len>)
        .def_prop_ro("status", &column<&Accepted::status>)
        .def_prop_ro("logprobs", [](Accepted const& self) -> nb::object {
            if (!self.has_logprobs) return nb::none();
            std::vector<float> logprobs = self.logprobs;
            return toNumpy(std::move(logprobs), {self.num_requests, self.width});
        });
    m.def("accept_ragged", &accept, nb::arg("target_logits").none(), nb::arg("verify_len").none(),
          nb::arg("positions").none(), nb::arg("sampling"), nb::kw_only(), nb::arg("draft") = nb::none(),
          nb::arg("draft_rows") = nb::none(), nb::arg("draft_tokens") = nb::none(),
          nb::arg("acceptance") = "rejection", nb::arg("logprobs") = false);
}

}  // namespace dspark::python
