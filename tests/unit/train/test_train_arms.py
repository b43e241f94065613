"""The comparison of drafters runs, and its walk of prompt lookup counts what a session counts."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import fake_engine
from helpers.benchmarks import load_benchmark
from helpers.fake_engine import FakeEngine, collect_outputs, token_ids
from helpers.training import write_responses

from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.proposers import NgramProposer
from trtllm_dspark.train.responses import Response


@pytest.fixture(scope="module")
def arms() -> ModuleType:
    return load_benchmark("train_arms")


def test_lookup_walks_as_it_decodes(arms: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # Repeats what stood seven tokens before, but for every tenth token.
    monkeypatch.setattr(
        fake_engine, "next_token", lambda text: len(text) % 64 if len(text) % 10 == 0 else text[-7] if text[6:] else 3
    )
    engine = FakeEngine(has_drafter=False, max_seq_len=200)
    session = Session(engine, None, speculation="fixed", drafter=partial(NgramProposer, max_draft_len=4))
    session.add(Request("a", [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=150)))
    outputs = collect_outputs(session)["a"]
    answer = token_ids(outputs)
    ends = np.cumsum([len(output.new_token_ids) for output in outputs[1:]])
    whole = [end for start, end in zip([0, *ends[:-1]], ends, strict=True) if start + 4 < len(answer)]
    response = Response("x", 0.0, 8, (1, 2, 3, 4, 5, 6, 7, 8, *answer))
    assert arms.look_up([response], 4) == {"x": (whole[-1], len(whole))}
    assert len(whole) > 20


def test_every_arm_is_in_one_table(
    arms: ModuleType,
    target_dir: Path,
    tmp_path: Path,
    responses: list[Response],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_responses(tmp_path / "r.jsonl", responses)
    flags = ["--target_checkpoint", str(target_dir), "--responses_file", str(path), "--validation_file", str(path)]
    flags += ["--minutes", "0.0001", "--block_size", "3", "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["train_arms.py", *flags])
    assert arms.main() == 0
    out = capsys.readouterr().out
    results = {row["arm"]: row for row in map(json.loads, out.splitlines()[: len(arms.ARMS) + 1])}
    assert set(results) == {"dspark", "gated", "rnn", "dflash", "one_layer", "eagle3", "mtp", "ngram"}
    assert all(row["accepted_len"]["all"] >= 1 for row in results.values())
    assert all(f"| {name} |" in out for name in results)
    assert (tmp_path / "out" / "drafters" / "eagle3" / "model.safetensors").is_file()
