"""Whole sessions over plans whose heads are `enqueue` of the library's own plugins, compiled for the host.

Two rounds in flight on a recording device; caps and commit are the library's kernels. tests/unit/engine/tensorrt plays
more of them with the core in the plugins' place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny_tensorrt
from helpers.kernels.backends import SimtBackend
from helpers.kernels.plugin_harness import Harness
from helpers.kernels.plugin_runner import PluginRunner
from helpers.plugin_engine import open_plugins, write_plugin_pair
from helpers.recording_device import RecordingDevice
from helpers.tiny_tensorrt import Written
from helpers.toy_pair import write_toy_pair
from helpers.trt_sessions import make, requests, run, table, take

from trtllm_dspark.graph import RoundOptions
from trtllm_dspark.plugins import PluginSpec


class LibraryHeads:
    """The heads of plans by `enqueue`; memory is given back behind each."""

    def __init__(self, harness: Harness, library: Path, specs: dict[str, PluginSpec]) -> None:
        self._backend = SimtBackend(library)
        self._run = PluginRunner(harness, self._backend, specs)
        self.enqueued: list[str] = []

    def __call__(self, op: str, fields: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.enqueued.append(op)
        results: dict[str, np.ndarray] = self._run(op, fields, inputs)
        self._backend.close()
        return results


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Written, tiny_tensorrt.PairArrays]:
    pair = write_toy_pair(tmp_path_factory.mktemp("toy_pair"))
    return tiny_tensorrt.toy_pair(tmp_path_factory.mktemp("toy"), pair), tiny_tensorrt.toy_weights(pair)


@pytest.fixture
def heads(harness: Harness, host_plugins: Path, specs: dict[str, PluginSpec]) -> LibraryHeads:
    return LibraryHeads(harness, host_plugins, specs)


@pytest.mark.parametrize(
    ("acceptance", "speculation", "sampled"),
    [
        ("greedy", "threshold:0.3", False),
        ("coupled", "fixed", True),
        ("rejection", "threshold:0.3", True),
        ("coupled", "adaptive", True),
    ],
)
def test_session_by_the_plugins_equals_cpu(
    toy: tuple[Written, tiny_tensorrt.PairArrays],
    heads: LibraryHeads,
    host_plugins: Path,
    tmp_path: Path,
    acceptance: Any,
    speculation: str,
    sampled: bool,
) -> None:
    pair, weights = toy
    todo = requests(pair, 2, longest=12, min_tokens=False, sampled=sampled)
    accepted_by = "rejection" if acceptance == "greedy" else acceptance
    same = "off" if speculation == "adaptive" else speculation
    expected = run(make(pair.cpu, pair, same, acceptance=accepted_by), todo)
    device = RecordingDevice(host_plugins)
    written = write_plugin_pair(tmp_path, pair, weights, RoundOptions(acceptance, "threshold"))
    engine = open_plugins(device, written, heads=heads)
    take(engine, 10.0)
    costs = table(pair.limits.max_draft_len, 10.0) if speculation == "adaptive" else None
    session = make(engine, pair, speculation, acceptance=accepted_by, cost_table=costs)
    assert run(session, todo) == expected
    assert session.stats.acceptance.accepted > 0
    assert set(heads.enqueued) == {"DsparkMarkovDraft", "DsparkConfidenceSchedule", "DsparkRaggedAccept"}
    assert engine.graph_stats.eager_rounds == 0
    engine.close()
