"""What launchers refuse, and what the C entry points tell about their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_dspark.errors import NativeError, ShapeError
from trtllm_dspark.plugins import KernelLibrary

SIZES = {"int32": 4, "int64": 8, "float32": 4, "pointer": 8}


@pytest.fixture
def library(simt_path: Path) -> KernelLibrary:
    return KernelLibrary(simt_path)


def _zeros(library: KernelLibrary, op: str, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(library.fields(op), 0) | values


@pytest.mark.parametrize(
    ("op", "values", "message"),
    [
        ("kv_append", {"num_kv_heads": 1, "page_size": 0}, "page_size: expected at least 1, got 0"),
        ("kv_append", {"num_kv_heads": 1, "page_size": 1, "pages_per_request": 1, "head_dim": 3}, "head_dim"),
        ("ragged_attention", {"num_kv_heads": 2, "num_heads": 3}, "num_heads: expected a multiple of num_kv_heads"),
        (
            "ragged_attention",
            {"num_kv_heads": 1, "num_heads": 1, "page_size": 1, "pages_per_request": 1, "kv_split": 96},
            "kv_split: expected a positive multiple of 64, got 96",
        ),
        ("markov_draft", {"draft_len": 65}, "draft_len: expected 1 to 64, got 65"),
        ("markov_draft", {"draft_len": 1, "vocab": 9, "draft_vocab": 8}, "target_of_draft"),
        ("markov_draft", {"draft_len": 1, "vocab": 8, "draft_vocab": 8, "head_kind": 1}, "rank: expected 1 to 4096"),
        ("markov_draft", {"draft_len": 1, "vocab": 8, "draft_vocab": 8, "acceptance": 1}, "draft_logits"),
        ("confidence_schedule", {"draft_len": 1, "mode": 2}, "hidden_weight: expected a confidence head"),
        ("confidence_schedule", {"draft_len": 3, "num_requests": 2, "num_rows": 7}, "num_rows"),
        ("ragged_accept", {"draft_len": 1, "vocab": 8, "draft_vocab": 8, "logits_stride": 7}, "logits_stride"),
        ("ragged_accept", {"draft_len": 1, "vocab": 2**21}, "vocab: expected 1 to 1048576"),
    ],
)
def test_launch_bad_value_names_field(library: KernelLibrary, op: str, values: dict[str, int], message: str) -> None:
    with pytest.raises(NativeError, match=message) as caught:
        library.launch(op, **_zeros(library, op, **values))
    assert caught.value.op == op
    assert caught.value.code == 1


def test_launch_missing_or_unknown_field_is_refused(library: KernelLibrary) -> None:
    params = _zeros(library, "kv_append")
    with pytest.raises(ShapeError, match="kv_append: head_dims is not a parameter"):
        library.launch("kv_append", **params, head_dims=3)
    del params["head_dim"]
    with pytest.raises(ShapeError, match="kv_append: head_dim is missing"):
        library.launch("kv_append", **params)
    with pytest.raises(ShapeError, match="unknown kernel 'draft'"):
        library.launch("draft")
    with pytest.raises(ShapeError, match="num_tokens: 1.5 is not a int32"):
        library.launch("kv_append", **_zeros(library, "kv_append", num_tokens=1.5))
    with pytest.raises(ShapeError, match="scale: 1e[+]39 is not a float32"):
        library.launch("ragged_attention", **_zeros(library, "ragged_attention", scale=1e39))


def test_library_wrong_file_is_refused() -> None:
    with pytest.raises(NativeError, match="is not a kernel library"):
        KernelLibrary(__file__)


def test_params_layout_leaves_no_member_out(simt_path: Path) -> None:
    """Fields follow each other with no gap but alignment, up to the size of the struct."""
    library = KernelLibrary(simt_path)
    for op in library.ops:
        size, fields = library._op(op)
        end = 0
        for name, field in fields.items():
            width = SIZES[field.kind]
            assert field.offset == -(-end // width) * width, f"{op}: something lies before {name}"
            end = field.offset + width
        assert size == -(-end // 8) * 8, f"{op}: something lies behind the last field"
