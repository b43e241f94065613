"""What `inspect` shows of plans and graphs: profiles, bindings, layers, memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from trtllm_dspark.cli._tables import Row, format_size
from trtllm_dspark.engine_dir import Binding, EngineDirectory, Layer, PlanReport, read_plan_reports

# Numbers of layers and of profiles vary, the rest of a name says what it is.
_INDEX = re.compile(r"\.\d+$")


def plan_rows(engine: EngineDirectory, *, all_layers: bool) -> list[Row]:
    """Return the rows of every plan or graph of an engine; `all_layers` lists each layer."""
    reports = read_plan_reports(engine)
    if not reports:
        return [row for name in _graphs(engine) for row in _graph_rows(engine, name)]
    return [row for report in reports for row in _report_rows(report, engine, all_layers)]


def _report_rows(report: PlanReport, engine: EngineDirectory, all_layers: bool) -> list[Row]:
    size = next(entry.size for entry in engine.manifest.files if entry.name == report.plan)
    memory = (
        f"{format_size(size)} on disk, weights {format_size(report.weight_bytes)}, "
        f"activations {format_size(report.activation_bytes)}"
    )
    rows = [(report.plan, memory), *_binding_rows(report.bindings)]
    for profile in dict.fromkeys(entry.profile for entry in report.profiles):
        ranges = [
            entry for entry in report.profiles if entry.profile == profile and not entry.input.startswith("past_")
        ]
        shapes = (f"{entry.input} {_range(entry.smallest, entry.tuned, entry.largest)}" for entry in ranges)
        rows.append((f"  profile {profile}", "; ".join(shapes)))
    kinds = Counter(_kind(layer) for layer in report.layers)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    rows.append(("  layers", f"{len(report.layers)}: {counts}"))
    if all_layers:
        rows += [("", f"{layer.kind:<16} {layer.name} -> {', '.join(layer.outputs)}") for layer in report.layers]
    return rows


def _range(smallest: Sequence[int], tuned: Sequence[int], largest: Sequence[int]) -> str:
    texts = []
    for low, middle, high in zip(smallest, tuned, largest, strict=True):
        texts.append(str(low) if low == high else f"{low}..{high}" if middle == high else f"{low}..{middle}..{high}")
    return f"[{', '.join(texts)}]"


def _kind(layer: Layer) -> str:
    return "fused attention" if "_mha" in layer.name else layer.kind


def _binding_rows(bindings: Iterable[Binding]) -> list[Row]:
    """Return inputs and outputs; those that differ by a layer's number alone are one entry."""
    groups: dict[tuple[str, str], list[Binding]] = {}
    for binding in bindings:
        groups.setdefault((binding.mode, _INDEX.sub("", binding.name)), []).append(binding)
    rows: dict[str, list[str]] = {"input": [], "output": []}
    for (mode, stem), group in groups.items():
        name = group[0].name if len(group) == 1 else f"{stem}.0..{len(group) - 1}"
        rows[mode].append(f"{name} {group[0].dtype} [{', '.join(group[0].shape)}]")
    return [(f"  {mode}s", "; ".join(texts)) for mode, texts in rows.items()]


def _graphs(engine: EngineDirectory) -> list[str]:
    return [entry.name for entry in engine.manifest.files if entry.name.endswith(".onnx")]


def _graph_rows(engine: EngineDirectory, name: str) -> list[Row]:
    import onnx
    from google.protobuf.message import DecodeError

    from trtllm_dspark.build.plan_report import graph_bindings

    try:
        model = onnx.load(engine.file(name), load_external_data=False)
    except DecodeError:
        # Its hash is right, so it was written like this: the rest of the directory is still worth showing.
        return [(name, "no ONNX graph; build the engine again")]
    kinds = Counter(node.op_type for node in model.graph.node)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8))
    nodes = f"{len(model.graph.node)}: {counts}{', ...' if len(kinds) > 8 else ''}"
    size = next((e.size for e in engine.manifest.files if e.name == f"{name}.data"), 0)
    return [(name, f"weights {format_size(size)}"), *_binding_rows(graph_bindings(model)), ("  nodes", nodes)]
