"""`enqueue` of every plugin on the host: descriptors and addresses reach the launcher as the C entry points do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kernels.attention import AttentionShape, append_problem, attention_problem, make_attention, run_append
from helpers.kernels.backends import SimtBackend
from helpers.kernels.checks import ATTENTIONS, ROUNDS, SCHEDULES
from helpers.kernels.plugin_harness import Harness
from helpers.kernels.plugin_runner import PluginRunner
from helpers.kernels.round_cases import RoundShape, make_round
from helpers.kernels.rounds import ACCEPTANCES, HEAD_KINDS, Problem, accept_problem, draft_problem, launch
from helpers.kernels.schedule import MODES, ScheduleShape, make_schedule, schedule_problem

from trtllm_dspark.plugins import PluginSpec


@pytest.fixture
def backend(host_plugins: Path) -> Iterator[SimtBackend]:
    backend = SimtBackend(host_plugins)
    yield backend
    backend.close()


@pytest.fixture
def run(harness: Harness, backend: SimtBackend, specs: dict[str, PluginSpec]) -> PluginRunner:
    return PluginRunner(harness, backend, specs)


def _compare(plugin: dict[str, Any], direct: dict[str, Any], renamed: dict[str, str] | None = None) -> None:
    for name, expected in direct.items():
        np.testing.assert_array_equal(plugin[(renamed or {}).get(name, name)], expected, err_msg=name)


@pytest.mark.parametrize("name", [n for n, s in ROUNDS.items() if 0 < s.num_requests < 30 and s.rank < 100])
def test_draft_and_accept_equal_direct_launch(run: PluginRunner, backend: SimtBackend, name: str) -> None:
    shape: RoundShape = ROUNDS[name]
    case = make_round(shape)
    mapped = case.target_of_draft is not None
    problem = draft_problem(case)
    fields = {
        "vocab": shape.vocab,
        "head_kind": HEAD_KINDS[shape.head_kind],
        "acceptance": ACCEPTANCES[shape.acceptance],
        "num_candidates": shape.num_candidates,
        "mapped_vocab": int(mapped),
        "int8_weights": int(shape.weight_type == "int8"),
        "head_bias": int(shape.head_kind in ("gated", "rnn")),
    }
    direct = launch(backend, "markov_draft", *problem)
    _compare(run("DsparkMarkovDraft", fields, problem[1]), direct, {"status": "draft_status"})

    packed = replace(case, target_logits=np.ascontiguousarray(case.target_logits[:, : shape.vocab]), stride=shape.vocab)
    accept = accept_problem(packed, direct)
    fields = {
        "acceptance": ACCEPTANCES[shape.acceptance],
        "sampled_draft": int(shape.acceptance != "greedy"),
        "num_candidates": shape.num_candidates if shape.acceptance != "greedy" else 0,
        "mapped_vocab": int(mapped),
    }
    _compare(run("DsparkRaggedAccept", fields, accept[1]), launch(backend, "ragged_accept", *accept))


@pytest.mark.parametrize("name", ["fixed", "threshold_each", "riding_along", "riding_along_stale", "no_markov_half"])
def test_schedule_equals_direct_launch(run: PluginRunner, backend: SimtBackend, name: str) -> None:
    shape: ScheduleShape = replace(SCHEDULES[name], padding=0, riding_along=SCHEDULES[name].riding_along or 1)
    problem: Problem = schedule_problem(make_schedule(shape))
    fields = {"schedule_mode": MODES[shape.mode], "markov_half": int(shape.markov)}
    _compare(run("DsparkConfidenceSchedule", fields, problem[1]), launch(backend, "confidence_schedule", *problem))


@pytest.mark.parametrize("name", ["causal", "block", "bfloat16", "slot_cache", "one_piece"])
def test_append_and_attention_equal_direct_launch(run: PluginRunner, backend: SimtBackend, name: str) -> None:
    shape: AttentionShape = ATTENTIONS[name]
    case = make_attention(shape)
    caches = {"key_cache": case.key_cache, "value_cache": case.value_cache}
    in_place = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    appended = run("DsparkKvAppend", {}, append_problem(case)[1] | caches, in_place)
    expected = run_append(backend, case)
    for name, cache in zip(in_place, expected, strict=True):
        np.testing.assert_array_equal(appended[name].view(np.uint16), cache.view(np.uint16))
    problem = attention_problem(case, *expected)
    fields = {"scale": float(problem[0]["scale"]), "causal": int(shape.causal), "kv_split": shape.kv_split}
    _compare(run("DsparkRaggedAttention", fields, problem[1]), launch(backend, "ragged_attention", *problem))


def test_append_outputs_elsewhere_are_refused(run: PluginRunner) -> None:
    case = make_attention(AttentionShape())
    arrays = append_problem(case)[1] | {"key_cache": case.key_cache, "value_cache": case.value_cache}
    with pytest.raises(AssertionError, match="key_cache_out: expected the memory of key_cache; build the engine with"):
        run("DsparkKvAppend", {}, arrays)


def test_launcher_refusal_reaches_the_log(run: PluginRunner) -> None:
    case = make_attention(AttentionShape(head_dim=72))
    problem = attention_problem(case, case.key_cache, case.value_cache)
    with pytest.raises(AssertionError, match="DsparkRaggedAttention: head_dim: expected 64 or 128, got 72"):
        run("DsparkRaggedAttention", {"scale": 0.1, "causal": 1}, problem[1])
