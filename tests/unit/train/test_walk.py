"""Accepted length of walks equals that of decoding, and the optimiser's parts do what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fake_engine import collect_outputs
from helpers.tiny_models import write_drafter
from helpers.training import train

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.engine import load_engine
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.train.optim import orthogonalise
from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import Response
from trtllm_dspark.train.schedule import Schedule
from trtllm_dspark.train.walk import _walk


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_walk_counts_what_the_engine_accepts(config: TrainConfig, target_dir: Path, tmp_path: Path, head: str) -> None:
    drafter_dir = write_drafter(tmp_path / "drafter", markov_head=head, vocab_size=256)  # type: ignore[arg-type]
    engine_dir = tmp_path / "engine"
    build_engine(
        BuildConfig(
            target_checkpoint=str(target_dir),
            draft_checkpoint=str(drafter_dir),
            output_dir=engine_dir,
            weight_dtype="float32",
            max_seq_len=128,
            max_num_tokens=32,
        )
    )
    engine = load_engine(engine_dir)
    session = Session(engine, None, speculation="fixed:5", eos_token_ids=[])
    prompts = [[10, 20, 30 + n] for n in range(3)]
    for index, prompt in enumerate(prompts):
        session.add(Request(str(index), prompt, SamplingParams(max_tokens=48)))
    outputs = collect_outputs(session)
    engine.close()
    for index, prompt in enumerate(prompts):
        steps = [output.new_token_ids for output in outputs[str(index)]]
        answer = [token for step in steps for token in step]
        response = Response("x", 0.0, len(prompt), (*prompt, *answer))
        run = Run(Preparation(replace(config, init_from=str(drafter_dir), output_dir=tmp_path / "out")), [response])
        emitted, rounds = run.validate([response])["x"]
        run.close()
        # The walk leaves out blocks that the end of the sequence cuts.
        whole = np.cumsum([len(step) for step in steps[1:]])
        counted = [total for start, total in zip([0, *whole[:-1]], whole, strict=True) if start + 5 < len(answer)]
        assert (emitted, rounds) == (counted[-1], len(counted))


def test_walk_by_hand() -> None:
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    right = np.lib.stride_tricks.sliding_window_view(np.arange(2, 12), 3).copy()
    assert _walk(right, tokens) == (8, 2)
    wrong = right.copy()
    wrong[0, 1] = 99
    # From token 0: one draft right, then the target's own: token 2 is the next anchor, and takes a whole block.
    assert _walk(wrong, tokens) == (6, 2)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_orthogonalised_matrices_keep_their_directions(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    singular = torch.diagonal(left.t() @ orthogonalise(matrix) @ right.t())
    assert (singular > 0.3).all()
    assert (singular < 1.7).all()


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(100, warmup_steps=10, decay_share=0.5)
    scales = [schedule.scale(step) for step in range(1, 101)]
    assert scales[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert set(scales[10:50]) == {1.0}
    assert scales[-1] == pytest.approx(1 / 50)
    assert all(a >= b for a, b in zip(scales[10:], scales[11:], strict=False))
    with pytest.raises(ConfigError):
        Schedule(0)


def test_bfloat16_products_give_about_the_same_losses(
    config: TrainConfig, responses: list[Response], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    exact = train(config, responses, output_dir=tmp_path / "float32")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    rounded = train(config, responses)
    assert [report.loss for report in rounded] != [report.loss for report in exact]
    assert [report.loss for report in rounded] == pytest.approx([report.loss for report in exact], rel=0.02)
