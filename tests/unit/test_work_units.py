"""How `pytest -n` divides the suite, and that a worker that dies is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.work_units import work_unit

TESTS = Path(__file__).parents[1]


def test_unit_is_a_file_unless_a_costly_fixture_says_otherwise() -> None:
    assert work_unit("tests/unit/core/test_core_stub.py::test_a[b-c]") == "tests/unit/core/test_core_stub.py"
    assert work_unit("tests/tensorrt/test_resources.py::test_a") == "nvcc"
    assert work_unit("tests/tensorrt/test_lean_runtime.py::test_b") == "nvcc"
    pair = "tests/rtx/test_compile.py::test_pair[smollm2-float16-{}]"
    assert work_unit(pair.format("sm89")) == work_unit(pair.format("sm120"))
    assert work_unit(pair.format("sm89")) != work_unit(pair.replace("float16", "bfloat16").format("sm89"))


def test_worker_that_dies_fails_the_run_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "helpers").symlink_to(TESTS / "helpers")
    (tmp_path / "test_dies.py").write_text("import os\ndef test_dies(): os._exit(9)\n")
    (tmp_path / "test_lives.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_dies.py::test_dies'" in done.stdout
    assert "1 failed, 2 passed" in done.stdout
