"""A run goes on from a drafter of any layout, and writes what it has of its own with what was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafter_dialects import DRAFT_IDS, reduced_tensors, specforge_config, speculators_config
from helpers.tiny_models import drafter_config, drafter_tensors, write_directory, write_target
from helpers.training import make_run, small_config, train

from trtllm_dspark.checkpoint import Checkpoint, load_drafter, load_target
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import Response
from trtllm_dspark.train.trainer import StepReport

BIAS = "confidence_head.proj.bias"
OWN = {"own_embed": True, "own_lm_head": True}
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepspec": (drafter_config(), drafter_tensors(drafter_config(), 4)),
    "own_tables": (drafter_config(), drafter_tensors(drafter_config(), 4, **OWN)),
    "own_head": (drafter_config(), drafter_tensors(drafter_config(), 4, own_lm_head=True)),
    "specforge": (specforge_config(), drafter_tensors(drafter_config(), 4)),
    "speculators": (speculators_config(), drafter_tensors(drafter_config(), 4, **OWN)),
    "reduced": (speculators_config(draft_vocab_size=len(DRAFT_IDS)), reduced_tensors()),
}


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target of the size that the dialects' drafters are for."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def known(small_target: Path) -> Checkpoint:
    return load_target(small_target)


@pytest.fixture(scope="module")
def sequences() -> list[Response]:
    rng = np.random.default_rng(1)
    # Half of the tokens are ones that the reduced drafter proposes.
    return [Response("x", 0.0, 4, tuple(map(int, rng.integers(0, 150, 24)))) for _ in range(4)]


@pytest.fixture
def config(small_target: Path, tmp_path: Path) -> TrainConfig:
    return replace(small_config(small_target, tmp_path / "out"), steps=2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_what_is_not_trained_is_written_as_it_came(
    config: TrainConfig, known: Checkpoint, sequences: list[Response], tmp_path: Path, dialect: str, bias: bool
) -> None:
    fields, tensors = DIALECTS[dialect]
    kept = {name: values for name, values in tensors.items() if bias or name != BIAS}
    directory = write_directory(tmp_path / "source", fields, kept)
    # Steps so small that they change nothing which float16 shows.
    reports = train(config, sequences, init_from=str(directory), lr_scale=1e-6)
    assert [report.step for report in reports] == [1, 2]
    source, written = (load_drafter(path, known.config) for path in (directory, config.output_dir / "drafter"))
    assert written.config == source.config
    assert set(written.arrays) == {*source.arrays, "confidence.bias"}
    for name in written.arrays:
        expected = source.arrays[name] if name in source.arrays else np.zeros(1, np.float32)
        np.testing.assert_allclose(written.arrays[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_reduced_vocabulary_is_trained_as_the_same_rows_of_a_whole_one(
    config: TrainConfig, known: Checkpoint, sequences: list[Response], tmp_path: Path
) -> None:
    fields, tensors = DIALECTS["reduced"]
    reduced = write_directory(tmp_path / "reduced", fields, tensors)
    spread = {name: values for name, values in tensors.items() if name not in ("d2t", "t2d")}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        spread[name] = np.zeros((192, tensors[name].shape[1]), np.float32)
        spread[name][DRAFT_IDS] = tensors[name]
    preparation = Preparation(
        replace(
            config,
            init_from=str(write_directory(tmp_path / "whole", drafter_config(), spread)),
            output_dir=tmp_path / "rows",
        )
    )
    preparation.draft_token_ids = DRAFT_IDS
    runs = [make_run(config, sequences, init_from=str(reduced)), Run(preparation, sequences)]
    losses: list[list[tuple[float, ...]]] = []
    for run in runs:
        found: list[StepReport] = []
        run.train(stop=lambda: False, told=lambda report, _, found=found: found.append(report))
        run.close()
        losses.append([(one.loss, one.cross_entropy, *one.accept) for one in found])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
    few, all_ = (load_drafter(path / "drafter", known.config).arrays for path in (config.output_dir, tmp_path / "rows"))
    for name in ("lm_head.weight", "markov.w2.weight"):
        np.testing.assert_array_equal(few[name], all_[name][DRAFT_IDS])


def test_copies_of_the_targets_tables_never_replace_its_own(
    config: TrainConfig, known: Checkpoint, sequences: list[Response], tmp_path: Path
) -> None:
    fields, tensors = DIALECTS["own_head"]
    directory = write_directory(tmp_path / "source", fields, tensors)
    train(config, sequences, init_from=str(directory), include_shared=True, steps=1)
    written = load_drafter(config.output_dir / "drafter", known.config).arrays
    np.testing.assert_allclose(written["lm_head.weight"], tensors["lm_head.weight"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(written["embed.weight"], known.arrays["embed.weight"], rtol=1e-3, atol=1e-5)


def test_tables_equal_to_the_targets_are_left_out(
    config: TrainConfig, known: Checkpoint, sequences: list[Response], tmp_path: Path
) -> None:
    copies = {"embed_tokens.weight": known.arrays["embed.weight"], "lm_head.weight": known.arrays["lm_head.weight"]}
    directory = write_directory(tmp_path / "source", drafter_config(), {**DIALECTS["deepspec"][1], **copies})
    train(config, sequences, init_from=str(directory), steps=1)
    written = load_drafter(config.output_dir / "drafter", known.config)
    assert written.shares_embedding
    assert written.shares_lm_head


def test_a_second_draft_vocabulary_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "source", *DIALECTS["reduced"])
    with pytest.raises(ConfigError, match="64 tokens of its own; leave out --draft_vocab_size"):
        Preparation(
            replace(config, init_from=str(directory), draft_vocab_size=80, draft_vocab_counts=tmp_path / "counts.json")
        )
