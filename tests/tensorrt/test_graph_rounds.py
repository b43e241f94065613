"""Graphs of the plugin lowering against the plugin library itself, compiled for the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.kernels.backends import SimtBackend
from helpers.kernels.plugin_harness import Harness, TensorArg
from helpers.kernels.plugin_runner import PluginRunner
from helpers.plugin_pair import make_pair, requests, session_tokens
from helpers.random_model import random_arrays
from helpers.tiny_engine import SMALL, drafter_arrays, small_drafter
from onnx import helper

from trtllm_dspark.graph import DrafterSource, RoundDrafter, RoundOptions, write_draft, write_verify
from trtllm_dspark.graph.lowering import TrtPluginLowering
from trtllm_dspark.graph.plugin_nodes import PLUGIN_DOMAIN
from trtllm_dspark.plugins import PluginSpec

SIZES = {"R": 3, "R+1": 4, "T": 11, "L": 11}
TYPES = {0: "float32", 1: "float16", 3: "int32", 7: "bfloat16", 8: "int64"}


@pytest.fixture
def backend(host_plugins: Path) -> Iterator[SimtBackend]:
    backend = SimtBackend(host_plugins)
    yield backend
    backend.close()


class LibraryHeads:
    """The heads of a graph by `enqueue` of the library's plugins."""

    def __init__(self, runner: PluginRunner) -> None:
        self._run = runner

    def __call__(self, op: str, fields: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        results: dict[str, np.ndarray] = self._run(op, fields, inputs)
        return results


@pytest.mark.parametrize(
    ("head", "acceptance", "num_candidates", "int8"),
    [("vanilla", "rejection", 0, False), ("gated", "coupled", 0, True), ("rnn", "rejection", 12, False)],
)
def test_rounds_by_the_plugins_give_the_tokens_of_the_cpu_session(
    harness: Harness,
    backend: SimtBackend,
    specs: dict[str, PluginSpec],
    head: Any,
    acceptance: Any,
    num_candidates: int,
    int8: bool,
    tmp_path: Path,
) -> None:
    options = RoundOptions(acceptance, "threshold", num_candidates, int8)
    heads = LibraryHeads(PluginRunner(harness, backend, specs))
    pair = make_pair(tmp_path, drafter=small_drafter(markov_head=head), options=options, plugins=heads)
    made, wanted = requests(0.8), requests(0.8)
    tokens = pair.rounds.generate(made)
    assert any(any(lens) for lens in pair.rounds.verified)
    if num_candidates:
        # The session drafts from every token; whatever is drafted, all of it was legal and is accepted by the same law.
        assert [len(row) for row in tokens] == [r.max_tokens for r in wanted]
    else:
        assert tokens == session_tokens(pair.session("threshold:0.3", acceptance), wanted)


def test_library_takes_every_node_of_half_graphs(
    harness: Harness, specs: dict[str, PluginSpec], tmp_path: Path
) -> None:
    """Creators take the fields, and shapes and types the plugins tell are those the graphs declare."""
    target = replace(SMALL, head_dim=64)
    drafter, rng = small_drafter(target, markov_head="gated"), np.random.default_rng(0)
    arrays, own = random_arrays(target, rng), drafter_arrays(drafter, rng)
    lowering, options = TrtPluginLowering(128, 4), RoundOptions("rejection", "early_stop", 8)
    kept = np.arange(0, 90, 3)
    round_drafter = RoundDrafter(drafter, own, lowering, 5, "bfloat16", kept)
    written = write_verify(
        tmp_path, target, arrays, max_seq_len=100, lowering=lowering, options=options, drafter=round_drafter
    )
    write_draft(
        tmp_path,
        DrafterSource(drafter, own, target, arrays, written),
        max_seq_len=100,
        max_draft_len=5,
        max_num_tokens=64,
        lowering=lowering,
        options=options,
        draft_token_ids=kept,
    )
    checked = [
        name for stem in ("target", "drafter") for name in check_nodes(harness, specs, tmp_path / f"{stem}.onnx")
    ]
    assert set(checked) == set(specs)


def check_nodes(harness: Harness, specs: dict[str, PluginSpec], path: Path) -> list[str]:
    graph = onnx.load(path, load_external_data=False).graph
    known: dict[str, tuple[str, list[int]]] = {}
    for tensor in graph.initializer:
        known[tensor.name] = (str(helper.tensor_dtype_to_np_dtype(tensor.data_type)), list(tensor.dims))
    for value in (*graph.input, *graph.output):
        kind = value.type.tensor_type
        known[value.name] = (str(helper.tensor_dtype_to_np_dtype(kind.elem_type)), [extent(d) for d in kind.shape.dim])
    checked = []
    for node in graph.node:
        if node.domain != PLUGIN_DOMAIN:
            continue
        spec = specs[node.op_type]
        fields = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.name.startswith("plugin_")}
        plugin = harness.create(node.op_type, fields)
        tensors = spec.inputs(fields)
        # Inner values are of the types and shapes their contract line allows: the other half of them is known.
        symbols = {s: n for t, v in zip(tensors, node.input, strict=True) if v in known
                   for s, n in zip(t.dims, known[v][1], strict=True)}  # fmt: skip
        symbols |= SIZES | {"Hq": 4, "Hkv": 2, "d": 64, "Vd": 30, "gamma": 5}
        inputs, types = [], []
        for tensor, value in zip(tensors, node.input, strict=True):
            dtype = "bfloat16" if "bfloat16" in tensor.dtypes else tensor.dtypes[0]
            shape = [int(s) if s.isdigit() else symbols[s] for s in tensor.dims]
            types.append(known.get(value, (dtype, shape))[0])
            inputs.append(TensorArg.make(types[-1], known.get(value, (dtype, shape))[1]))
        shapes = plugin.output_shapes(inputs, [tensor.dims for tensor in tensors])
        assert shapes is not None, harness.log()
        for name, shape, code in zip(node.output, shapes, plugin.output_types(types), strict=True):
            found = [int(eval(dim, {})) for dim in shape.split()]
            if name in known:
                assert (TYPES[code], found) == known[name], name
        plugin.destroy()
        checked.append(node.op_type)
    return checked


def extent(dim: Any) -> int:
    if not dim.dim_param:
        return int(dim.dim_value)
    return int(eval(dim.dim_param, {}, SIZES)) if dim.dim_param not in SIZES else SIZES[dim.dim_param]
