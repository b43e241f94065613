"""What one worker of `pytest -n` runs without a break, so that costly fixtures are made once, and in which order."""

from __future__ import annotations

import re

# Long ones first: at the end nobody should wait for the last of them.
UNITS = (
    # Everything that needs nvcc's build for all architectures.
    (r"tests/tensorrt/test_(build_plugins|lean_runtime|resources)\.py", "nvcc"),
    # One unit for each pair and type, whose graphs are written once and compiled for two architectures.
    (r"tests/rtx/test_compile\.py::\w+(\[\w+-\w+)?", None),
    (r"tests/smollm2/test_greedy_equality\.py::test_generate_(alone|in_mixed)", "greedy"),
    (r"tests/smollm2/test_greedy_equality\.py::", None),
    # Each test has a server of its own.
    (r"tests/triton/test_swap\.py", None),
    (r"tests/triton/test_load\.py", None),
    (r"tests/triton/test_faults\.py::.*", None),
    # Each test compiles its own kernels; the rest shares nothing but the library.
    (r"tests/simt/test_shim\.py::test_shim_real\w+\[\w+", None),
    (r"tests/simt/test_kernels\.py::\w+(\[\w+)?", None),
)
"""Pattern of a test's id and the unit's name; None: what the pattern matched."""


def work_unit(nodeid: str) -> str:
    """Return the unit of a test: as `UNITS` says, else its file."""
    for pattern, name in UNITS:
        match = re.match(pattern, nodeid)
        if match:
            return name or match[0]
    return nodeid.split("::")[0]


def starts_first(nodeid: str) -> bool:
    """Return whether a test belongs to `UNITS`."""
    return any(re.match(pattern, nodeid) for pattern, _ in UNITS)
