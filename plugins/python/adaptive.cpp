//! BlockStatistics and Standings: what mode adaptive keeps about requests.

#include <nanobind/stl/tuple.h>

#include "dspark/host/block_statistics.h"
#include "dspark/host/standings.h"
#include "types.h"

namespace dspark::python {

namespace {

using host::BlockStatistics;
using host::Standings;

constexpr char const* kBlocks = "BlockStatistics";
constexpr char const* kStandings = "Standings";

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

void addBlocks(BlockStatistics* self, nb::object const& rows, nb::object const& confidence,
               nb::object const& verify_len, nb::object const& accepted) {
    View<int64_t> const at = rowsOf(kBlocks, *self, rows);
    int64_t const count = at.size(0), gamma = self->gamma();
    View<float> const c = view<float>(kBlocks, "confidence", confidence, {{"R", count}, {"gamma", gamma}});
    View<int64_t> const lens = view<int64_t>(kBlocks, "verify_len", verify_len, {{"R", count}});
    View<int64_t> const kept = view<int64_t>(kBlocks, "accepted", accepted, {{"R", count}});
    checkRange(kBlocks, "verify_len", lens.data, count, 0, gamma + 1);
    checkRange(kBlocks, "accepted", kept.data, count, 0, gamma + 1);
    self->add(count, at.data, c.data, lens.data, kept.data);
}

std::tuple<nb::object, double, double> evaluateBatch(BlockStatistics* self, nb::object const& rows,
                                                     nb::object const& caps, nb::object const& verify_us,
                                                     double draft_us) {
    if (self->empty()) throw NativeFailure(kBlocks, Code::kMissing, "no block was added yet");
    View<int64_t> const at = rowsOf(kBlocks, *self, rows);
    int64_t const count = at.size(0);
    View<int64_t> const cap = view<int64_t>(kBlocks, "caps", caps, {{"R", count}});
    int64_t const entries = count * (self->gamma() + 1) + 1;
    View<float> const curve = view<float>(kBlocks, "verify_us", verify_us, {{"R * (gamma + 1) + 1", entries}});
    std::vector<double> worth(3 * static_cast<size_t>(count));
    double* const first = worth.data();
    host::BatchMeans const means = self->evaluate(at.data, cap.data, {count, curve.data, draft_us},
                                                  {first, first + count, first + 2 * count});
    return {toNumpy(std::move(worth), {3, static_cast<size_t>(count)}), means.gain, means.threshold};
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

std::tuple<nb::object, int64_t, bool, bool> judgeRound(Standings* self, nb::object const& rows, nb::object const& caps,
                                                       nb::object const& gains, nb::object const& blocks) {
    View<int64_t> const at = rowsOf(kStandings, *self, rows);
    int64_t const count = at.size(0);
    View<int64_t> const cap = view<int64_t>(kStandings, "caps", caps, {{"R", count}});
    View<double> const gain = view<double>(kStandings, "gains", gains, {{"R", count}});
    View<double> const known = view<double>(kStandings, "blocks", blocks, {{"R", count}});
    std::vector<int64_t> resting(static_cast<size_t>(count));
    host::RoundVerdict const verdict = self->judge({count, at.data, cap.data, gain.data, known.data}, resting.data());
    size_t const num_resting = static_cast<size_t>(verdict.num_resting);
    resting.resize(num_resting);
    return {toNumpy(std::move(resting), {num_resting}), verdict.num_judged, verdict.entered, verdict.fresh};
}

}  // namespace

void registerAdaptive(nb::module_& m) {
    // Both keep the GIL: a call takes microseconds, and it is what keeps threads off their arrays.
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
             nb::arg("accepted").none())
        .def("evaluate", &evaluateBatch, nb::arg("rows").none(), nb::arg("caps").none(), nb::arg("verify_us").none(),
             nb::arg("draft_us"))
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
        .def("judge", &judgeRound, nb::arg("rows").none(), nb::arg("caps").none(), nb::arg("gains").none(),
             nb::arg("blocks").none());
}

}  // namespace dspark::python
