"""What quickstart.sh and test.sh do before they install anything, with stubs in place of apt and the interpreters."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "build_scripts" / "_env.sh"

# Knows one package, as a release of Debian or Ubuntu does; keeps a record of what it was asked for.
APT_GET = """#!/bin/bash
echo "$*" >>"$RECORD"
[[ " $* " == *" download $PACKAGE "* ]] || exit 100
touch "${PACKAGE}_3.12.3_amd64.deb"
"""
DPKG = """#!/bin/bash
[ -e "$2" ] || exit 2
mkdir -p "$3/usr/lib/x86_64-linux-gnu"
echo library >"$3/usr/lib/x86_64-linux-gnu/libpython3.12.so.1.0"
"""
# An interpreter whose library is missing; `-c` asks for its version.
PYTHON = """#!/bin/bash
case "$*" in
*"sys.exit"*) exit 0 ;;
*"version_info"*) echo {version} ;;
*) echo libpython3.12 ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(folder: Path, command: str, package: str = "none") -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PACKAGE": package,
        "RECORD": str(folder / "record"),
    }
    line = f"set -euo pipefail; source {SCRIPT}; {command}"
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    executable(tmp_path / "bin" / "apt-get", APT_GET)
    executable(tmp_path / "bin" / "dpkg", DPKG)
    executable(tmp_path / ".venv" / "bin" / "python", PYTHON.format(version="3.11"))
    (tmp_path / ".venv" / "lib").mkdir()
    return tmp_path


@pytest.mark.parametrize("package", ["libpython3.12", "libpython3.12t64"], ids=["Debian 12", "Ubuntu 24.04"])
def test_shared_library_is_unpacked_under_either_name_of_its_package(folder: Path, package: str) -> None:
    result = run(folder, "provide_library", package)
    assert result.returncode == 0, result.stderr
    assert (folder / ".venv" / "lib" / "libpython3.12.so.1.0").read_text() == "library\n"


def test_shared_library_of_no_package_is_one_sentence(folder: Path) -> None:
    result = run(folder, "provide_library")
    assert result.returncode == 2
    assert "needs Python's shared library; install it with: apt-get install libpython3.12\n" in result.stderr
    asked = [line.split()[-1] for line in (folder / "record").read_text().splitlines()]
    assert {"libpython3.12", "libpython3.12t64"} <= set(asked)


def test_interpreter_that_is_not_the_environments_is_refused(folder: Path) -> None:
    for name in ("g++", "python3.12"):
        executable(folder / "bin" / name, PYTHON.format(version="3.12"))
    result = run(folder, "setup_venv test python3.12")
    assert result.returncode == 2
    assert ".venv is of Python 3.11, python3.12 is 3.12; remove .venv to have it made anew" in result.stderr
    assert "== installing" not in result.stdout
    executable(folder / ".venv" / "bin" / "python", PYTHON.format(version="3.12"))
    assert "remove .venv" not in run(folder, "setup_venv test python3.12", "libpython3.12").stderr
