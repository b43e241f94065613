"""The replay of recorded blocks counts what can be counted by hand."""

from __future__ import annotations

from types import ModuleType

import pytest
from helpers.benchmarks import load_benchmark
from helpers.virtual_rounds import table_of

from trtllm_dspark.speculation.config import SpeculationConfig
from trtllm_dspark.speculation.controller import SpeculationController

GAMMA = 7


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("replay_policies")


def rate(module: ModuleType, policy: str, right: int, users: int) -> float:
    """Return the rate along blocks of which `right` drafts survive; a pass takes 10 ms and 1 ms a draft."""
    table = table_of(lambda requests, tokens: 10_000.0 + 1_000.0 * (tokens - requests), draft_us=500.0)
    mode = SpeculationConfig.parse(policy)
    controller = SpeculationController(mode, max_draft_len=GAMMA, cost_table=table)
    block = [0.99] * right + [0.01] * (GAMMA - right), right
    queue = [module.Replayed((0, index), [block] * 4, 200) for index in range(2 * users)]
    return float(module.replay(controller, queue, users, table, seed=0))


def test_rates_are_those_of_the_table(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "NOISE", 0.0)
    assert rate(benchmark, "off", 3, 1) == pytest.approx(100.0)
    # Four tokens in 10 + 3 + 0.5 ms; the last rounds of a request are shorter.
    assert rate(benchmark, "fixed:3", 3, 1) == pytest.approx(4 / 13.5e-3, rel=0.02)
    # Seven are verified, three survive.
    assert rate(benchmark, "fixed:7", 3, 1) == pytest.approx(4 / 17.5e-3, rel=0.02)
    assert rate(benchmark, "fixed:3", 0, 1) == pytest.approx(1 / 13.5e-3, rel=0.02)
    assert rate(benchmark, "adaptive", 3, 1) > 0.95 * rate(benchmark, "fixed:3", 3, 1)
    assert rate(benchmark, "adaptive", 0, 2) > 0.95 * rate(benchmark, "off", 0, 2)


def test_a_block_goes_on_where_it_was_left(benchmark: ModuleType) -> None:
    confidences = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    request = benchmark.Replayed((0, 0), [(confidences, 5), (confidences, 2)], 100)
    assert request.advance(1) == 2
    row, right = request.block()
    assert row.tolist() == pytest.approx([0.7, 0.6, 0.5, 0.4, 0.3, 0.3, 0.3])
    assert right == 3
    assert request.advance(7) == 4
    assert request.block()[1] == 2
