"""Tables that `build` and `inspect` print."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_dspark.engine_dir import EngineDirectory, GpuBuild, Manifest, ModelEntry

if TYPE_CHECKING:
    from trtllm_dspark.build.plan import BuildPlan
    from trtllm_dspark.build.report import BuildReport, VerifyErrors

Row = tuple[str, str]


def format_size(size: int) -> str:
    """Format bytes as kB, MB or GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def print_table(rows: Iterable[Row]) -> None:
    """Print name and value columns on stdout; an empty name continues the row above.

    Values are never wrapped or cut: hashes and paths are there to be copied.
    """
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def build_table(report: BuildReport) -> list[Row]:
    """Return the closing table of a build: what, sizes, limits, times."""
    rows = [("engine", str(report.output_dir)), *_model_rows(report.manifest), *_file_rows(report.manifest)]
    rows += _limit_rows(report.manifest)
    rows.append(("caches, full", format_size(report.kv_cache_bytes)))
    rows.append(("verified", _errors(report.errors)))
    rows.append(("peak memory", format_size(report.peak_memory_bytes)))
    steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    rows.append(("time", f"{sum(report.seconds.values()):.1f} s ({steps})"))
    return rows


def estimate_table(plan: BuildPlan) -> list[Row]:
    """Return what a GPU engine will take, printed before it is built."""
    memory = plan.device_memory
    if memory is None:
        return []
    parts = {
        "target weights": memory.target_weight_bytes,
        "drafter weights": memory.drafter_weight_bytes,
        "target caches": memory.target_kv_bytes,
        "drafter caches": memory.drafter_kv_bytes,
        "activations": memory.activation_bytes,
        "attention workspace": memory.attention_workspace_bytes,
        "CUDA graphs": memory.graph_bytes,
    }
    from trtllm_dspark.build.tensorrt import engine_profiles

    rows = [("device memory", f"{format_size(memory.total_bytes):>10}  in all (estimate)")]
    rows += [("", f"{format_size(size):>10}  {name}") for name, size in parts.items() if size]
    for index, profile in enumerate(engine_profiles(plan.limits, plan.config.gpu.opt_num_tokens)):
        text = (
            f"{profile.name}: {profile.num_rows} requests, rows of {profile.row_len}, {profile.num_tokens} tokens, "
            f"tuned for {profile.tuned('T')}"
        )
        rows.append(("" if index else "profiles", text))
    return rows


def _errors(errors: VerifyErrors | None) -> str:
    if errors is None:
        return "files and fused layers; compiled, not executed"
    parts = [f"logits {errors.logits:.1e}"]
    if errors.features is not None and errors.draft_logits is not None:
        parts += [f"features {errors.features:.1e}", f"draft logits {errors.draft_logits:.1e}"]
    return ", ".join(parts) + " from the reference (relative)"


def inspect_table(engine: EngineDirectory) -> list[Row]:
    """Return the table of `inspect`: everything the manifest and the side tables say."""
    manifest = engine.manifest
    rows = [("engine", str(engine.path)), ("engine hash", manifest.engine_hash), *_model_rows(manifest)]
    rows += [*_limit_rows(manifest), *_file_rows(manifest)]
    for name in ("cost_table.json", "calibration.json"):
        rows.append((name, _side_table(engine.path / name, manifest.engine_hash)))
    rows.append(("built with", ", ".join(f"{tool} {version}" for tool, version in manifest.tools.items())))
    return rows


def _side_table(path: Path, engine_hash: str) -> str:
    if not path.is_file():
        return "none"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"unreadable ({error})"
    if not isinstance(table, dict) or table.get("engine_hash") != engine_hash:
        return "belongs to another engine"
    return format_size(path.stat().st_size)


def _model_rows(manifest: Manifest) -> list[Row]:
    target = manifest.target_config
    rows = [
        ("backend", " for ".join(filter(None, (manifest.backend, ", ".join(manifest.gpu_architectures))))),
        (
            "target",
            f"{target.architecture}, {target.num_layers} layers of {target.hidden_size}, "
            f"vocabulary {target.vocab_size}, weights {_stored(manifest.target)}",
        ),
    ]
    if manifest.gpu is not None:
        rows.append(("lowering", _lowering(manifest.gpu)))
    drafter = manifest.drafter_config
    if drafter is None or manifest.drafter is None:
        return [*rows, ("drafter", "none")]
    stored = f"vocabulary {drafter.draft_vocab_size}, weights {_stored(manifest.drafter)}"
    size = drafter.backbone.hidden_size
    if drafter.autoregressive:
        text = f"{drafter.kind}, a layer of {size}, drafts of {drafter.block_size}, {stored}"
    else:
        text = (
            f"{drafter.backbone.num_layers} layers of {size}, blocks of {drafter.block_size}, "
            f"{drafter.markov_head} head of rank {drafter.markov_rank}, {stored}"
        )
    layers = ", ".join(map(str, drafter.target_layer_ids))
    return [*rows, ("drafter", text), ("target layers", layers)]


def _stored(model: ModelEntry) -> str:
    return model.weight_dtype if model.dtype in (None, model.weight_dtype) else f"{model.weight_dtype} in {model.dtype}"


def _lowering(gpu: GpuBuild) -> str:
    parts = [gpu.lowering, f"caches of {gpu.cache_len} tokens"]
    if gpu.plugin_contract is not None:
        parts.append(f"{gpu.acceptance} acceptance, {gpu.schedule} schedule, contract {gpu.plugin_contract[:12]}")
    parts += [name for name, on in (("stripped", gpu.strip_plan), ("weight streaming", gpu.weight_streaming)) if on]
    return ", ".join(parts)


def _file_rows(manifest: Manifest) -> list[Row]:
    rows = [
        ("" if index else "files", f"{format_size(e.size):>10}  {e.name}") for index, e in enumerate(manifest.files)
    ]
    return [*rows, ("", f"{format_size(sum(entry.size for entry in manifest.files)):>10}  in all")]


def _limit_rows(manifest: Manifest) -> list[Row]:
    limits = manifest.limits
    text = (
        f"{limits.max_batch_size} requests, {limits.max_seq_len} tokens each, {limits.max_num_tokens} tokens a pass, "
        f"{limits.max_draft_len} draft tokens"
    )
    return [("limits", text)]
