"""Everything about a build that is known before the first weight is read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.build._choices import GPU_BACKENDS, WeightDtype
from trtllm_dspark.build.config import BuildConfig, resolve_limits
from trtllm_dspark.build.draft_vocab import choose_draft_vocab, read_token_counts
from trtllm_dspark.build.estimate import (
    DrafterParts,
    SizeEstimate,
    count_drafter_parameters,
    count_parameters,
    estimate_sizes,
)
from trtllm_dspark.build.gpus import Gpu, find_gpu
from trtllm_dspark.build.tensorrt.device import find_device
from trtllm_dspark.build.tensorrt.memory import GIB, DeviceMemory, MemoryModel, check_device_memory
from trtllm_dspark.build.tensorrt.profiles import check_volumes, engine_profiles
from trtllm_dspark.checkpoint import (
    Checkpoint,
    DrafterCheckpoint,
    describe_drafter,
    describe_target,
    has_weights,
    load_drafter,
    load_target,
    share_equal_tensors,
    spread_draft_vocab,
    tie_equal_head,
)
from trtllm_dspark.checkpoint.config import DrafterConfig
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Opened checkpoints and resolved settings of one build.

    Attributes:
        drafter_config: the drafter as it will be built, with its reduced vocabulary.
        draft_vocab: [Vd] int64 ids of the target's vocabulary that the drafter proposes; None = all.
        device_memory: estimate for a GPU; None on a CPU.
        gpu_architectures: what a GPU engine is compiled for.
    """

    config: BuildConfig
    target: Checkpoint
    drafter: DrafterCheckpoint | None
    drafter_config: DrafterConfig | None
    draft_vocab: NDArray[np.int64] | None
    limits: BuildLimits
    estimate: SizeEstimate
    device_memory: DeviceMemory | None = None
    gpu_architectures: tuple[str, ...] = ()

    @property
    def weight_dtype(self) -> WeightDtype:
        """How the target's linear layers are stored."""
        return self.config.precision.weight_dtype

    @property
    def draft_weight_dtype(self) -> WeightDtype:
        """How the drafter's linear layers are stored."""
        return self.config.draft_precision.weight_dtype

    @property
    def uses_plugins(self) -> bool:
        """Whether the graphs hold plugin nodes."""
        return self.config.gpu.uses_plugins(self.config.backend)

    def as_json(self) -> dict[str, Any]:
        """Return what `--dry_run` prints."""
        return {
            "config": {**self.config.as_json(), **self._settled()},
            "target": {
                "format": self.target.format,
                "files": [str(file.path) for file in self.target.files],
                "config": asdict(self.target.config),
                "parameters": count_parameters(self.target.config),
            },
            "drafter": self._drafter_json(),
            "estimate": self.estimate.as_json(),
            **self._device_json(),
        }

    def _settled(self) -> dict[str, Any]:
        """Return what flags leave open and the plan decided."""
        settled: dict[str, Any] = {"weight_dtype": self.weight_dtype, "draft_weight_dtype": self.draft_weight_dtype}
        if self.config.backend in GPU_BACKENDS:
            settled |= {"dtype": self.config.precision.dtype, "draft_dtype": self.config.draft_precision.dtype}
            settled |= {"dspark_plugin": "enable" if self.uses_plugins else "disable"}
        return {**settled, "gpu_architectures": self.gpu_architectures, **asdict(self.limits)}

    def _device_json(self) -> dict[str, Any]:
        if self.device_memory is None:
            return {}
        profiles = engine_profiles(self.limits, self.config.gpu.opt_num_tokens)
        return {
            "device_memory": self.device_memory.as_json(),
            "profiles": [asdict(profile) for profile in profiles],
        }

    def _drafter_json(self) -> dict[str, Any] | None:
        if self.drafter is None or self.drafter_config is None:
            return None
        config = asdict(self.drafter_config)
        del config["extra"]
        return {
            "format": self.drafter.format,
            "files": [str(file.path) for file in self.drafter.files],
            "shares_embedding": self.drafter.shares_embedding,
            "shares_lm_head": self.drafter.shares_lm_head,
            "config": config,
            "parameters": count_drafter_parameters(self.drafter_config),
        }


def plan_build(config: BuildConfig) -> BuildPlan:
    """Open both checkpoints and settle every limit and size.

    Reads headers, and of the weights only tables that a drafter may share with its target.

    Raises:
        ConfigError: a limit does not fit the models or the GPU, or the token counts do not fit the target.
        CheckpointError: a checkpoint cannot be read, or target and drafter do not fit each other.
        DeviceError: TensorRT compiles for this machine's GPU and there is none.
    """
    target = _load_target(config)
    drafter, own_vocab = None, None
    if config.draft_checkpoint is not None:
        drafter, own_vocab = _load_drafter(config, target)
    drafter_config = None if drafter is None else drafter.config
    if drafter_config is not None and drafter_config.autoregressive and config.backend in GPU_BACKENDS:
        raise ConfigError(
            f"a drafter of kind {drafter_config.kind} runs on --backend onnxruntime only; use that, or a DSpark drafter"
        )
    limits = resolve_limits(config, target.config, drafter_config)
    vocab = _draft_vocab(config, target)
    if own_vocab is not None and vocab is not None:
        raise ConfigError(
            f"the drafter has a draft vocabulary of {own_vocab.size} tokens of its own; leave out --draft_vocab_size"
        )
    vocab = own_vocab if vocab is None else vocab
    if drafter_config is not None and vocab is not None:
        drafter_config = replace(drafter_config, draft_vocab_size=int(vocab.size))
    parts = None
    if drafter is not None and drafter_config is not None:
        own_head = vocab is not None or not drafter.shares_lm_head
        parts = DrafterParts(drafter_config, not drafter.shares_embedding, own_head)
    estimate = estimate_sizes(
        limits,
        target.config,
        parts,
        weight_dtype=config.precision.weight_dtype,
        draft_weight_dtype=config.draft_precision.weight_dtype,
    )
    plan = BuildPlan(config, target, drafter, drafter_config, vocab, limits, estimate)
    return plan if config.backend not in GPU_BACKENDS else _with_gpu(plan, parts)


def _with_gpu(plan: BuildPlan, parts: DrafterParts | None) -> BuildPlan:
    """Settle what a GPU engine is compiled for and check that it fits."""
    config, options = plan.config, plan.config.gpu
    check_volumes(plan.limits, plan.target.config, plan.drafter_config, plan.uses_plugins)
    model = MemoryModel(
        plan.limits, plan.target.config, parts, config.precision, config.draft_precision, plan.uses_plugins
    )
    gpu: Gpu | None = None
    if options.gpu is not None:
        gpu = find_gpu(options.gpu)
    elif not options.gpu_architectures:
        # Only TensorRT leaves this open: it compiles for the GPU of this machine.
        gpu = find_device()
    memory = model.estimate()
    size = None if gpu is None else gpu.memory_bytes
    if options.gpu_memory_gib is not None:
        size = int(options.gpu_memory_gib * GIB)
    if size is not None:
        check_device_memory(memory, size, options.kv_fraction)
    architectures = options.gpu_architectures if gpu is None else (gpu.architecture,)
    config.check_architectures(architectures)
    return replace(plan, device_memory=memory, gpu_architectures=architectures)


def _load_target(config: BuildConfig) -> Checkpoint:
    if config.weights_optional and not has_weights(config.target_checkpoint):
        return describe_target(config.target_checkpoint)
    return tie_equal_head(load_target(config.target_checkpoint))


def _load_drafter(config: BuildConfig, target: Checkpoint) -> tuple[DrafterCheckpoint, NDArray[np.int64] | None]:
    path = str(config.draft_checkpoint)
    if config.weights_optional and not has_weights(path):
        # Which tokens a reduced vocabulary has is a tensor; its size is all that shapes need.
        return describe_drafter(path, target.config), None
    drafter = load_drafter(path, target.config)
    if not config.weights_optional or has_weights(config.target_checkpoint):
        # DeepSpec's releases hold frozen copies of the target's embedding and head; an engine needs them once.
        drafter = share_equal_tensors(drafter, target)
    return spread_draft_vocab(drafter)


def _draft_vocab(config: BuildConfig, target: Checkpoint) -> NDArray[np.int64] | None:
    if config.draft_vocab_size is None or config.draft_vocab_counts is None:
        return None
    counts = read_token_counts(config.draft_vocab_counts, target.config.vocab_size)
    return choose_draft_vocab(counts, config.draft_vocab_size, special_token_ids(target))


def special_token_ids(target: Checkpoint) -> set[int]:
    """Return end-of-sequence, begin and padding ids and every token the tokenizer marks as special."""
    model = target.config
    named = (*model.eos_token_ids, model.bos_token_id, model.pad_token_id)
    special = {token for token in named if token is not None}
    if target.tokenizer is not None:
        added = json.loads(target.tokenizer.tokenizer_json).get("added_tokens", [])
        special |= {int(token["id"]) for token in added if token.get("special")}
    return {token for token in special if 0 <= token < model.vocab_size}
