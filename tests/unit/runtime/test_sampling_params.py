from __future__ import annotations

import math
from typing import Any

import pytest

from trtllm_dspark.errors import RequestError
from trtllm_dspark.runtime import SamplingParams

BAD: list[tuple[str, Any]] = [
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", 1e300),
    ("temperature", 10**400),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", 1e-300),
    ("top_p", 1 + 1e-12),
    ("top_k", -1),
    ("top_k", 2.0),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("max_draft_len", -1),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop", None),
    ("stop", {"a": 1}),
    ("stop", ["\ud800"]),
    ("stop_token_ids", 3),
    ("stop_token_ids", "12"),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("ignore_eos", 1),
    ("speculation", "off"),
    ("latency_class", "fast"),
    ("latency_class", None),
    ("latency_class", ["batch"]),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_params_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.code == f"invalid_{name}"
    assert "\n" not in str(caught.value)


def test_params_min_above_max_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens 5 exceeds max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_params_single_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_greedy_follows_the_temperature(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy
