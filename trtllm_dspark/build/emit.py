"""Write the graphs and side files of an engine from opened checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_dspark.build._choices import DTYPES, GPU_BACKENDS
from trtllm_dspark.build.config import BuildConfig, Precision
from trtllm_dspark.build.plan import BuildPlan
from trtllm_dspark.build.report import StepClock
from trtllm_dspark.checkpoint import TokenizerAssets
from trtllm_dspark.graph import (
    DrafterSource,
    WeightDtype,
    WrittenTarget,
    write_autoregressive,
    write_drafter,
    write_heads,
    write_target,
)
from trtllm_dspark.graph.lowering import ORT, Lowering, TrtPluginLowering
from trtllm_dspark.graph.round_graphs import RoundDrafter, write_draft, write_verify
from trtllm_dspark.graph.round_options import RoundOptions

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"
SPECIAL_TOKENS_FILE = "special_tokens.json"
# Fused query-key-value, output, gate-up and down: what a decoder layer stores.
_MATRICES_PER_LAYER = 4
_WEIGHT_ONLY: dict[str, WeightDtype] = {"int8": "w8a16", "int4": "w4a16", "fp8": "fp8"}


def graph_weight_dtype(config: BuildConfig, precision: Precision) -> WeightDtype:
    """Return the graphs' name of a weight format: a GPU's int8 is another one than ONNX Runtime's."""
    name: WeightDtype = precision.weight_dtype  # type: ignore[assignment]
    return _WEIGHT_ONLY.get(name, name) if config.backend in GPU_BACKENDS else name


def emit_target(plan: BuildPlan, directory: Path, clock: StepClock, lowering: Lowering = ORT) -> WrittenTarget:
    """Write the target's graph into `directory`."""
    model = plan.target.config
    layers = () if plan.drafter_config is None else plan.drafter_config.target_layer_ids
    with clock.step("target", _MATRICES_PER_LAYER * model.num_layers + 1) as advance:
        return write_target(
            directory,
            model,
            plan.target.arrays,
            max_seq_len=plan.limits.max_seq_len,
            feature_layer_ids=layers,
            weight_dtype=graph_weight_dtype(plan.config, plan.config.precision),
            lowering=lowering,
            progress=advance,
        )


def emit_drafter(
    plan: BuildPlan, directory: Path, target: WrittenTarget, clock: StepClock, lowering: Lowering = ORT
) -> None:
    """Write the drafter's graphs beside the target's; without a drafter nothing."""
    if plan.drafter is None or plan.drafter_config is None:
        return
    config, arrays = plan.drafter_config, plan.drafter.arrays
    source = DrafterSource(config, arrays, plan.target.config, plan.target.arrays, target)
    with clock.step("drafter", (_MATRICES_PER_LAYER + 1) * config.backbone.num_layers + 1) as advance:
        shared: dict[str, Any] = {
            "max_seq_len": plan.limits.max_seq_len,
            "max_draft_len": plan.limits.max_draft_len,
            "draft_token_ids": plan.draft_vocab,
            "weight_dtype": graph_weight_dtype(plan.config, plan.config.draft_precision),
            "progress": advance,
        }
        if config.autoregressive:
            write_autoregressive(directory, source, **shared)
        else:
            write_drafter(directory, source, lowering=lowering, **shared)


def emit_round(
    plan: BuildPlan,
    directory: Path,
    clock: StepClock,
    lowering: TrtPluginLowering,
    draft_lowering: TrtPluginLowering,
    options: RoundOptions,
) -> None:
    """Write the verify graph and, with a drafter, the draft graph of a plugin engine."""
    model, config = plan.target.config, plan.drafter_config
    weight_dtype = graph_weight_dtype(plan.config, plan.config.precision)
    draft_dtype = graph_weight_dtype(plan.config, plan.config.draft_precision)
    drafter = None
    if plan.drafter is not None and config is not None:
        drafter = RoundDrafter(
            config, plan.drafter.arrays, draft_lowering, plan.limits.max_draft_len, draft_dtype, plan.draft_vocab
        )
    with clock.step("target", _MATRICES_PER_LAYER * model.num_layers + 1) as advance:
        target = write_verify(
            directory,
            model,
            plan.target.arrays,
            max_seq_len=plan.limits.max_seq_len,
            lowering=lowering,
            options=options,
            drafter=drafter,
            weight_dtype=weight_dtype,
            progress=advance,
        )
    if plan.drafter is None or config is None:
        return
    with clock.step("drafter", _MATRICES_PER_LAYER * config.backbone.num_layers + 1) as advance:
        write_draft(
            directory,
            DrafterSource(config, plan.drafter.arrays, model, plan.target.arrays, target),
            max_seq_len=plan.limits.max_seq_len,
            max_draft_len=plan.limits.max_draft_len,
            max_num_tokens=plan.limits.max_num_tokens,
            lowering=draft_lowering,
            options=options,
            draft_token_ids=plan.draft_vocab,
            weight_dtype=draft_dtype,
            progress=advance,
        )


def emit_heads(plan: BuildPlan, directory: Path) -> None:
    """Write the sequential and confidence heads; without a drafter nothing."""
    if plan.drafter is None or plan.drafter_config is None:
        return
    stored = plan.draft_weight_dtype
    write_heads(
        directory,
        plan.drafter_config,
        plan.drafter.arrays,
        vocab_size=plan.target.config.vocab_size,
        draft_token_ids=plan.draft_vocab,
        # The core runs the heads; it takes 8-bit or float32 factors.
        weight_dtype="float32" if stored in (*DTYPES, "float32") else "int8",
    )


def emit_tokenizer(assets: TokenizerAssets, directory: Path) -> None:
    """Write tokenizer, chat template with the special tokens it sees, and generation defaults."""
    (directory / TOKENIZER_FILE).write_text(assets.tokenizer_json, encoding="utf-8")
    if assets.chat_template is not None:
        (directory / CHAT_TEMPLATE_FILE).write_text(assets.chat_template, encoding="utf-8")
        if assets.special_tokens:
            specials = json.dumps(assets.special_tokens, ensure_ascii=False, indent=2) + "\n"
            (directory / SPECIAL_TOKENS_FILE).write_text(specials, encoding="utf-8")
    text = json.dumps(assets.generation_config, indent=2) + "\n"
    (directory / GENERATION_CONFIG_FILE).write_text(text, encoding="utf-8")
