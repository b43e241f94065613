"""The shim catches what it claims to: in kernels planted wrong, and in the real sources with one line taken out."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.kernels.build import CORE, KERNELS, SIMT, SIMT_FLAGS, SIMT_SOURCES, compile_shared, read_by


@pytest.fixture(scope="module")
def planted(simt_path: Path) -> ctypes.CDLL:
    sources = [(SIMT / name, SIMT_FLAGS) for name in ("planted.cu", "simt.cpp")]
    library = ctypes.CDLL(str(compile_shared("planted", sources)))
    library.simt_allocate.restype = ctypes.c_void_p
    library.simt_allocate.argtypes = [ctypes.c_size_t]
    library.simt_last_error.restype = ctypes.c_char_p
    library.planted.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return library


def _run(planted: ctypes.CDLL, kind: int, order: int, count: int = 64) -> tuple[int, list[int], str]:
    planted.simt_set_order(order)
    address = planted.simt_allocate(4 * count)
    data = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))
    data[:] = np.arange(count)
    return planted.planted(kind, count, address), data.tolist(), planted.simt_last_error().decode()


def test_shim_barrier_present_every_order_agrees(planted: ctypes.CDLL) -> None:
    results = [_run(planted, 0, order)[:2] for order in range(5)]
    assert results == [(0, list(range(63, -1, -1)))] * 5


def test_shim_barrier_missing_orders_disagree(planted: ctypes.CDLL) -> None:
    results = [_run(planted, 1, order)[1] for order in (0, 1)]
    assert results[0] != results[1]


@pytest.mark.parametrize("kind", [2, 3], ids=["global", "shared"])
def test_shim_write_behind_memory_names_block_and_thread(planted: ctypes.CDLL, kind: int) -> None:
    code, _, message = _run(planted, kind, 0)
    assert code == 700
    assert "out-of-bounds access" in message
    assert message.endswith("in block (0, 0, 0), thread (63, 0, 0)")


@pytest.mark.parametrize(("kind", "problem"), [(4, "a lane that has ended"), (5, "deadlock")])
def test_shim_divergent_collective_is_an_error(planted: ctypes.CDLL, kind: int, problem: str) -> None:
    code, _, message = _run(planted, kind, 1)
    assert code == 719
    assert problem in message


# One line of the real sources, and what replaces it.
MUTATIONS = {
    "team_barrier": ("teams.cuh", "__syncthreads();  // warp results visible", ""),
    "tile_barrier": (
        "ragged_attention.cuh",
        "__syncthreads();  // all warps are done with the tiles before they are overwritten",
        "",
    ),
    "weights_barrier": ("markov_draft.cuh", "__syncthreads();  // latents visible", ""),
    "cache_bound": ("kv_append.cuh", "if (index >= p.num_kv_heads * chunks) return;", ""),
    "vocab_bound": ("markov_draft.cuh", "bool const live = row < count;", "bool const live = true;"),
    "workspace_size": ("markov_draft.h", "layout.counter + roundUp16(num_requests * 4);", "layout.counter;"),
}


@pytest.mark.parametrize(("file", "line", "replacement"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_shim_real_source_with_a_line_removed_is_caught(
    simt_path: Path, tmp_path: Path, file: str, line: str, replacement: str
) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy)
    text = (copy / file).read_text()
    assert text.count(line) == 1, f"{file} no longer has the line this test removes"
    (copy / file).write_text(text.replace(line, replacement))
    # Taken out, a line may leave a variable unused.
    lenient = [flag for flag in SIMT_FLAGS if flag != f"-I{KERNELS}" and not flag.startswith("-W") and flag != "-O2"]
    lenient += ["-O1", f"-I{copy}", f"-I{CORE}"]
    sources: list[tuple[Path, list[str]]] = []
    for source in SIMT_SOURCES:
        if KERNELS / file in read_by(source, SIMT_FLAGS):
            sources.append((copy / source.name, lenient))
        else:
            sources.append((source, SIMT_FLAGS))
    assert (copy, lenient) in [(source.parent, flags) for source, flags in sources]
    path = compile_shared("mutation", sources)
    child = subprocess.run([sys.executable, "-m", "helpers.kernels.mutant", str(path)], cwd=SIMT.parent, check=False)
    # A negative code is a signal: the wrong kernel brought the process down, which is noticed too.
    assert child.returncode <= 0, f"nothing noticed that {file} lost: {line}"
