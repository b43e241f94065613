//! schedule_prefixes, verify_budget and pack_tokens.

#include "dspark/schedule.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "dspark/pack.h"
#include "types.h"

namespace dspark::python {

namespace {

constexpr char const* kSchedule = "schedule_prefixes";
constexpr char const* kBudget = "verify_budget";
constexpr char const* kPack = "pack_tokens";
constexpr int64_t kMaxRows = 1 << 24;

struct Schedule {
    std::vector<int64_t> verify_len;
    uint32_t warnings;
    int64_t num_candidates;
};

nb::tuple warningNames(uint32_t warnings) {
    constexpr std::pair<ScheduleWarning, char const*> names[] = {{kMissingCostTable, "missing_cost_table"},
                                                                 {kBadCostTable, "bad_cost_table"},
                                                                 {kFlatCostTable, "flat_cost_table"},
                                                                 {kNanConfidence, "nan_confidence"},
                                                                 {kConfidenceOutOfRange, "confidence_out_of_range"}};
    nb::list list;
    for (auto const& [bit, name] : names) {
        if (warnings & bit) list.append(name);
    }
    return nb::tuple(list);
}

[[noreturn]] void fail(char const* op, Code code, std::string const& message) { throw NativeFailure(op, code, message); }

//! Arguments that schedule_prefixes and verify_budget share, checked; owns what ScheduleInput points to.
struct Arguments {
    View<float> confidence, table;
    std::vector<int32_t> caps;
    std::vector<uint32_t> storage;
    ScheduleInput in{};
    ScheduleWorkspace ws{};

    void takeCaps(char const* op, nb::object const& object) {
        if (object.is_none()) return;
        View<int64_t> const array = view<int64_t>(op, "caps", object, {{"R", in.num_requests}});
        checkRange(op, "caps", array.data, in.num_requests, 0, int64_t{1} << 31);
        for (int64_t i = 0; i < in.num_requests; ++i) {
            caps.push_back(static_cast<int32_t>(minOf<int64_t>(array.data[i], in.draft_stride)));
        }
        in.caps = caps.data();
    }

    void takeBudget(char const* op, std::optional<int64_t> const& token_budget) {
        if (token_budget && *token_budget < 0) fail(op, Code::kBadArgument, "token_budget must be >= 0");
        in.token_budget = token_budget ? *token_budget : -1;
    }

    void takeCost(char const* op, nb::object const& step_time_us, double load_scale, int64_t extra_tokens,
                  double fixed_time_us) {
        if (!(load_scale >= 0.0 && load_scale < 1e30)) fail(op, Code::kBadArgument, "load_scale must be finite and >= 0");
        if (!(fixed_time_us >= 0.0 && fixed_time_us < 1e30)) {
            fail(op, Code::kBadArgument, "fixed_time_us must be finite and >= 0");
        }
        checkRange(op, "extra_tokens", &extra_tokens, 1, 0, int64_t{1} << 31);
        in.cost = {nullptr, in.num_requests + extra_tokens, load_scale, fixed_time_us};
        table = optionalView<float>(op, "step_time_us", step_time_us, {{"B", -1}});
        if (!table) return;
        int64_t const needed = in.cost.base_tokens + admissible(SerialTeam{}, in) + 1;
        if (table.size(0) < needed) {
            failShape(op, "step_time_us", "at least " + std::to_string(needed) + " entries (R + extra_tokens + drafts + 1)",
                      std::to_string(table.size(0)));
        }
        in.cost.step_time_us = table.data;
    }

    void allocate() {
        size_t const cells = static_cast<size_t>(in.num_requests) * static_cast<size_t>(in.draft_stride);
        storage.resize(4 * cells);
        ws = {storage.data(), storage.data() + cells, storage.data() + 2 * cells, storage.data() + 3 * cells};
    }
};

ScheduleMode modeOf(std::string const& mode) {
    if (mode == "fixed") return ScheduleMode::kFixed;
    if (mode == "threshold") return ScheduleMode::kThreshold;
    if (mode == "early_stop") return ScheduleMode::kEarlyStop;
    if (mode == "stale_topk") return ScheduleMode::kStaleTopK;
    fail(kSchedule, Code::kBadArgument, "mode must be fixed, threshold, early_stop or stale_topk, got '" + mode + "'");
}

Schedule schedule(std::string const& mode, int64_t num_requests, int64_t max_draft_len, nb::object const& confidence,
                  nb::object const& caps, std::optional<int64_t> draft_len, std::optional<double> threshold,
                  nb::object const& step_time_us, std::optional<int64_t> budget, std::optional<int64_t> token_budget,
                  double load_scale, int64_t extra_tokens, double fixed_time_us) {
    Arguments args;
    ScheduleInput& in = args.in;
    in.mode = modeOf(mode);
    checkRange(kSchedule, "num_requests", &num_requests, 1, 0, kMaxRequests + 1);
    checkRange(kSchedule, "max_draft_len", &max_draft_len, 1, 1, kMaxDraftLen + 1);
    in.num_requests = static_cast<int32_t>(num_requests);
    in.draft_stride = static_cast<int32_t>(max_draft_len);
    args.takeCaps(kSchedule, caps);
    args.takeBudget(kSchedule, token_budget);
    args.takeCost(kSchedule, step_time_us, load_scale, extra_tokens, fixed_time_us);
    args.confidence = optionalView<float>(kSchedule, "confidence", confidence,
                                          {{"R", num_requests}, {"gamma", max_draft_len}});
    in.confidence = args.confidence.data;
    if (in.mode != ScheduleMode::kFixed && !in.confidence) fail(kSchedule, Code::kMissing, "confidence is missing for mode " + mode);
    if (in.mode == ScheduleMode::kFixed) {
        if (!draft_len) fail(kSchedule, Code::kMissing, "draft_len is missing for mode fixed");
        checkRange(kSchedule, "draft_len", &*draft_len, 1, 0, max_draft_len + 1);
        in.draft_len = static_cast<int32_t>(*draft_len);
    }
    if (in.mode == ScheduleMode::kThreshold) {
        if (!threshold) fail(kSchedule, Code::kMissing, "threshold is missing for mode threshold");
        if (!(*threshold >= 0.0 && *threshold <= 1.0)) fail(kSchedule, Code::kBadArgument, "threshold must be in [0, 1]");
        in.threshold = *threshold;
    }
    if (in.mode == ScheduleMode::kStaleTopK) {
        if (!budget) fail(kSchedule, Code::kMissing, "budget is missing for mode stale_topk (see verify_budget)");
        if (*budget < 0) fail(kSchedule, Code::kBadArgument, "budget must be >= 0");
        in.budget = *budget;
    }
    nb::gil_scoped_release const release;
    if (in.mode != ScheduleMode::kFixed) args.allocate();
    std::vector<int32_t> verify_len(static_cast<size_t>(num_requests));
    ScheduleOutput out = {verify_len.data(), 0, 0};
    schedulePrefixes(SerialTeam{}, in, args.ws, &out);
    return {{verify_len.begin(), verify_len.end()}, out.warnings, out.num_candidates};
}

nb::tuple budgetOf(nb::object const& confidence, nb::object const& step_time_us, nb::object const& caps,
                   std::optional<int64_t> token_budget, double load_scale, int64_t extra_tokens, double fixed_time_us) {
    Arguments args;
    ScheduleInput& in = args.in;
    args.confidence = view<float>(kBudget, "confidence", confidence, {{"R", -1}, {"gamma", -1}});
    int64_t const requests = args.confidence.size(0), gamma = args.confidence.size(1);
    if (requests > kMaxRequests || gamma < 1 || gamma > kMaxDraftLen) {
        failShape(kBudget, "confidence", "[R <= 2**20, gamma in 1..64] float32",
                  "[" + std::to_string(requests) + ", " + std::to_string(gamma) + "]");
    }
    in.mode = ScheduleMode::kStaleTopK;
    in.num_requests = static_cast<int32_t>(requests);
    in.draft_stride = static_cast<int32_t>(gamma);
    in.confidence = args.confidence.data;
    args.takeCaps(kBudget, caps);
    args.takeBudget(kBudget, token_budget);
    args.takeCost(kBudget, step_time_us, load_scale, extra_tokens, fixed_time_us);
    uint32_t warnings = 0;
    int64_t budget = 0;
    {
        nb::gil_scoped_release const release;
        args.allocate();
        budget = verifyBudget(SerialTeam{}, in, args.ws, &warnings);
    }
    return nb::make_tuple(budget, warningNames(warnings));
}

struct PackedTokens {
    std::vector<int64_t> cu_tokens, token_ids, token_request, token_position;
};

PackedTokens pack(nb::object const& anchors, nb::object const& draft_tokens, nb::object const& verify_len,
                  nb::object const& positions, int64_t pad_to) {
    View<int64_t> const anchor = view<int64_t>(kPack, "anchors", anchors, {{"R", -1}});
    int64_t const requests = anchor.size(0);
    View<int64_t> const drafts = view<int64_t>(kPack, "draft_tokens", draft_tokens, {{"R", requests}, {"gamma", -1}});
    View<int64_t> const lens = view<int64_t>(kPack, "verify_len", verify_len, {{"R", requests}});
    View<int64_t> const position = view<int64_t>(kPack, "positions", positions, {{"R", requests}});
    if (requests > kMaxRequests) fail(kPack, Code::kBadArgument, "more than 2**20 requests");
    if (drafts.size(1) > kMaxDraftLen) failShape(kPack, "draft_tokens", "at most 64 columns", std::to_string(drafts.size(1)));
    checkRange(kPack, "verify_len", lens.data, requests, 0, drafts.size(1) + 1);
    checkRange(kPack, "positions", position.data, requests, 0, kMaxPosition);
    int64_t total = requests;
    for (int64_t request = 0; request < requests; ++request) total += lens.data[request];
    int64_t const rows = pad_to == 0 ? total : pad_to;
    if (rows < total) {
        fail(kPack, Code::kBadArgument,
             "pad_to is " + std::to_string(pad_to) + " but the round has " + std::to_string(total) + " tokens");
    }
    if (rows > kMaxRows) fail(kPack, Code::kBadArgument, "more than 2**24 rows");
    nb::gil_scoped_release const release;
    size_t const size = static_cast<size_t>(rows);
    PackedTokens out = {std::vector<int64_t>(static_cast<size_t>(requests) + 1), std::vector<int64_t>(size),
                        std::vector<int64_t>(size), std::vector<int64_t>(size)};
    PackInput<int64_t> const in = {static_cast<int32_t>(requests), static_cast<int32_t>(drafts.size(1)), rows,
                                   anchor.data, drafts.data, lens.data, position.data};
    packTokens(SerialTeam{}, in,
               PackOutput<int64_t>{out.cu_tokens.data(), out.token_ids.data(), out.token_request.data(),
                                   out.token_position.data()});
    return out;
}

template <class Class, std::vector<int64_t> Class::*member>
nb::object column(Class const& self) {
    std::vector<int64_t> values = self.*member;
    size_t const count = values.size();
    return toNumpy(std::move(values), {count});
}

}  // namespace

void registerSchedule(nb::module_& m) {
    nb::class_<Schedule>(m, "Schedule")
        .def_prop_ro("verify_len", &column<Schedule, &Schedule::verify_len>)
        .def_prop_ro("warnings", [](Schedule const& self) { return warningNames(self.warnings); })
        .def_prop_ro("num_candidates", [](Schedule const& self) { return self.num_candidates; });
    nb::class_<PackedTokens>(m, "PackedTokens")
        .def_prop_ro("cu_tokens", &column<PackedTokens, &PackedTokens::cu_tokens>)
        .def_prop_ro("token_ids", &column<PackedTokens, &PackedTokens::token_ids>)
        .def_prop_ro("token_request", &column<PackedTokens, &PackedTokens::token_request>)
        .def_prop_ro("token_position", &column<PackedTokens, &PackedTokens::token_position>);
    m.def("schedule_prefixes", &schedule, nb::arg("mode"), nb::kw_only(), nb::arg("num_requests"),
          nb::arg("max_draft_len"), nb::arg("confidence") = nb::none(), nb::arg("caps") = nb::none(),
          nb::arg("draft_len") = nb::none(), nb::arg("threshold") = nb::none(), nb::arg("step_time_us") = nb::none(),
          nb::arg("budget") = nb::none(), nb::arg("token_budget") = nb::none(), nb::arg("load_scale") = 1.0,
          nb::arg("extra_tokens") = 0, nb::arg("fixed_time_us") = 0.0);
    m.def("verify_budget", &budgetOf, nb::arg("confidence").none(), nb::kw_only(), nb::arg("step_time_us").none(),
          nb::arg("caps") = nb::none(), nb::arg("token_budget") = nb::none(), nb::arg("load_scale") = 1.0,
          nb::arg("extra_tokens") = 0, nb::arg("fixed_time_us") = 0.0);
    m.def("pack_tokens", &pack, nb::arg("anchors").none(), nb::arg("draft_tokens").none(),
          nb::arg("verify_len").none(), nb::arg("positions").none(), nb::kw_only(), nb::arg("pad_to") = 0);
}

}  // namespace dspark::python
