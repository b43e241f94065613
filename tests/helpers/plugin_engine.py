"""Plugin engines of tiny pairs over a recording device, and the CPU engine of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from helpers.plugin_graph import Heads, PluginGraph
from helpers.plugin_heads import CoreHeads
from helpers.recording_device import GraphPlan, RecordingDevice
from helpers.tiny_tensorrt import PairArrays, Written
from trtllm_dspark.build.tensorrt.profiles import engine_profiles
from trtllm_dspark.engine.tensorrt import TensorRtPluginEngine
from trtllm_dspark.engine.tensorrt._compiled import CompiledRound
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.graph import DrafterSource, RoundDrafter, RoundOptions, write_draft, write_verify
from trtllm_dspark.graph.lowering import TrtPluginLowering, plugin_cache_length

PLUGIN_PLANS = ("target", "drafter")
SYMBOLS = ("R", "R+1", "T", "L")


class _Unchecked(TrtPluginLowering):
    """Takes the toy pair, whose layers hold the same zeros."""

    def check(self, model: onnx.ModelProto, directory: Path) -> None:
        """Refuse nothing."""


class PluginPlan(GraphPlan):
    """A float32 graph of the `trt_plugin` lowering in a plan's place: its heads run by a callable."""

    def __init__(
        self,
        device: RecordingDevice,
        name: str,
        graph: PluginGraph,
        heads: Heads,
        profiles: list[dict[str, tuple[int, int]]],
    ) -> None:
        self.device, self.name, self.graph, self.heads = device, name, graph, heads
        self._describe(*([_entry(value) for value in values] for values in (graph.inputs, graph.outputs)), profiles)

    def run(self, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        caches = {name.removeprefix("past_"): value for name, value in feeds.items() if name.startswith("past_")}
        # Engines of one pair share its graphs.
        self.graph.caches.update(caches)
        self.graph.heads = self.heads
        results = self.graph.run({name: value for name, value in feeds.items() if not name.startswith("past_")})
        return results | {f"present_{name}": self.graph.caches[name] for name in caches}


@dataclass(frozen=True)
class PluginWritten:
    """Plugin graphs of one pair, in float32."""

    pair: Written
    graphs: dict[str, PluginGraph]
    options: RoundOptions
    profiles: list[dict[str, tuple[int, int]]]


def write_plugin_pair(
    directory: Path,
    pair: Written,
    weights: PairArrays,
    options: RoundOptions,
    *,
    draft_token_ids: np.ndarray | None = None,
    alone: bool = False,
) -> PluginWritten:
    """Write the plugin graphs of a pair whose CPU engine exists; `weights` are its arrays.

    Args:
        directory: an empty one.
        pair: whose limits count.
        weights: see above.
        options: what the round is compiled for.
        draft_token_ids: as the pair was written with.
        alone: only the target; `pair` is to have no drafter.
    """
    given = pair.limits
    limits = BuildLimits(given.max_batch_size, given.max_seq_len, given.max_num_tokens, given.max_draft_len)
    target, arrays, drafter, own = weights
    block = 0 if alone else drafter.block_size
    lowering = _Unchecked(plugin_cache_length(limits.max_seq_len, block), limits.max_batch_size, "float32")
    drafts = RoundDrafter(drafter, own, lowering, limits.max_draft_len, "float32", draft_token_ids)
    written = write_verify(
        directory, target, arrays, max_seq_len=limits.max_seq_len, lowering=lowering, options=options,
        drafter=None if alone else drafts, weight_dtype="float32",
    )  # fmt: skip
    if not alone:
        write_draft(
            directory, DrafterSource(drafter, own, target, arrays, written), max_seq_len=limits.max_seq_len,
            max_draft_len=limits.max_draft_len, max_num_tokens=limits.max_num_tokens, lowering=lowering,
            options=options, draft_token_ids=draft_token_ids, weight_dtype="float32",
        )  # fmt: skip
    profiles = [
        {symbol: (profile.smallest(symbol), profile.largest(symbol)) for symbol in SYMBOLS}
        for profile in engine_profiles(limits)
    ]
    names = PLUGIN_PLANS[:1] if alone else PLUGIN_PLANS
    graphs = {name: PluginGraph(directory / f"{name}.onnx", CoreHeads(), {}) for name in names}
    return PluginWritten(pair, graphs, options, profiles)


def plugin_plans(device: RecordingDevice, written: PluginWritten, heads: Heads) -> dict[str, Any]:
    """Return the plans of a written pair."""
    return {
        name: PluginPlan(device, name, graph, heads, written.profiles[: None if name == "target" else 1])
        for name, graph in written.graphs.items()
    }


def open_plugins(device: RecordingDevice, written: PluginWritten, *, heads: Heads | None = None, **options: Any) -> Any:
    """Return an engine of a pair on a device; `device.plans` are its plans."""
    pair = written.pair
    device.plans = plugin_plans(device, written, heads or CoreHeads())
    drafter = pair.drafter if "drafter" in device.plans else None
    compiled = CompiledRound(written.options.schedule, written.options.acceptance)
    return TensorRtPluginEngine(device, device.plans, pair.target, drafter, pair.limits, compiled, **options)


PluginOpened = Callable[..., tuple[TensorRtPluginEngine, RecordingDevice]]
"""Open an engine of a written pair: `late`, `heads` and options of the engine."""


def _entry(value: onnx.ValueInfoProto) -> tuple[str, str, list[Any]]:
    kind = value.type.tensor_type
    dims: list[Any] = [dim.dim_param or int(dim.dim_value) for dim in kind.shape.dim]
    return value.name, str(np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))), dims
