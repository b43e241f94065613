"""The kernels between the passes of a round on the device, in three orders of threads and blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.kernels.backends import SimtBackend
from helpers.kernels.round_state import STATES, StateShape, check_state

from trtllm_dspark.errors import NativeError
from trtllm_dspark.plugins import KernelLibrary


@pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())
def test_state_any_order_equals_loops(backend: SimtBackend, shape: StateShape) -> None:
    check_state(backend, shape)


@pytest.mark.parametrize(
    ("op", "values", "message"),
    [
        ("round_begin", {"num_requests": -1}, "num_requests: expected 0 to 65535, got -1"),
        ("round_begin", {"block_size": 65}, "block_size: expected 0 to 64, got 65"),
        ("round_begin", {"block_size": 1}, "block_ids: expected an array"),
        ("round_rows", {"row_len": 0}, "row_len: expected at least 1"),
        (
            "round_rows",
            {"row_len": 1, "num_requests": 2, "num_tokens": 1},
            "num_tokens: expected at least num_requests",
        ),
        ("round_ban", {"vocab": 0}, "vocab: expected at least 1"),
        ("round_commit", {"draft_len": 65}, "draft_len: expected 0 to 64, got 65"),
    ],
)
def test_state_bad_value_names_field(simt_path: Path, op: str, values: dict[str, int], message: str) -> None:
    library = KernelLibrary(simt_path)
    with pytest.raises(NativeError, match=message):
        library.launch(op, **(dict.fromkeys(library.fields(op), 0) | values))
