"""Fields of the OpenAI front that the engine's own intake checks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtllm_dspark.serving.openai_front.errors import FrontError
from trtllm_dspark.serving.openai_front.schema import parse_body


def row(**fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": "m", "prompt": "a", **fields}).encode()
    return parse_body(body, chat=False, models=("m",)).rows[0]


def test_latency_class_reaches_the_engine_as_it_is() -> None:
    assert "latency_class" not in row()
    # The intake refuses what is neither interactive nor batch (test_requests.py).
    assert [row(latency_class=value)["latency_class"] for value in ("batch", "fast")] == ["batch", "fast"]


def test_misspelt_latency_class_is_refused_by_name() -> None:
    with pytest.raises(FrontError, match="latency_clas"):
        row(latency_clas="batch")
