"""What TensorRT asks a plugin while it builds an engine, for every plugin and type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.kernels.plugin_harness import DTYPES, FIELD_FLOAT32, FIELD_INT32, Harness, Plugin, TensorArg

from trtllm_dspark.plugins import PluginSpec

SIZES = {
    "R": 3, "gamma": 4, "Vd": 50, "vocab": 80, "V": 80, "r": 8, "d": 16, "T": 15, "Hq": 8, "Hkv": 2, "D": 64, "N": 5,
    "S": 32, "P": 2, "table_len": 40, "gate_columns": 24, "rnn_columns": 32, "rnn_rows": 24, "num_candidates": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A plugin with fields; `shapes` are its outputs written down independently of the library."""

    plugin: str
    fields: dict[str, float]
    shapes: list[str]
    workspace: bool = True


CASES = {
    "draft": Case(
        "DsparkMarkovDraft",
        {"vocab": 80, "head_kind": 1, "acceptance": 1, "mapped_vocab": 1},
        ["R gamma", "R", "R gamma", "R gamma 4", "R gamma", "R gamma Vd"],
    ),
    "draft_greedy_gated": Case(
        "DsparkMarkovDraft",
        {"vocab": 80, "head_kind": 2, "acceptance": 0, "head_bias": 1, "mapped_vocab": 1},
        ["R gamma", "R", "R gamma", "R gamma 4", "R gamma"],
    ),
    "draft_rnn_int8_walk": Case(
        "DsparkMarkovDraft",
        {"vocab": 80, "head_kind": 3, "acceptance": 2, "num_candidates": 6, "int8_weights": 1, "mapped_vocab": 1},
        ["R gamma", "R", "R gamma", "R gamma 4", "R gamma", "R gamma 6", "R gamma 6"],
    ),
    "schedule": Case(
        "DsparkConfidenceSchedule",
        {"schedule_mode": 2, "markov_half": 1},
        ["R", "(R+1)", "(R*(gamma+1))", "(R*(gamma+1))", "(R*(gamma+1))", "4", "R gamma", "R gamma"],
    ),
    "schedule_fixed": Case(
        "DsparkConfidenceSchedule",
        {"schedule_mode": 0, "confidence_head": 0},
        ["R", "(R+1)", "(R*(gamma+1))", "(R*(gamma+1))", "(R*(gamma+1))", "4", "R gamma"],
    ),
    "accept_greedy": Case("DsparkRaggedAccept", {"acceptance": 0, "sampled_draft": 0}, ["R (gamma+1)", "R", "R"]),
    "accept_dense": Case(
        "DsparkRaggedAccept",
        {"acceptance": 1, "sampled_draft": 1, "mapped_vocab": 1},
        ["R (gamma+1)", "R", "R"],
    ),
    "accept_walk": Case(
        "DsparkRaggedAccept", {"acceptance": 2, "sampled_draft": 1, "num_candidates": 6}, ["R (gamma+1)", "R", "R"]
    ),
    "attention": Case(
        "DsparkRaggedAttention", {"scale": 0.125, "causal": 1, "kv_split": 64}, ["T Hq D"], workspace=False
    ),
    "attention_long": Case("DsparkRaggedAttention", {"scale": 0.125, "causal": 0, "kv_split": 64}, ["T Hq D"]),
    "append": Case("DsparkKvAppend", {}, ["N Hkv S D", "N Hkv S D"], workspace=False),
}


def _value(dim: str, sizes: dict[str, int]) -> int:
    return int(eval(dim, {}, sizes))  # "R+1", "(R)*(gamma+1)", "4"


def _tensors(
    case: Case, specs: dict[str, PluginSpec], sizes: dict[str, int], pick: int = 0
) -> tuple[list[TensorArg], ...]:
    """Inputs and outputs with the pick-th accepted type, the same within a group."""
    spec = specs[case.plugin]
    return tuple(
        [
            TensorArg.make(t.dtypes[min(pick, len(t.dtypes) - 1)], [_value(dim, sizes) for dim in t.dims])
            for t in tensors
        ]
        for tensors in (spec.inputs(case.fields), spec.outputs(case.fields))
    )


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def plugin(harness: Harness, case: Case) -> Plugin:
    return harness.create(case.plugin, case.fields)


@pytest.fixture
def sizes(case: Case) -> dict[str, int]:
    if case == CASES["attention_long"]:
        return SIZES | {"P": 40}
    # Without a table the draft vocabulary is the target's.
    return SIZES if case.fields.get("mapped_vocab") else SIZES | {"Vd": 80}


def test_output_shapes_dynamic_inputs_are_symbolic(
    plugin: Plugin, case: Case, specs: dict[str, PluginSpec], sizes: dict[str, int]
) -> None:
    inputs = specs[case.plugin].inputs(case.fields)
    fields = specs[case.plugin].complete(case.fields)
    dynamic = [
        # A dim that a field fixes, or a number, is never dynamic.
        TensorArg.make("int32", [_value(dim, sizes) if dim in fields or dim.isdigit() else -1 for dim in tensor.dims])
        for tensor in inputs
    ]
    assert plugin.output_shapes(dynamic, [tensor.dims for tensor in inputs]) == case.shapes


def test_output_shapes_contradicting_constants_name_the_tensor(
    plugin: Plugin, harness: Harness, case: Case, specs: dict[str, PluginSpec], sizes: dict[str, int]
) -> None:
    inputs, _ = _tensors(case, specs, sizes)
    names = [tensor.name for tensor in specs[case.plugin].inputs(case.fields)]
    broken = next(
        i for i, t in enumerate(specs[case.plugin].inputs(case.fields)) if i and t.dims[0] in ("R", "T", "R+1")
    )
    inputs[broken].dims[0] += 1
    harness.log()
    assert plugin.output_shapes(inputs, [[""] * 8 for _ in inputs]) is None
    assert f"{case.plugin}: " in (log := harness.log())
    assert names[broken] in log or names[broken + 1] in log


def test_output_types_follow_the_group(plugin: Plugin, case: Case, specs: dict[str, PluginSpec]) -> None:
    spec = specs[case.plugin]
    for pick in range(3):
        chosen = [t.dtypes[min(pick, len(t.dtypes) - 1)] for t in spec.inputs(case.fields)]
        expected = [DTYPES[t.dtypes[min(pick, len(t.dtypes) - 1)]] for t in spec.outputs(case.fields)]
        assert plugin.output_types(chosen) == expected


def test_supports_every_accepted_type_and_no_other(
    plugin: Plugin, case: Case, specs: dict[str, PluginSpec], sizes: dict[str, int]
) -> None:
    tensors = [*specs[case.plugin].inputs(case.fields), *specs[case.plugin].outputs(case.fields)]
    for pick in range(3):
        inputs, outputs = _tensors(case, specs, sizes, pick)
        every = [*inputs, *outputs]
        for position, spec in enumerate(tensors):
            assert plugin.supports(position, inputs, outputs), f"{spec.name} {pick=}"
            original = every[position].type
            for name, code in DTYPES.items():
                every[position].type = code
                fits = name in spec.dtypes and (
                    code == original or spec.group is None or all(t.group != spec.group for t in tensors[:position])
                )
                assert plugin.supports(position, inputs, outputs) == fits, f"{spec.name} {name} {pick=}"
            every[position].type = original
            every[position].format = 1
            assert not plugin.supports(position, inputs, outputs), f"{spec.name}: only the linear format"
            every[position].format = 0
    assert not plugin.supports(len(every), inputs, outputs)
    assert not plugin.supports(0, inputs[:-1], outputs)


def test_configure_accepts_profile_and_names_what_is_wrong(
    plugin: Plugin, harness: Harness, case: Case, specs: dict[str, PluginSpec], sizes: dict[str, int]
) -> None:
    inputs, outputs = _tensors(case, specs, sizes)
    assert plugin.configure(inputs, outputs) == 0, harness.log()
    for tensor in inputs:  # dynamic, with the profile's maximum
        for axis in range(tensor.num_dims):
            tensor.dims[axis] = -1
    assert plugin.configure(inputs, outputs) == 0, harness.log()
    inputs[0].type = DTYPES["int64"]
    harness.log()
    assert plugin.configure(inputs, outputs) == -1
    assert specs[case.plugin].inputs(case.fields)[0].name in harness.log()
    assert plugin.configure(inputs[:-1], outputs) == -1
    assert f"expected {len(inputs)} inputs" in harness.log()


def test_workspace_is_what_the_kernels_ask_for(
    plugin: Plugin, case: Case, specs: dict[str, PluginSpec], sizes: dict[str, int]
) -> None:
    inputs, outputs = _tensors(case, specs, sizes)
    small = plugin.workspace(inputs, outputs)
    assert (small > 0) == case.workspace
    grown, _ = _tensors(case, specs, sizes | {"R": 2 * sizes["R"], "T": 2 * sizes["T"]})
    assert plugin.workspace(grown, outputs) >= small * 3 // 2


def test_copies_keep_every_field(plugin: Plugin, case: Case, specs: dict[str, PluginSpec]) -> None:
    for how in ("clone", "attach", "recreate"):
        copy = plugin.derived(how)
        assert copy.handle != plugin.handle
        assert copy.text("harness_metadata") == plugin.text("harness_metadata")
        assert copy.num_outputs == len(case.shapes)
        copy.destroy()
    values = dict(pair.split("=") for pair in plugin.text("harness_metadata").split())
    assert {name: float(value) for name, value in values.items()} == specs[case.plugin].complete(case.fields)


def test_capabilities_are_the_versions_tensorrt_11_knows(plugin: Plugin) -> None:
    assert plugin.text("harness_capabilities").splitlines() == [
        "PLUGIN",
        "PLUGIN_V3ONE_CORE 1.0",
        "PLUGIN_V3ONE_BUILD 2.0",
        "PLUGIN_V3ONE_RUNTIME 1.0",
    ]


def test_aliases_only_the_caches_share_memory(plugin: Plugin, case: Case) -> None:
    aliases = [plugin.aliased(output) for output in range(-1, plugin.num_outputs + 1)]
    assert aliases == ([-1, 5, 6, -1] if case.plugin == "DsparkKvAppend" else [-1] * (plugin.num_outputs + 2))


I32, F32 = FIELD_INT32, FIELD_FLOAT32


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("DsparkRaggedAttention", [("causal", I32, [1])], "field 'scale' is missing"),
        ("DsparkRaggedAttention", [("scale", I32, [1])], "field 'scale': expected kFLOAT32 x 1, got kINT32 x 1"),
        ("DsparkRaggedAttention", [("scale", F32, [1, 2])], "field 'scale': expected kFLOAT32 x 1, got kFLOAT32 x 2"),
        (
            "DsparkRaggedAttention",
            [("scale", F32, [np.nan])],
            "field 'scale': expected a value in [1e-06, 1000000], got nan",
        ),
        ("DsparkRaggedAttention", [("causal", I32, [2])], "field 'causal': expected a value in [0, 1], got 2"),
        ("DsparkRaggedAttention", [("causal", I32, [1]), ("causal", I32, [1])], "field 'causal' is given twice"),
        ("DsparkRaggedAttention", [("mask", I32, [1])], "field 'mask' is not known; expected scale, causal, kv_split"),
        (
            "DsparkRaggedAttention",
            [("scale", F32, [1]), ("causal", I32, [1]), ("kv_split", I32, [96])],
            "field 'kv_split': expected a multiple of 64, got 96",
        ),
        ("DsparkKvAppend", [("paged", I32, [1])], "field 'paged' is not known; expected no fields"),
        ("DsparkMarkovDraft", [("vocab", 10, [8])], "field 'vocab': expected kINT32 x 1, got kINT64 x 1"),
        (
            "DsparkMarkovDraft",
            [("vocab", I32, [8]), ("head_kind", I32, [0]), ("acceptance", I32, [0]), ("int8_weights", I32, [1])],
            "field 'int8_weights': expected 0 without a head",
        ),
        (
            "DsparkConfidenceSchedule",
            [("schedule_mode", I32, [2]), ("confidence_head", I32, [0])],
            "field 'schedule_mode': expected 0 (fixed) without a confidence head, got 2",
        ),
        (
            "DsparkRaggedAccept",
            [("acceptance", I32, [0]), ("sampled_draft", I32, [1])],
            "field 'sampled_draft': expected 0 for greedy acceptance",
        ),
    ],
)
def test_create_bad_field_is_refused_by_name(
    harness: Harness, name: str, fields: list[tuple[str, int, list[float]]], message: str
) -> None:
    harness.log()
    types = {I32: np.int32, F32: np.float32, 10: np.int64}
    triples = [(field, kind, np.array(values, types[kind])) for field, kind, values in fields]
    assert harness.create_raw(name, triples) is None
    assert f"1 {name}: {message}" in harness.log()
