from __future__ import annotations

import pytest

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation import SpeculationConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adaptive", SpeculationConfig("adaptive")),
        ("off", SpeculationConfig("off")),
        ("fixed", SpeculationConfig("fixed")),
        ("fixed:3", SpeculationConfig("fixed", draft_len=3)),
        ("threshold", SpeculationConfig("threshold", threshold=0.3)),
        ("threshold:0", SpeculationConfig("threshold", threshold=0.0)),
        ("threshold:0.5", SpeculationConfig("threshold", threshold=0.5)),
        ("early_stop", SpeculationConfig("early_stop")),
        ("stale_topk", SpeculationConfig("stale_topk")),
        ("stale_topk:12", SpeculationConfig("stale_topk", budget=12)),
    ],
)
def test_parse_known_form_is_read_and_written_back(text: str, expected: SpeculationConfig) -> None:
    assert SpeculationConfig.parse(text) == expected
    assert SpeculationConfig.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "on", "fixed:", "fixed:0", "fixed:-1", "fixed:2.5", "threshold:", "threshold:nan", "threshold:1.1", "off:1"]
    + ["threshold:-0.1", "early_stop:2", "stale_topk:x", "fixed:3:4", "stale_topk:2147483648"],
)
def test_parse_unknown_form_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="speculation") as caught:
        SpeculationConfig.parse(text)
    assert "\n" not in str(caught.value)
