"""A build writes what its manifest says, in one piece, for every combination of models and weights."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import drafter_dialects, tiny_models
from helpers.drafter_dialects import DRAFT_IDS
from helpers.toy_pair import write_toy_pair

from trtllm_dspark.build import BuildConfig, build_engine, builder, open_engine_dir
from trtllm_dspark.build.plan import plan_build
from trtllm_dspark.checkpoint.safetensors_io import read_file
from trtllm_dspark.engine_dir import BuildLimits, file_sha256
from trtllm_dspark.errors import CheckpointError, ConfigError, DeviceError, UsageError
from trtllm_dspark.runtime import Tokenizer

TARGET_FILES = {"target.onnx", "target.onnx.data"}
STEPS = ("target", "drafter", "manifest", "verify", "publish")
DRAFTER_FILES = {
    "drafter_context.onnx",
    "drafter_context.onnx.data",
    "drafter_block.onnx",
    "drafter_block.onnx.data",
    "heads.safetensors",
}


def write_counts(path: Path, vocab_size: int, counts: list[list[int]]) -> Path:
    header = f'"schema": "trtllm_dspark.token_counts", "schema_version": 1, "vocab_size": {vocab_size}'
    path.write_text(f'{{{header}, "counts": {counts}}}')
    return path


def test_build_writes_every_file_and_a_manifest_that_opens(tiny_config: BuildConfig) -> None:
    report = build_engine(tiny_config)
    opened = open_engine_dir(tiny_config.output_dir)
    assert opened.manifest == report.manifest
    assert {entry.name for entry in opened.manifest.files} == TARGET_FILES | DRAFTER_FILES
    assert opened.manifest.limits == BuildLimits(2, 128, 32, 5)
    assert set(os.listdir(tiny_config.output_dir)) == TARGET_FILES | DRAFTER_FILES | {"manifest.json"}
    assert os.listdir(tiny_config.output_dir.parent) == ["engine"]


def test_build_manifest_names_the_checkpoint_files_by_hash(tiny_config: BuildConfig) -> None:
    manifest = build_engine(tiny_config).manifest
    files = {entry.name: entry for entry in manifest.target.checkpoint_files}
    path = Path(tiny_config.target_checkpoint) / "model.safetensors"
    assert files["model.safetensors"].sha256 == file_sha256(path)
    assert files["model.safetensors"].size == path.stat().st_size


def test_build_twice_gives_equal_files_and_engine_hash(tiny_config: BuildConfig, tmp_path: Path) -> None:
    one = build_engine(tiny_config).manifest
    two = build_engine(replace(tiny_config, output_dir=tmp_path / "second")).manifest
    assert one == two
    assert one.engine_hash == two.engine_hash


def test_build_without_drafter_writes_the_target_only(tiny_config: BuildConfig) -> None:
    manifest = build_engine(replace(tiny_config, draft_checkpoint=None)).manifest
    assert {entry.name for entry in manifest.files} == TARGET_FILES
    assert manifest.drafter is None
    assert manifest.limits.max_draft_len == 0


def test_build_toy_pair_brings_its_tokenizer(tmp_path: Path) -> None:
    pair = write_toy_pair(tmp_path / "toy")
    config = BuildConfig(str(pair.target_dir), tmp_path / "engine", str(pair.drafter_dir), max_seq_len=64)
    names = {entry.name for entry in build_engine(config).manifest.files}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names


@pytest.mark.parametrize("said", [True, False])
def test_build_special_tokens_reach_the_chat_template(tmp_path: Path, said: bool) -> None:
    pair = write_toy_pair(tmp_path / "toy")
    (pair.target_dir / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token }}")
    if said:
        settings = {"bos_token": None, "eos_token": "<|pad|>", "pad_token": {"content": "<|mask|>"}}
        (pair.target_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    build_engine(BuildConfig(str(pair.target_dir), tmp_path / "engine", max_seq_len=64))
    # Without the file an engine is one of an earlier version: the ids say which tokens they are.
    engine = open_engine_dir(tmp_path / "engine")
    assert (engine.optional_file("special_tokens.json") is not None) == said
    assert Tokenizer.open(engine).render_chat([]) == ("<|pad|><|mask|>" if said else "<|end|>")


@pytest.mark.parametrize("weight_dtype", ["int8", "float32", "w8a8"])
@pytest.mark.parametrize("draft_weight_dtype", [None, "float32"])
def test_build_weight_dtypes_are_recorded(
    tiny_config: BuildConfig, weight_dtype: str, draft_weight_dtype: str | None
) -> None:
    config = replace(tiny_config, weight_dtype=weight_dtype, draft_weight_dtype=draft_weight_dtype)
    manifest = build_engine(config).manifest
    assert manifest.drafter is not None
    assert manifest.target.weight_dtype == weight_dtype
    assert manifest.drafter.weight_dtype == (draft_weight_dtype or weight_dtype)


@pytest.mark.parametrize("weight_dtype", ["int8", "float32", "w8a8"])
@pytest.mark.parametrize("own", [False, True])
def test_build_estimate_is_close_to_the_files(
    tiny_config: BuildConfig, tmp_path: Path, weight_dtype: str, own: bool
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 2048}
    target = tiny_models.write_target(tmp_path / "t", tie_word_embeddings=not own, **sizes)
    drafter = tiny_models.write_drafter(tmp_path / "d", own_embed=own, own_lm_head=own, **sizes)
    config = replace(
        tiny_config, target_checkpoint=str(target), draft_checkpoint=str(drafter), weight_dtype=weight_dtype
    )
    written = sum(entry.size for entry in build_engine(config).manifest.files)
    # 6 %: norms, alignment of tensors to pages and the graphs themselves are left out of the estimate.
    assert plan_build(config).estimate.disk_bytes == pytest.approx(written, rel=0.06)


def test_build_reduced_vocabulary_is_stored_as_absolute_ids(tiny_config: BuildConfig, tmp_path: Path) -> None:
    counts = write_counts(tmp_path / "counts.json", 192, [[100, 9], [50, 8], [150, 7], [60, 1]])
    config = replace(tiny_config, draft_vocab_size=5, draft_vocab_counts=counts)
    manifest = build_engine(config).manifest
    assert manifest.drafter_config is not None
    assert manifest.drafter_config.draft_vocab_size == 5
    ids = read_file(config.output_dir / "heads.safetensors")["d2t"].read()
    # 1 and 2 are the begin and end-of-sequence tokens of the tiny target.
    assert ids.tolist() == [1, 2, 50, 100, 150]


def test_build_drafter_trained_with_a_reduced_vocabulary_keeps_its_tokens(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    fields = drafter_dialects.speculators_config(draft_vocab_size=len(DRAFT_IDS))
    drafter = tiny_models.write_directory(tmp_path / "d", fields, drafter_dialects.reduced_tensors())
    config = replace(tiny_config, draft_checkpoint=str(drafter), weight_dtype="float32")
    report = build_engine(config)
    assert report.manifest.drafter_config is not None
    assert report.manifest.drafter_config.draft_vocab_size == len(DRAFT_IDS)
    assert read_file(config.output_dir / "heads.safetensors")["d2t"].read().tolist() == list(DRAFT_IDS)
    counts = write_counts(tmp_path / "counts.json", 192, [])
    with pytest.raises(ConfigError, match="has a draft vocabulary of 64 tokens of its own"):
        build_engine(replace(config, draft_vocab_size=32, draft_vocab_counts=counts, overwrite=True))


def test_build_progress_ends_at_one_and_never_goes_back(tiny_config: BuildConfig) -> None:
    seen: list[tuple[str, float]] = []
    report = build_engine(tiny_config, progress=lambda step, done: seen.append((step, done)))
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)
    assert list(dict.fromkeys(step for step, _ in seen)) == list(report.seconds) == [*STEPS]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 513}, "exceeds the target's max_position_embeddings 512"),
        ({"max_draft_len": 6}, "exceeds the block of 5 tokens"),
        ({"max_num_tokens": 5}, "cannot hold one verified block of 6 tokens"),
    ],
)
def test_build_limit_that_does_not_fit_the_models_is_refused(
    tiny_config: BuildConfig, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(replace(tiny_config, **changes))
    assert not tiny_config.output_dir.parent.exists()


def test_build_counts_of_another_vocabulary_are_refused(tiny_config: BuildConfig, tmp_path: Path) -> None:
    counts = write_counts(tmp_path / "counts.json", 193, [])
    with pytest.raises(ConfigError, match="counts a vocabulary of 193 tokens, the target has 192"):
        build_engine(replace(tiny_config, draft_vocab_size=5, draft_vocab_counts=counts))


def test_build_existing_engine_needs_overwrite(tiny_config: BuildConfig) -> None:
    first = build_engine(tiny_config).manifest
    with pytest.raises(UsageError, match="add --overwrite"):
        build_engine(tiny_config)
    second = build_engine(replace(tiny_config, overwrite=True, draft_checkpoint=None)).manifest
    assert first.engine_hash != second.engine_hash
    assert open_engine_dir(tiny_config.output_dir).manifest == second
    assert not (tiny_config.output_dir / "heads.safetensors").exists()


def test_build_drafter_of_another_target_leaves_nothing(tiny_config: BuildConfig, tmp_path: Path) -> None:
    drafter = tiny_models.write_drafter(tmp_path / "d", hidden_size=128)
    with pytest.raises((CheckpointError, ConfigError)):
        build_engine(replace(tiny_config, draft_checkpoint=str(drafter)))
    assert not tiny_config.output_dir.exists()
    assert not list(tmp_path.rglob("*.building"))


def test_build_damaged_weights_leave_nothing(tiny_config: BuildConfig, tmp_path: Path) -> None:
    target = tiny_models.write_target(tmp_path / "t")
    path = target / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        build_engine(replace(tiny_config, target_checkpoint=str(target)))
    assert os.listdir(tiny_config.output_dir.parent) == []


def test_build_too_small_a_disk_is_refused_before_writing(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DeviceError, match="needs 0 MB and the disk of .* has 0 MB left"):
        build_engine(tiny_config)
    assert os.listdir(tiny_config.output_dir.parent) == []


def test_build_more_caches_than_memory_warns_and_names_the_flags(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builder.os, "sysconf", lambda _: 100)
    build_engine(tiny_config)
    assert "this machine has 0.0 GB; lower --max_batch_size or --max_seq_len" in caplog.text
