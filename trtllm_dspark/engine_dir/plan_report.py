"""What the builder said of a plan, kept beside it: the plan itself opens on its GPU only (docs/file_formats.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trtllm_dspark.engine_dir._codec import Fields
from trtllm_dspark.engine_dir.directory import EngineDirectory
from trtllm_dspark.engine_dir.versions import check_schema
from trtllm_dspark.errors import EngineError

PLAN_REPORT_SCHEMA = "trtllm_dspark.plan_report"
PLAN_REPORT_VERSION = 1
_SUFFIX = ".layers.json"


@dataclass(frozen=True, slots=True)
class Binding:
    """An input or output; `shape` is in numbers and symbols (R requests, S widest row, T tokens, L logits)."""

    name: str
    mode: str
    dtype: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Smallest, tuned and largest extents of an input in a profile."""

    profile: str
    input: str
    smallest: tuple[int, ...]
    tuned: tuple[int, ...]
    largest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """A fused layer: its kernel, its kind and the outputs it writes, as `name [extents]`."""

    name: str
    kind: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Content of `NAME.ARCH.layers.json`; sizes in bytes."""

    plan: str
    architecture: str
    weight_bytes: int
    activation_bytes: int
    profiles: tuple[ShapeRange, ...]
    bindings: tuple[Binding, ...]
    layers: tuple[Layer, ...]


def write_plan_report(directory: Path, report: PlanReport) -> Path:
    """Write the report beside its plan and return its path."""
    path = directory / (Path(report.plan).stem + _SUFFIX)
    body = {"schema": PLAN_REPORT_SCHEMA, "schema_version": PLAN_REPORT_VERSION, **asdict(report)}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return path


def read_plan_reports(engine: EngineDirectory) -> tuple[PlanReport, ...]:
    """Return the reports of all plans of an engine, in the order of its file list.

    Raises:
        EngineError: a report cannot be read.
    """
    names = [entry.name for entry in engine.manifest.files if entry.name.endswith(_SUFFIX)]
    return tuple(_read(engine.path / name) for name in names)


def _read(path: Path) -> PlanReport:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} cannot be read ({error}); build the engine again") from error
    check_schema(raw, PLAN_REPORT_SCHEMA, PLAN_REPORT_VERSION, str(path), "build the engine again")
    fields = Fields(raw, str(path))
    return PlanReport(
        plan=fields.string("plan"),
        architecture=fields.string("architecture"),
        weight_bytes=fields.integer("weight_bytes"),
        activation_bytes=fields.integer("activation_bytes"),
        profiles=tuple(
            ShapeRange(
                entry.string("profile"),
                entry.string("input"),
                *(entry.integers(name) for name in ("smallest", "tuned", "largest")),
            )
            for entry in fields.children("profiles")
        ),
        bindings=tuple(
            Binding(entry.string("name"), entry.string("mode"), entry.string("dtype"), entry.strings("shape"))
            for entry in fields.children("bindings")
        ),
        layers=tuple(
            Layer(entry.string("name"), entry.string("kind"), entry.strings("outputs"))
            for entry in fields.children("layers")
        ),
    )
