//! RoundCounts: what became of drafts. SimulatedRows: the decoding requests of a simulated server.

#include "dspark/host/round_counts.h"
#include "dspark/host/simulated_rows.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "dspark/draft.h"
#include "types.h"

namespace dspark::python {

namespace {

constexpr char const* kCounts = "RoundCounts";
constexpr char const* kRows = "SimulatedRows";

void makeCounts(host::RoundCounts* self, int64_t draft_len, int64_t most_recent) {
    checkRange(kCounts, "draft_len", &draft_len, 1, 0, kMaxDraftLen + 1);
    checkRange(kCounts, "most_recent", &most_recent, 1, 1, kMaxRequests);
    new (self) host::RoundCounts(static_cast<int>(draft_len), static_cast<size_t>(most_recent));
}

void addRound(host::RoundCounts* self, nb::object const& caps, nb::object const& drafted, nb::object const& verify_len,
              nb::object const& accepted, int64_t budget) {
    View<int64_t> const cap = view<int64_t>(kCounts, "caps", caps, {{"R", -1}});
    int64_t const count = cap.size(0), above = self->draftLen() + 1;
    View<bool> const who = view<bool>(kCounts, "drafted", drafted, {{"R", count}});
    View<int64_t> const lens = view<int64_t>(kCounts, "verify_len", verify_len, {{"R", count}});
    View<int64_t> const kept = view<int64_t>(kCounts, "accepted", accepted, {{"R", count}});
    checkRange(kCounts, "caps", cap.data, count, 0, above);
    checkRange(kCounts, "verify_len", lens.data, count, 0, above);
    checkRange(kCounts, "accepted", kept.data, count, -kMaxDraftLen, above);
    self->add({count, cap.data, who.data, lens.data, kept.data, budget});
}

std::vector<std::tuple<int64_t, int64_t, int64_t>> takeRecent(host::RoundCounts* self) {
    std::vector<std::tuple<int64_t, int64_t, int64_t>> rounds;
    for (host::RoundTotals const& round : self->takeRecent()) {
        rounds.emplace_back(round.admitted, round.verified, round.made);
    }
    return rounds;
}

//! The rows, and the arrays they read.
struct SimulatedRows {
    View<int64_t> accepted, following;
    host::SimulatedRows rows;
};

//! A row may stand on a block from which it can go on whatever is accepted.
void checkBlock(char const* name, host::RecordedBlocks const& blocks, int64_t block) {
    checkRange(kRows, name, &block, 1, 0, blocks.count);
    int64_t const last = block + (blocks.by_token ? blocks.accepted[block] : 0);
    checkRange(kRows, name, &last, 1, 0, blocks.count);
}

void makeRows(SimulatedRows* self, nb::object const& accepted, nb::object const& following, bool by_token,
              int64_t most_waiting) {
    View<int64_t> kept = view<int64_t>(kRows, "accepted", accepted, {{"N", -1}});
    View<int64_t> next = view<int64_t>(kRows, "following", following, {{"N", kept.size(0)}});
    host::RecordedBlocks const blocks = {kept.size(0), kept.data, next.data, by_token};
    checkRange(kRows, "accepted", kept.data, blocks.count, 0, kMaxDraftLen + 1);
    for (int64_t block = 0; block < blocks.count; ++block) checkBlock("following", blocks, next.data[block]);
    checkRange(kRows, "most_waiting", &most_waiting, 1, 1, kMaxPosition);
    new (self) SimulatedRows{std::move(kept), std::move(next), host::SimulatedRows(blocks, most_waiting)};
}

void checkRow(SimulatedRows const& self, int64_t row) { checkRange(kRows, "row", &row, 1, 0, self.rows.size()); }

void join(SimulatedRows* self, int64_t block, int64_t left, int64_t waiting) {
    checkBlock("block", self->rows.blocks(), block);
    checkRange(kRows, "left", &left, 1, 1, kMaxPosition);
    checkRange(kRows, "waiting", &waiting, 1, 0, kMaxPosition);
    self->rows.join(block, left, waiting);
}

std::tuple<int64_t, int64_t, int64_t> leave(SimulatedRows* self, int64_t row) {
    checkRow(*self, row);
    host::RowTally const tally = self->rows.leave(row);
    return {tally.rounds, tally.emitted, tally.verified};
}

nb::object caps(SimulatedRows const& self, int64_t most) {
    checkRange(kRows, "most", &most, 1, 0, kMaxDraftLen + 1);
    size_t const count = static_cast<size_t>(self.rows.size());
    std::vector<int64_t> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = self.rows.cap(static_cast<int64_t>(i), most);
    return toNumpy(std::move(values), {count});
}

nb::object confidence(SimulatedRows const& self, nb::object const& of_blocks) {
    View<float> const table = view<float>(kRows, "of_blocks", of_blocks, {{"N", self.rows.blocks().count}, {"gamma", -1}});
    int64_t const count = self.rows.size(), gamma = table.size(1);
    std::vector<float> values(static_cast<size_t>(count * gamma));
    for (int64_t row = 0; row < count; ++row) {
        std::copy_n(table.data + self.rows.block(row) * gamma, gamma, values.data() + row * gamma);
    }
    return toNumpy(std::move(values), {static_cast<size_t>(count), static_cast<size_t>(gamma)});
}

std::tuple<nb::object, int64_t, int64_t, std::vector<int64_t>, int64_t> advance(SimulatedRows* self,
                                                                                nb::object const& verify_len,
                                                                                nb::object const& drafting) {
    int64_t const count = self->rows.size();
    View<int64_t> const lens = optionalView<int64_t>(kRows, "verify_len", verify_len, {{"R", count}});
    if (lens) checkRange(kRows, "verify_len", lens.data, count, 0, kMaxDraftLen + 1);
    View<int64_t> const drafts = optionalView<int64_t>(kRows, "drafting", drafting, {{"R", count}});
    std::vector<int64_t> accepted(static_cast<size_t>(count)), ended;
    host::RoundTally const tally = self->rows.advance(lens.data, drafts.data, accepted.data(), &ended);
    return {toNumpy(std::move(accepted), {static_cast<size_t>(count)}), tally.verified, tally.accepted,
            std::move(ended), tally.backlog};
}

}  // namespace

void registerRounds(nb::module_& m) {
    // Both keep the GIL, as the statistics of requests do.
    nb::class_<host::RoundCounts>(m, "RoundCounts")
        .def("__init__", &makeCounts, nb::arg("draft_len"), nb::kw_only(), nb::arg("most_recent"))
        .def("__deepcopy__", [](host::RoundCounts const& self, nb::object const&) { return host::RoundCounts(self); })
        .def_prop_ro("drafted", &host::RoundCounts::drafted)
        .def_prop_ro("admitted", [](host::RoundCounts const& self) { return self.positions(0); })
        .def_prop_ro("verified", [](host::RoundCounts const& self) { return self.positions(1); })
        .def_prop_ro("accepted", [](host::RoundCounts const& self) { return self.positions(2); })
        .def("add", &addRound, nb::arg("caps").none(), nb::arg("drafted").none(), nb::arg("verify_len").none(),
             nb::arg("accepted").none(), nb::arg("budget"))
        .def("take_recent", &takeRecent);

    nb::class_<SimulatedRows>(m, "SimulatedRows")
        .def("__init__", &makeRows, nb::arg("accepted").none(), nb::arg("following").none(), nb::kw_only(),
             nb::arg("by_token"), nb::arg("most_waiting") = 1)
        .def("__len__", [](SimulatedRows const& self) { return self.rows.size(); })
        .def("join", &join, nb::arg("block"), nb::arg("left"), nb::arg("waiting") = 0)
        .def("leave", &leave, nb::arg("row"))
        .def("clear", [](SimulatedRows* self) { self->rows.clear(); })
        .def("caps", &caps, nb::arg("most"))
        .def("confidence", &confidence, nb::arg("of_blocks").none())
        .def("advance", &advance, nb::arg("verify_len").none(), nb::arg("drafting").none() = nb::none());
}

}  // namespace dspark::python
