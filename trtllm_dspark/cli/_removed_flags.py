"""Flags of `trtllm-build` that mean nothing here: each fails with what replaces it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trtllm_dspark.errors import UsageError

_NO_LORA = "LoRA adapters are not supported; merge the adapter into the checkpoint"
_NO_ENCODER = "encoder-decoder models are not supported; leave it out"
_NO_PROMPT_TABLE = "prompt tables and multimodal input are not supported; leave it out"
_NO_GATHER = "a pass returns the logits that its caller asks for; leave it out"
_PLUGINS = "operators are chosen by --backend; leave it out"
_KV = "the KV cache is one contiguous row a request, written in place; size it with --max_batch_size and --max_seq_len"
_FIXED = "it is always on; leave it out"
_ABSENT = "the feature does not exist here; leave it out"
_PARALLEL = "tensor parallelism is not supported; an engine runs on one device"

REMOVED_FLAGS: dict[str, str] = {
    "checkpoint_dir": (
        "TensorRT-LLM checkpoints are not read; give the original model with --target_checkpoint "
        "(a GGUF file, a Hugging Face directory or package:NAME) and the drafter with --draft_checkpoint"
    ),
    "multiple_profiles": "a decode and a prefill profile are always built; leave it out",
    "build_config": "give the limits as flags (--max_batch_size, --max_seq_len, ...); see --help",
    "model_cls_file": "only Llama and Qwen3 networks are built; give the model with --target_checkpoint",
    "model_cls_name": "only Llama and Qwen3 networks are built; give the model with --target_checkpoint",
    "max_input_len": "a prompt may take all of --max_seq_len; use that flag",
    "max_beam_width": "beam search is not supported; leave it out",
    "speculative_decoding_mode": "the one mode is DSpark; give its drafter with --draft_checkpoint",
    "logits_dtype": "logits are float32; leave it out",
    "monitor_memory": "the closing table always shows the peak memory; leave it out",
    "weight_sparsity": _ABSENT,
    "enable_debug_output": "use --log_level debug",
    "visualize_network": "the .onnx files of the engine directory open in any ONNX viewer; leave it out",
    "kv_cache_type": _KV,
    "paged_kv_cache": _KV,
    "tokens_per_block": _KV,
    "paged_state": _KV,
    "context_fmha": _FIXED,
    "remove_input_padding": _FIXED,
    "use_fused_mlp": _FIXED,
    **dict.fromkeys(("max_encoder_input_len", "bert_attention_plugin", "bert_context_fmha_fp32_acc"), _NO_ENCODER),
    **dict.fromkeys(("max_prompt_embedding_table_size", "max_multimodal_len"), _NO_PROMPT_TABLE),
    **dict.fromkeys(("gather_context_logits", "gather_generation_logits", "gather_all_token_logits"), _NO_GATHER),
    **dict.fromkeys(
        ("lora_dir", "lora_ckpt_source", "lora_target_modules", "max_lora_rank", "lora_plugin", "dora_plugin"), _NO_LORA
    ),
    **dict.fromkeys(
        (
            "gpt_attention_plugin",
            "gemm_plugin",
            "gemm_swiglu_plugin",
            "fp8_rowwise_gemm_plugin",
            "moe_plugin",
            "mamba_conv1d_plugin",
            "low_latency_gemm_plugin",
            "low_latency_gemm_swiglu_plugin",
        ),
        _PLUGINS,
    ),
    **dict.fromkeys(
        (
            "nccl_plugin",
            "gemm_allreduce_plugin",
            "reduce_fusion",
            "user_buffer",
            "pp_reduce_scatter",
            "auto_parallel",
            "gpus_per_node",
            "cluster_key",
        ),
        _PARALLEL,
    ),
    **dict.fromkeys(
        ("use_paged_context_fmha", "use_fp8_context_fmha", "fuse_fp4_quant", "streamingllm", "norm_quant_fusion"),
        _ABSENT,
    ),
}


class _Refuse(argparse.Action):
    """Fail with the flag's replacement."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        name = (option_string or self.option_strings[0]).removeprefix("--")
        raise UsageError(f"--{name} is a flag of trtllm-build: {REMOVED_FLAGS[name]}")


def refuse_removed_flags(parser: argparse.ArgumentParser) -> None:
    """Make every flag of `REMOVED_FLAGS` fail with its replacement; they stay out of --help."""
    for name in REMOVED_FLAGS:
        parser.add_argument(f"--{name}", action=_Refuse, nargs="*", help=argparse.SUPPRESS)
