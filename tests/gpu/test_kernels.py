"""Every kernel on the device against the core: the same checks and shapes as tests/simt."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.kernels.attention import AttentionShape
from helpers.kernels.backends import CudaBackend
from helpers.kernels.build import ROOT
from helpers.kernels.checks import (
    ATTENTIONS,
    ROUNDS,
    SCHEDULES,
    check_attention,
    check_attention_alone,
    check_round,
    check_schedule,
)
from helpers.kernels.cuda_graph import CudaGraph
from helpers.kernels.round_cases import RoundShape, make_round
from helpers.kernels.round_state import STATES, StateShape, check_state
from helpers.kernels.rounds import draft_problem, place
from helpers.kernels.schedule import ScheduleShape

pytestmark = pytest.mark.gpu

LARGE = {
    "large_vocab": RoundShape(
        vocab=151936, rank=256, num_requests=4, draft_len=7, weight_type="bfloat16", filters=False
    ),
    "large_int8_walk": RoundShape(vocab=151936, rank=256, num_requests=8, weight_type="int8", num_candidates=64),
    "large_filtered": RoundShape(vocab=151936, rank=64, num_requests=2, logits_type="bfloat16"),
}


@pytest.mark.parametrize("shape", [*ROUNDS.values(), *LARGE.values()], ids=[*ROUNDS, *LARGE])
def test_round_on_device_equals_core(backend: CudaBackend, shape: RoundShape) -> None:
    check_round(backend, shape)


@pytest.mark.parametrize("shape", ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_attention_on_device_within_tolerance(backend: CudaBackend, shape: AttentionShape) -> None:
    check_attention(backend, shape)


@pytest.mark.parametrize("shape", ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_attention_on_device_does_not_depend_on_batch_mates(backend: CudaBackend, shape: AttentionShape) -> None:
    check_attention_alone(backend, shape)


@pytest.mark.parametrize("shape", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedule_on_device_equals_core(backend: CudaBackend, shape: ScheduleShape) -> None:
    check_schedule(backend, shape)


@pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())
def test_state_on_device_equals_loops(backend: CudaBackend, shape: StateShape) -> None:
    check_state(backend, shape)


def test_draft_captured_graph_replays_with_new_inputs(backend: CudaBackend) -> None:
    """A launch is captured once; replaying it after the inputs changed gives the new inputs' draft."""
    first, second = (make_round(replace(ROUNDS["unfiltered"], seed=seed)) for seed in (1, 2))
    params, inputs, outputs = place(backend, "markov_draft", *draft_problem(first))
    graph = CudaGraph(backend, lambda stream: backend.library.launch("markov_draft", stream=stream, **params))
    for case in (first, second, first):
        problem = draft_problem(case)
        for name, buffer in inputs.items():
            array = problem[1][name]
            assert array is not None
            buffer.write(array)  # type: ignore[attr-defined]
        graph.launch()
        backend.synchronize()
        eager, _, eager_outputs = place(backend, "markov_draft", *problem)
        backend.library.launch("markov_draft", **eager)
        backend.synchronize()
        np.testing.assert_array_equal(outputs["draft_tokens"].read(), eager_outputs["draft_tokens"].read())


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_kernels_sanitizer_is_clean(cuda_path: Path, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    small = "plain or gated or walk_mapped or causal or early_stop"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    command += [str(Path(__file__)), "-k", f"on_device and ({small})"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
