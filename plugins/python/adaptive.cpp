//! BlockStatistics, Standings and CostDrift: what mode adaptive keeps, and decides about a round by it.

#include <nanobind/stl/tuple.h>

#include "dspark/host/adaptive_round.h"
#include "dspark/host/cost_drift.h"
#include "types.h"

namespace dspark::python {

namespace {

using host::BlockStatistics;
using host::CostDrift;
using host::Standings;

constexpr char const* kBlocks = "BlockStatistics";
constexpr char const* kStandings = "Standings";
constexpr char const* kDrift = "CostDrift";

struct Bounded {
    char const* name;
    double value, low, high;
};

void checkNumbers(char const* op, std::initializer_list<Bounded> numbers) {
    for (Bounded const& number : numbers) {
        if (number.value >= number.low && number.value <= number.high) continue;
        throw NativeFailure(op, Code::kBadArgument,
                            std::string(number.name) + " is " + std::to_string(number.value) + ", expected " +
                                std::to_string(number.low) + " to " + std::to_string(number.high));
    }
}

//! Rows of R requests, each reset before; -1 is allowed where `lowest` is.
template <class Rows>
View<int64_t> rowsOf(char const* op, Rows const& self, nb::object const& object, int64_t lowest = 0) {
    View<int64_t> rows = view<int64_t>(op, "rows", object, {{"R", -1}});
    checkRange(op, "rows", rows.data, rows.size(0), lowest, self.numRows());
    return rows;
}

template <class Rows>
void resetRow(char const* op, Rows* self, int64_t row) {
    checkRange(op, "row", &row, 1, 0, std::min(self->numRows() + 1, kMaxRequests));
    self->reset(row);
}

void makeBlocks(BlockStatistics* self, int64_t max_draft_len, nb::object const& thresholds, double memory,
                double pool_memory, double prior_blocks, double ratio_memory, double ratio_prior, double pool_drafts,
                double max_ratio, double hindsight_memory, double hindsight_prior, double hindsight_found) {
    checkRange(kBlocks, "max_draft_len", &max_draft_len, 1, 1, kMaxDraftLen + 1);
    View<float> const levels = view<float>(kBlocks, "thresholds", thresholds, {{"C", -1}});
    if (levels.size(0) < 1 || levels.size(0) > host::kMaxThresholds) {
        failShape(kBlocks, "thresholds", "C in 1..64", std::to_string(levels.size(0)));
    }
    constexpr double least = 1e-3, most = 1e6;
    for (int64_t c = 0; c < levels.size(0); ++c) {
        checkNumbers(kBlocks, {{"thresholds", static_cast<double>(levels.data[c]), 0.0, most}});
        if (c > 0 && levels.data[c] <= levels.data[c - 1]) {
            throw NativeFailure(kBlocks, Code::kBadArgument, "thresholds must ascend");
        }
    }
    checkNumbers(kBlocks, {{"memory", memory, 0.0, 1.0},
                           {"pool_memory", pool_memory, 0.0, 1.0},
                           {"prior_blocks", prior_blocks, least, most},
                           {"ratio_memory", ratio_memory, 0.0, 1.0},
                           {"ratio_prior", ratio_prior, least, most},
                           {"pool_drafts", pool_drafts, 0.0, most},
                           {"max_ratio", max_ratio, least, most},
                           {"hindsight_memory", hindsight_memory, 0.0, 1.0},
                           {"hindsight_prior", hindsight_prior, least, most},
                           {"hindsight_found", hindsight_found, 0.0, 1.0}});
    host::BlockRules const rules = {memory,      pool_memory, prior_blocks,     ratio_memory,    ratio_prior,
                                    pool_drafts, max_ratio,   hindsight_memory, hindsight_prior, hindsight_found};
    new (self) BlockStatistics(static_cast<int>(max_draft_len), {levels.data, levels.data + levels.size(0)}, rules);
}

int64_t addBlocks(BlockStatistics* self, nb::object const& rows, nb::object const& confidence,
                  nb::object const& verify_len, nb::object const& accepted, nb::object const& drafted) {
    View<int64_t> const at = rowsOf(kBlocks, *self, rows, -1);
    int64_t const count = at.size(0), gamma = self->gamma();
    View<float> const c = view<float>(kBlocks, "confidence", confidence, {{"R", count}, {"gamma", gamma}});
    View<int64_t> const lens = view<int64_t>(kBlocks, "verify_len", verify_len, {{"R", count}});
    View<int64_t> const kept = view<int64_t>(kBlocks, "accepted", accepted, {{"R", count}});
    checkRange(kBlocks, "verify_len", lens.data, count, 0, gamma + 1);
    View<bool> const with = optionalView<bool>(kBlocks, "drafted", drafted, {{"R", count}});
    checkRange(kBlocks, "accepted", kept.data, count, -1, gamma + 1);
    return self->add({count, at.data, with.data, c.data, lens.data, kept.data});
}

std::tuple<double, double> evaluateBatch(BlockStatistics* self, nb::object const& rows, nb::object const& caps,
                                         nb::object const& verify_us, double draft_us, double base, double marginal) {
    if (self->empty()) throw NativeFailure(kBlocks, Code::kMissing, "no block was added yet");
    View<int64_t> const at = rowsOf(kBlocks, *self, rows);
    int64_t const count = at.size(0);
    View<int64_t> const cap = view<int64_t>(kBlocks, "caps", caps, {{"R", count}});
    int64_t const entries = count * (self->gamma() + 1) + 1;
    View<float> const curve = view<float>(kBlocks, "verify_us", verify_us, {{"R * (gamma + 1) + 1", entries}});
    host::BatchCosts const costs = {count, curve.data, static_cast<float>(base), static_cast<float>(marginal), draft_us};
    host::BatchMeans const means = self->evaluate(at.data, cap.data, costs);
    return {means.gain, means.threshold};
}

nb::object worthOf(BlockStatistics const& self, nb::object const& rows) {
    View<int64_t> const at = rowsOf(kBlocks, self, rows);
    size_t const count = static_cast<size_t>(at.size(0));
    std::vector<double> values(3 * count);
    for (size_t i = 0; i < count; ++i) {
        host::Worth const& worth = self.worth(at.data[i]);
        values[i] = worth.gain;
        values[count + i] = worth.extra_tokens;
        values[2 * count + i] = worth.more_us;
    }
    return toNumpy(std::move(values), {3, count});
}

//! The requests of a round, checked.
struct Round {
    View<int64_t> rows, caps;

    template <class Rows>
    Round(char const* op, Rows const& self, nb::object const& row_numbers, nb::object const& most, int64_t lowest)
        : rows(rowsOf(op, self, row_numbers, lowest)), caps(view<int64_t>(op, "caps", most, {{"R", rows.size(0)}})) {
        if (rows.size(0) > kMaxRequests) throw NativeFailure(op, Code::kBadArgument, "more than 2**20 requests");
    }
    host::RoundRequests requests() const { return {rows.size(0), rows.data, caps.data}; }
};

nb::object chooseLengths(BlockStatistics const& self, nb::object const& rows, nb::object const& caps,
                         nb::object const& confidence, int64_t budget, double unknown, int64_t probed) {
    Round const round(kBlocks, self, rows, caps, -1);
    int64_t const count = round.rows.size(0);
    View<float> const c = view<float>(kBlocks, "confidence", confidence, {{"R", count}, {"gamma", self.gamma()}});
    checkRange(kBlocks, "caps", round.caps.data, count, 0, int64_t{1} << 31);
    if (budget < 0) throw NativeFailure(kBlocks, Code::kBadArgument, "budget must be >= 0");
    std::vector<int64_t> lengths(static_cast<size_t>(count));
    host::verifyLens(round.requests(), self, {c.data, static_cast<float>(unknown), budget, probed}, lengths.data());
    return toNumpy(std::move(lengths), {static_cast<size_t>(count)});
}

template <class T, class Function>
nb::object byRow(View<int64_t> const& rows, Function const& function) {
    size_t const count = static_cast<size_t>(rows.size(0));
    std::vector<T> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = function(rows.data[i]);
    return toNumpy(std::move(values), {count});
}

void makeStandings(Standings* self, double enter, double leave, double heavy_loss, double smoothing,
                   int64_t patience, int64_t heavy_weight) {
    checkNumbers(kStandings, {{"enter", enter, -1.0, 1e6},
                              {"leave", leave, -1.0, 1e6},
                              {"heavy_loss", heavy_loss, -1.0, 1e6},
                              {"smoothing", smoothing, 0.0, 1.0}});
    checkRange(kStandings, "patience", &patience, 1, 1, int64_t{1} << 31);
    checkRange(kStandings, "heavy_weight", &heavy_weight, 1, 1, int64_t{1} << 31);
    new (self) Standings({enter, leave, heavy_loss, smoothing, patience, heavy_weight});
}

struct Verdict {
    host::RoundVerdict found;
    std::vector<int64_t> caps;
};

Verdict judgeBatch(Standings* self, nb::object const& rows, nb::object const& caps, BlockStatistics const& blocks) {
    Round const round(kStandings, *self, rows, caps, 0);
    int64_t const count = round.rows.size(0);
    checkRange(kStandings, "rows", round.rows.data, count, 0, blocks.numRows());
    for (int64_t i = 0; i < count; ++i) {
        if (round.caps.data[i] <= 0 || blocks.evaluated(round.rows.data[i])) continue;
        throw NativeFailure(kStandings, Code::kMissing, "row " + std::to_string(round.rows.data[i]) +
                                                            " was not evaluated since it was reset");
    }
    Verdict verdict = {{}, std::vector<int64_t>(static_cast<size_t>(count))};
    verdict.found = host::judgeRound(round.requests(), blocks, self, verdict.caps.data());
    return verdict;
}

void makeDrift(CostDrift* self, double noise, double common, double ratio, double doubt, double shape, double memory,
               double flat, double surprise, double outlier, double base_bound, double marginal_bound,
               double draft_bound) {
    constexpr double least = 1e-3, most = 1e6;
    checkNumbers(kDrift, {{"noise", noise, least, 1.0},
                          {"common", common, 0.0, 1.0},
                          {"ratio", ratio, 0.0, 1.0},
                          {"doubt", doubt, least, most},
                          {"shape", shape, 0.0, 1.0},
                          {"memory", memory, 0.0, 1.0},
                          {"flat", flat, least, 1.0},
                          {"surprise", surprise, least, most},
                          {"outlier", outlier, 1.0, most},
                          {"base_bound", base_bound, 1.0, most},
                          {"marginal_bound", marginal_bound, 1.0, most},
                          {"draft_bound", draft_bound, 1.0, most}});
    new (self) CostDrift({noise, common, ratio, doubt, shape, memory, flat, surprise, outlier, base_bound,
                          marginal_bound, draft_bound});
}

//! Table times that others are divided by.
void checkMicros(std::initializer_list<std::pair<char const*, double>> times) {
    for (auto const& [name, micros] : times) checkNumbers(kDrift, {{name, micros, 1e-9, 1e18}});
}

template <class Number>
auto verdictField(Number host::RoundVerdict::*field) {
    return [field](Verdict const& self) { return self.found.*field; };
}

}  // namespace

void registerAdaptive(nb::module_& m) {
    // All keep the GIL: a call takes microseconds, and it is what keeps threads off their arrays.
    nb::class_<BlockStatistics>(m, "BlockStatistics")
        .def("__init__", &makeBlocks, nb::arg("max_draft_len"), nb::arg("thresholds").none(), nb::kw_only(),
             nb::arg("memory"), nb::arg("pool_memory"), nb::arg("prior_blocks"), nb::arg("ratio_memory"),
             nb::arg("ratio_prior"), nb::arg("pool_drafts"), nb::arg("max_ratio"), nb::arg("hindsight_memory"),
             nb::arg("hindsight_prior"), nb::arg("hindsight_found"))
        .def("__deepcopy__", [](BlockStatistics const& self, nb::object const&) { return BlockStatistics(self); })
        .def_prop_ro("empty", &BlockStatistics::empty)
        .def_prop_ro("accepted_ratio", &BlockStatistics::acceptedRatio)
        .def("reset", [](BlockStatistics* self, int64_t row) { resetRow(kBlocks, self, row); }, nb::arg("row"))
        .def("add", &addBlocks, nb::arg("rows").none(), nb::arg("confidence").none(), nb::arg("verify_len").none(),
             nb::arg("accepted").none(), nb::arg("drafted") = nb::none())
        .def("evaluate", &evaluateBatch, nb::arg("rows").none(), nb::arg("caps").none(), nb::arg("verify_us").none(),
             nb::arg("draft_us"), nb::arg("base") = 1.0, nb::arg("marginal") = 1.0)
        .def("worth", &worthOf, nb::arg("rows").none())
        .def("verify_lens", &chooseLengths, nb::arg("rows").none(), nb::arg("caps").none(),
             nb::arg("confidence").none(), nb::kw_only(), nb::arg("budget"), nb::arg("unknown"), nb::arg("probed") = -1)
        .def(
            "thresholds",
            [](BlockStatistics const& self, nb::object const& rows, float unknown) {
                return byRow<float>(rowsOf(kBlocks, self, rows, -1), [&](int64_t row) {
                    return row < 0 ? unknown : self.threshold(row, unknown);
                });
            },
            nb::arg("rows").none(), nb::arg("unknown"))
        .def(
            "blocks",
            [](BlockStatistics const& self, nb::object const& rows) {
                return byRow<double>(rowsOf(kBlocks, self, rows), [&](int64_t row) { return self.blocks(row); });
            },
            nb::arg("rows").none());

    nb::class_<CostDrift>(m, "CostDrift")
        .def("__init__", &makeDrift, nb::kw_only(), nb::arg("noise"), nb::arg("common"), nb::arg("ratio"),
             nb::arg("doubt"), nb::arg("shape"), nb::arg("memory"), nb::arg("flat"), nb::arg("surprise"),
             nb::arg("outlier"), nb::arg("base_bound"), nb::arg("marginal_bound"), nb::arg("draft_bound"))
        .def("__deepcopy__", [](CostDrift const& self, nb::object const&) { return CostDrift(self); })
        .def_prop_ro("base", [](CostDrift const& self) { return self.correction().base; })
        .def_prop_ro("marginal", [](CostDrift const& self) { return self.correction().marginal; })
        .def_prop_ro("draft", [](CostDrift const& self) { return self.correction().draft; })
        .def_prop_ro("rounds_unmeasured", &CostDrift::roundsUnmeasured)
        .def(
            "observe_verify",
            [](CostDrift* self, double first_us, double more_us, double measured_us) {
                checkMicros({{"first_us", first_us}});
                return self->observeVerify(first_us, more_us, measured_us);
            },
            nb::arg("first_us"), nb::arg("more_us"), nb::arg("measured_us"))
        .def(
            "observe_draft",
            [](CostDrift* self, double draft_us, double measured_us) {
                checkMicros({{"draft_us", draft_us}});
                return self->observeDraft(draft_us, measured_us);
            },
            nb::arg("draft_us"), nb::arg("measured_us"))
        .def(
            "observe_round",
            [](CostDrift* self, double first_us, double more_us, double draft_us, double measured_us) {
                checkMicros({{"first_us", first_us}, {"draft_us", draft_us}});
                return self->observeRound(first_us, more_us, draft_us, measured_us);
            },
            nb::arg("first_us"), nb::arg("more_us"), nb::arg("draft_us"), nb::arg("measured_us"))
        .def("observe_untimed", &CostDrift::observeUntimed);

    nb::class_<Verdict>(m, "RoundVerdict")
        .def_prop_ro("num_judged", verdictField(&host::RoundVerdict::num_judged))
        .def_prop_ro("num_resting", verdictField(&host::RoundVerdict::num_resting))
        .def_prop_ro("entered", verdictField(&host::RoundVerdict::entered))
        .def_prop_ro("fresh", verdictField(&host::RoundVerdict::fresh))
        .def_prop_ro("span", verdictField(&host::RoundVerdict::span))
        .def_prop_ro("extra_tokens", verdictField(&host::RoundVerdict::extra_tokens))
        .def_prop_ro("more_us", verdictField(&host::RoundVerdict::more_us))
        .def_prop_ro("caps", [](Verdict const& self) { return toNumpy(self.caps, {self.caps.size()}); });

    nb::class_<Standings>(m, "Standings")
        .def("__init__", &makeStandings, nb::kw_only(), nb::arg("enter"), nb::arg("leave"),
             nb::arg("heavy_loss"), nb::arg("smoothing"), nb::arg("patience"), nb::arg("heavy_weight"))
        .def("__deepcopy__", [](Standings const& self, nb::object const&) { return Standings(self); })
        .def("reset", [](Standings* self, int64_t row) { resetRow(kStandings, self, row); }, nb::arg("row"))
        .def(
            "meet",
            [](Standings* self, nb::object const& rows) {
                View<int64_t> const at = rowsOf(kStandings, *self, rows);
                for (int64_t i = 0; i < at.size(0); ++i) self->meet(at.data[i]);
            },
            nb::arg("rows").none())
        .def("judge", &judgeBatch, nb::arg("rows").none(), nb::arg("caps").none(), nb::arg("blocks"));
}

}  // namespace dspark::python
