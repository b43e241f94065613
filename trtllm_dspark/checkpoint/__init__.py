"""Read target models and drafters into one canonical configuration and named arrays."""

from trtllm_dspark.checkpoint.arrays import LazyArrays
from trtllm_dspark.checkpoint.autoregressive import autoregressive_config, autoregressive_shapes
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig, RopeScaling
from trtllm_dspark.checkpoint.drafter import load_drafter
from trtllm_dspark.checkpoint.paths import resolve_path
from trtllm_dspark.checkpoint.sharing import share_equal_tensors, spread_draft_vocab, tie_equal_head
from trtllm_dspark.checkpoint.target import load_target
from trtllm_dspark.checkpoint.types import Checkpoint, CheckpointFile, DrafterCheckpoint, TokenizerAssets
from trtllm_dspark.checkpoint.weightless import describe_drafter, describe_target, has_weights

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "DrafterCheckpoint",
    "DrafterConfig",
    "LazyArrays",
    "ModelConfig",
    "RopeScaling",
    "TokenizerAssets",
    "autoregressive_config",
    "autoregressive_shapes",
    "describe_drafter",
    "describe_target",
    "has_weights",
    "load_drafter",
    "load_target",
    "resolve_path",
    "share_equal_tensors",
    "spread_draft_vocab",
    "tie_equal_head",
]
