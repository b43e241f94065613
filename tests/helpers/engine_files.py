"""A tiny engine directory without a model behind it: what the format's tests damage in turn."""

from __future__ import annotations

from pathlib import Path

from helpers.tiny_engine import small_drafter
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine_dir import BuildLimits, FileEntry, Manifest, ModelEntry, describe_file

WEIGHTS = "target.onnx.data"


def tiny_target_config() -> ModelConfig:
    """Return a two-layer configuration over 32 tokens."""
    return ModelConfig(
        architecture="llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )


def tiny_drafter_config() -> DrafterConfig:
    """Return a drafter of that target with blocks of four."""
    target = tiny_target_config()
    return small_drafter(target, backbone=target, block_size=4, target_layer_ids=(0, 1), markov_rank=4)


def fill_engine_dir(path: Path, payload: bytes = b"weights") -> Manifest:
    """Write two files and a manifest that fits them."""
    path.mkdir(parents=True, exist_ok=True)
    (path / WEIGHTS).write_bytes(payload)
    (path / "target.onnx").write_bytes(b"graph")
    manifest = Manifest(
        backend="onnxruntime",
        limits=BuildLimits(max_batch_size=2, max_seq_len=64, max_num_tokens=16, max_draft_len=4),
        target=ModelEntry("int8", (FileEntry("model.gguf", 3, "0" * 64),)),
        target_config=tiny_target_config(),
        drafter=ModelEntry("int8", (FileEntry("model.safetensors", 3, "1" * 64),)),
        drafter_config=tiny_drafter_config(),
        files=(describe_file(path / "target.onnx", path), describe_file(path / WEIGHTS, path)),
        tools={"onnx": "1.0"},
    )
    (path / "manifest.json").write_text(manifest.to_json())
    return manifest
