"""The parts of the project depend on each other in one direction, and files stay readable.

The table is docs/design.md's; a new edge is a decision, made here in the open.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trtllm_dspark"
# `checkpoint.config` is the vocabulary everybody shares: plain descriptions of models, no reading of files.
EVERYBODY = {"errors", "checkpoint.config", "__init__"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "checkpoint": set(),
    # The container and the rounding of small matrices are those of checkpoints.
    "graph": {"plugins", "checkpoint.safetensors_io", "checkpoint.int8_rows"},
    "engine_dir": set(),
    "engine": {"graph", "engine_dir", "plugins", "_core"},
    "build": {"checkpoint", "graph", "engine_dir", "engine", "plugins", "reference"},
    "speculation": {"engine.base", "engine.rounds", "engine_dir", "_core"},
    "load": set(),
    # SVG, HTML, JSON and CSV of whatever was measured or simulated; knows none of it.
    "reports": set(),
    "runtime": {"checkpoint", "engine", "engine_dir", "speculation", "load", "_core"},
    "evaluation": {"engine", "runtime", "speculation"},
    "traffic": {"checkpoint", "engine_dir", "runtime"},
    "serving": {"engine_dir", "runtime", "load.metrics"},
    "engine_process": {"engine", "engine_dir", "runtime", "serving", "speculation", "traffic"},
    # Drives the serving code in simulated time.
    "simulate": {"engine.base", "engine_dir", "engine_process", "load", "reports", "runtime", "speculation", "_core"},
    # The only package that imports PyTorch.
    "train": {"build", "checkpoint", "engine", "graph", "runtime", "traffic"},
    "reference": set(),
    # Builds and describes the native plugin library.
    "plugins": set(),
}
MAX_LINES = 500
SOURCES = ("*.py", "*.pyi", "*.h", "*.hpp", "*.cpp", "*.cu", "*.cuh", "*.sh", "CMakeLists.txt", "*.cmake")
FOLDERS = ("trtllm_dspark", "plugins", "build_scripts", "triton_server_repo", "tests", "benchmarks", "docs", ".ci")


def python_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name below `trtllm_dspark` of every import of our own, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [node.module if node.module != "trtllm_dspark" else f"trtllm_dspark.{a.name}" for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}:{node.lineno}: relative import; name the module in full")
        else:
            continue
        for name in names:
            if name.split(".")[0] == "trtllm_dspark":
                yield node.lineno, name.partition(".")[2] or "__init__"


def allowed(importer: str, name: str) -> bool:
    package = name.split(".")[0]
    owner = importer.split(".")[0]
    if owner in ("cli", package) or name in EVERYBODY or package == "__version__":
        return True
    return bool({package, name} & MAY_IMPORT.get(owner, set()))


def violations(root: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports trtllm_dspark.{name}"
        for path in python_files()
        if root in path.parents or root == path
        for line, name in imported_modules(path)
        if not allowed(module_name(path), name)
    ]


def test_table_names_every_package() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert packages - {"cli"} <= set(MAY_IMPORT)


def test_table_has_no_cycle() -> None:
    left = dict(MAY_IMPORT)
    while left:
        free = [name for name, needs in left.items() if not {need.split(".")[0] for need in needs} & set(left)]
        assert free, f"these import each other: {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_imports_only_what_the_table_allows(package: str) -> None:
    root = PACKAGE / package if (PACKAGE / package).is_dir() else PACKAGE / f"{package}.py"
    assert violations(root) == []


def test_checker_finds_a_forbidden_import(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("def f():\n    from trtllm_dspark.serving import launcher\n    import trtllm_dspark.runtime.x\n")
    assert list(imported_modules(source)) == [(2, "serving"), (3, "runtime.x")]
    assert not allowed("engine.onnxruntime", "serving")
    assert not allowed("graph.target", "checkpoint.target")
    assert allowed("graph.target", "checkpoint.config")


FORBIDDEN_INCLUDES = {
    "plugins/core": r"cuda|NvInfer|Python\.h|pybind|nanobind|torch|ATen",
    "plugins/kernels": r"NvInfer|Python\.h|nanobind|torch|ATen",
    "plugins/python": r"cuda|NvInfer|torch|ATen",
    "plugins/tensorrt": r"Python\.h|nanobind|torch|ATen",
    "tests/cpp": r"Python\.h|nanobind|torch|ATen",
}


@pytest.mark.parametrize("folder", sorted(FORBIDDEN_INCLUDES))
def test_native_code_includes_nothing_foreign(folder: str) -> None:
    pattern = re.compile(rf"^\s*#\s*include\s*[<\"][^>\"]*({FORBIDDEN_INCLUDES[folder]})", re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {match.group().strip()}"
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".h", ".hpp", ".cpp", ".cu", ".cuh"}
        for match in pattern.finditer(path.read_text())
    ]
    assert found == []


def test_source_files_stay_below_the_line_limit() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in FOLDERS
        for pattern in SOURCES
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts and (lines := path.read_text().count("\n")) > MAX_LINES
    }
    assert long == {}


# Written in two pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b|/wo" + "rk/")


def test_sources_hold_no_unfinished_marks_and_no_machine_paths() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for folder in FOLDERS
        for pattern in (*SOURCES, "*.md")
        for path in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in path.parts
        for match in UNFINISHED.finditer(path.read_text())
    ]
    assert found == []
