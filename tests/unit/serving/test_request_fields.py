"""Tensors and request parameters of one Triton request -> fields of the engine's requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtllm_dspark.errors import RequestError
from trtllm_dspark.serving.contract import MODELS
from trtllm_dspark.serving.request_fields import parse_tensors

TEXT = MODELS[0]
BASE = {"text_input": np.array([[b"a"]], object), "max_tokens": np.array([[4]], np.int32)}


def parse(parameters: dict[str, Any], *, timeout_us: int = 0, **inputs: int) -> dict[str, Any]:
    tensors = BASE | {name: np.array([[value]], np.int32) for name, value in inputs.items()}
    return parse_tensors(TEXT, tensors, parameters, timeout_us=timeout_us).rows[0]


def test_timeout_parameter_in_microseconds_equals_the_input_in_milliseconds() -> None:
    assert parse({"timeout": 250_000})["timeout_ms"] == 250
    assert parse({}, timeout_us=1)["timeout_ms"] == 1
    assert parse({"timeout": 250_000}, timeout_ms=250)["timeout_ms"] == 250
    assert parse({"priority": 2})["priority"] == 2
    assert "timeout_ms" not in parse({})


@pytest.mark.parametrize(
    ("parameters", "timeout_us", "inputs", "word"),
    [
        ({"timeout": 250_000}, 0, {"timeout_ms": 251}, "timeout"),
        ({}, 250_000, {"timeout_ms": 1}, "timeout"),
        ({"priority": 2}, 0, {"priority": 3}, "priority"),
    ],
)
def test_parameter_that_contradicts_an_input_is_refused(
    parameters: dict[str, Any], timeout_us: int, inputs: dict[str, int], word: str
) -> None:
    with pytest.raises(RequestError, match=word) as refused:
        parse(parameters, timeout_us=timeout_us, **inputs)
    assert refused.value.code == "conflicting_fields"
