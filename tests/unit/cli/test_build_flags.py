"""Flags of `build`: bad ones are one sentence with the right exit code, trtllm-build's name their replacement."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trtllm_dspark.cli._removed_flags import REMOVED_FLAGS
from trtllm_dspark.cli.build import add_arguments
from trtllm_dspark.cli.main import main


def build(*flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and the one line that stderr must hold."""
    try:
        code = main(["build", *flags])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("trtllm-dspark build: ")
    return code, lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give the target once, with --target_checkpoint or --model_config"),
        (("--target_checkpoint", "x", "--model_config", "y", "--dry_run"), "give the target once"),
        (("--target_checkpoint", "x", "--draft_checkpoint", "y", "--draft_model_config", "z"), "at most once"),
        (("--model_config", "y"), "describe models without weights; add --dry_run"),
        (("--target_checkpoint",), "expected one argument"),
        (("--target_checkpoint", "x", "--speed", "9"), "unrecognized arguments: --speed 9"),
        (("--target_checkpoint", "x", "--max_batch", "9"), "unrecognized arguments: --max_batch 9"),
        (("--target_checkpoint", "x", "--max_batch_size", "many"), "invalid int value: 'many'"),
        (("--target_checkpoint", "x", "--max_batch_size", "0"), "an integer from 1 to 4096, got 0"),
        (("--target_checkpoint", "x", "--max_batch_size", "9" * 30), "an integer from 1 to 4096"),
        (("--target_checkpoint", "x", "--max_seq_len", "1"), "--max_seq_len must be an integer from 2"),
        (("--target_checkpoint", "x", "--max_num_tokens", "-3"), "--max_num_tokens must be an integer from 1"),
        (("--target_checkpoint", "x", "--max_num_tokens", "7"), "is below --max_batch_size 8"),
        (("--target_checkpoint", "x", "--weight_dtype", "int3"), "one of int8, float32, w8a8, got 'int3'"),
        (
            ("--target_checkpoint", "x", "--backend", "tensorrt", "--dspark_plugin", "enable"),
            "needs --dspark_plugin_library",
        ),
        (("--target_checkpoint", "x", "--backend", "tensorrt_rtx"), "needs --gpu NAME, or --gpu_architecture"),
        (("--target_checkpoint", "x", "--dtype", "float16"), "--dtype is for GPU engines"),
        (("--target_checkpoint", "x", "--gpu_architecture", "sm89"), "--gpu_architecture is for GPU engines"),
        (("--target_checkpoint", "x", "--strip_plan"), "--strip_plan is for GPU engines"),
        (
            ("--target_checkpoint", "x", "--backend", "tensorrt_rtx", "--gpu", "L4", "--no_profile"),
            "--no_profile is for onnxruntime, a tensorrt_rtx build measures nothing",
        ),
        (("--target_checkpoint", "x", "--workers", "2"), "--workers is for GPU engines"),
        (("--target_checkpoint", "x", "--profiling_verbosity", "all"), "invalid choice: 'all'"),
        (
            ("--target_checkpoint", "x", "--backend", "pytorch"),
            "--backend must be one of onnxruntime, tensorrt, tensorrt_rtx, got 'pytorch'",
        ),
        (("--target_checkpoint", "x", "--max_draft_len", "3"), "--max_draft_len needs a drafter"),
        (("--target_checkpoint", "x", "--draft_weight_dtype", "int8"), "--draft_weight_dtype needs a drafter"),
        (("--target_checkpoint", "x", "--draft_vocab_size", "9"), "belong together"),
        (("--target_checkpoint", "x", "--draft_vocab_counts", "f"), "belong together"),
        (("--target_checkpoint", "x", "--draft_checkpoint", "y", "--max_draft_len", "0"), "from 1 to 64, got 0"),
    ],
)
def test_build_bad_flag_is_one_sentence_and_exit_code_2(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = build(*flags, capsys=capsys)
    assert code == 2
    assert message in line


@pytest.mark.parametrize("name", sorted(REMOVED_FLAGS))
def test_build_trtllm_build_flag_names_its_replacement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = build(f"--{name}", "value", capsys=capsys)
    assert code == 2
    assert f"--{name} is a flag of trtllm-build: {REMOVED_FLAGS[name]}" in line


# Every flag of the last trtllm-build.
TRTLLM_BUILD = """
    checkpoint_dir model_config build_config model_cls_file model_cls_name output_dir max_batch_size max_input_len
    max_seq_len max_decoder_seq_len max_beam_width max_num_tokens opt_num_tokens max_encoder_input_len
    max_prompt_embedding_table_size max_multimodal_len kv_cache_type paged_kv_cache input_timing_cache
    output_timing_cache profiling_verbosity strip_plan weight_sparsity weight_streaming fast_build workers
    enable_debug_output visualize_network dry_run monitor_memory logits_dtype gather_context_logits
    gather_generation_logits gather_all_token_logits lora_dir lora_ckpt_source lora_target_modules max_lora_rank
    speculative_decoding_mode max_draft_len bert_attention_plugin gpt_attention_plugin gemm_plugin gemm_swiglu_plugin
    fp8_rowwise_gemm_plugin lora_plugin dora_plugin moe_plugin mamba_conv1d_plugin nccl_plugin low_latency_gemm_plugin
    low_latency_gemm_swiglu_plugin gemm_allreduce_plugin context_fmha bert_context_fmha_fp32_acc remove_input_padding
    tokens_per_block use_paged_context_fmha use_fp8_context_fmha fuse_fp4_quant multiple_profiles paged_state
    streamingllm norm_quant_fusion reduce_fusion user_buffer use_fused_mlp pp_reduce_scatter auto_parallel
    gpus_per_node cluster_key
""".split()


def test_build_knows_every_flag_of_trtllm_build() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {f"--{name}" for name in TRTLLM_BUILD} <= known
    assert not {"--strip_plan", "--workers", "--model_config"} & {f"--{name}" for name in REMOVED_FLAGS}


def test_build_checkpoint_dir_points_to_target_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = build("--checkpoint_dir", "ckpt", "--output_dir", "e", capsys=capsys)
    assert code == 2
    assert "--target_checkpoint" in line


@pytest.mark.parametrize("spec", ["nowhere/at/all", "package:no_such_package"])
def test_build_missing_checkpoint_is_exit_code_3(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = build("--target_checkpoint", spec, "--output_dir", str(tmp_path / "e"), capsys=capsys)
    assert code == 3
    assert list(tmp_path.iterdir()) == []
