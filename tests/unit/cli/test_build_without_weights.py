"""`build --dry_run` from configurations alone: parameters, estimate and profiles of the released pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.cli.main import main

RELEASED = Path(__file__).parents[2] / "fixtures" / "released_configs"


def dry_run(size: str, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    models = ["--model_config", str(RELEASED / f"qwen3_{size}" / "config.json")]
    models += ["--draft_model_config", str(RELEASED / f"dspark_qwen3_{size}_block7")]
    code = main(["build", *models, "--dry_run", *flags])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code == 0 else None, captured.err


@pytest.mark.parametrize("size", ["4b", "8b", "14b"])
def test_released_pair_is_planned_for_a_gpu(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, _ = dry_run(size, "--backend", "tensorrt_rtx", "--gpu", "RTX PRO 6000 Blackwell", capsys=capsys)
    assert code == 0
    assert plan["config"]["gpu_architectures"] == ["sm120"]
    assert plan["config"]["max_draft_len"] == 7
    weights = plan["device_memory"]["target_weight_bytes"]
    # 16-bit weights and the rotary table: norms are left out of the estimate.
    assert weights == pytest.approx(2 * plan["target"]["parameters"], rel=0.001)
    decode, prefill = plan["profiles"]
    assert (decode["row_len"], decode["num_tokens"], prefill["num_tokens"]) == (8, 64, 256)


def test_weight_formats_shrink_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for flags in ((), ("--weight_dtype", "int8"), ("--weight_dtype", "int4")):
        _, plan, _ = dry_run("8b", "--backend", "tensorrt_rtx", "--gpu", "L40S", *flags, capsys=capsys)
        sizes.append(plan["device_memory"]["target_weight_bytes"])
    layers = 36 * (4096 * 128 * 48 + 4096 * 4096 + 3 * 4096 * 12288)
    assert sizes[0] - sizes[1] == layers
    assert sizes[1] - sizes[2] == layers // 2 - layers * 2 // 128


def test_plugins_count_their_workspace_and_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--backend", "tensorrt", "--gpu", "H200")
    _, plain, _ = dry_run("8b", *flags, capsys=capsys)
    _, plugin, _ = dry_run("8b", *flags, "--dspark_plugin", "enable", "--dspark_plugin_library", "l.so", capsys=capsys)
    assert plain["device_memory"]["attention_workspace_bytes"] == 0
    # 5 pieces of 512 positions, 256 tokens, 32 heads of 128 and two sums each.
    assert plugin["device_memory"]["attention_workspace_bytes"] == 5 * 256 * 32 * 130 * 4
    assert plugin["device_memory"]["activation_bytes"] < plain["device_memory"]["activation_bytes"]
    assert plugin["device_memory"]["target_kv_bytes"] < plain["device_memory"]["target_kv_bytes"]


def test_pair_larger_than_the_named_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = dry_run("14b", "--backend", "tensorrt_rtx", "--gpu", "RTX 4090", capsys=capsys)
    assert code == 2
    assert "the GPU has 23.99; lower --max_num_tokens, store weights as --weight_dtype int8 or int4" in error
    code, _, error = dry_run(
        "8b", "--backend", "tensorrt_rtx", "--gpu", "RTX 5090", "--max_batch_size", "64", capsys=capsys
    )
    assert code == 2
    assert "lower --max_batch_size or --max_seq_len" in error


def test_cpu_engine_is_planned_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, _ = dry_run("4b", capsys=capsys)
    assert code == 0
    assert plan["target"]["parameters"] == 4_022_468_096
    assert "device_memory" not in plan


def test_checkpoint_flag_takes_a_configuration_for_a_dry_run_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--target_checkpoint", str(RELEASED / "qwen3_4b"), "--output_dir", str(tmp_path / "e")]
    assert main(["build", *flags, "--dry_run"]) == 0
    capsys.readouterr()
    assert main(["build", *flags]) == 3
    assert "no model.safetensors" in capsys.readouterr().err
