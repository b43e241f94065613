"""A drafter that came with a reduced vocabulary keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.drafter_dialects import DRAFT_IDS, reduced_tensors, speculators_config
from helpers.tiny_models import write_directory

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.build.plan import plan_build
from trtllm_dspark.checkpoint.safetensors_io import read_file
from trtllm_dspark.errors import ConfigError


@pytest.fixture
def reduced_config(tiny_config: BuildConfig, tmp_path: Path) -> BuildConfig:
    drafter = write_directory(
        tmp_path / "reduced", speculators_config(draft_vocab_size=len(DRAFT_IDS)), reduced_tensors()
    )
    return replace(tiny_config, draft_checkpoint=str(drafter), weight_dtype="float32")


def test_build_writes_the_drafters_own_vocabulary(reduced_config: BuildConfig) -> None:
    build_engine(reduced_config)
    heads = {name: tensor.read() for name, tensor in read_file(reduced_config.output_dir / "heads.safetensors").items()}
    np.testing.assert_array_equal(heads["d2t"], DRAFT_IDS)
    np.testing.assert_array_equal(heads["markov.w2"], reduced_tensors()["markov_head.markov_w2.weight"])


def test_plan_reducing_an_own_vocabulary_again_is_refused(reduced_config: BuildConfig, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text('{"schema": "trtllm_dspark.token_counts", "schema_version": 1, "vocab_size": 192, "counts": []}')
    config = replace(reduced_config, draft_vocab_size=32, draft_vocab_counts=counts)
    with pytest.raises(ConfigError, match="draft vocabulary of 64 tokens of its own"):
        plan_build(config)
