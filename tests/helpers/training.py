"""What the tests of training share: prompts and responses files, small runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import Response
from trtllm_dspark.train.trainer import StepReport


def small_config(target_dir: Path, output_dir: Path) -> TrainConfig:
    """Return the smallest run that is still a run."""
    return TrainConfig(
        str(target_dir),
        output_dir,
        steps=6,
        num_layers=1,
        block_size=5,
        markov_rank=8,
        target_layer_ids=(0, 2),
        num_sequences=4,
        anchors_per_sequence=4,
        warmup_steps=2,
        max_seq_len=64,
        save_every=1,
        seed=3,
    )


def make_run(config: TrainConfig, responses: list[Response], **changes: Any) -> Run:
    """Return a run of `config` with some fields changed."""
    return Run(Preparation(replace(config, **changes)), responses)


def train(config: TrainConfig, responses: list[Response], **changes: Any) -> list[StepReport]:
    """Train to the end and return the steps."""
    reports: list[StepReport] = []
    run = make_run(config, responses, **changes)
    try:
        run.train(stop=lambda: False, told=lambda report, _: reports.append(report))
    finally:
        run.close()
    return reports


def write_responses(path: Path, responses: list[Response]) -> Path:
    """Write a responses file."""
    path.write_text("".join(response.to_json() + "\n" for response in responses), "utf-8")
    return path


def write_prompts(path: Path, texts: list[str]) -> Path:
    """Write a prompts file of one domain."""
    path.write_text("".join(json.dumps({"prompt": text, "domain": "d"}) + "\n" for text in texts), "utf-8")
    return path
