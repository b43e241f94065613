"""What others published comes out of the simulation in shape; benchmarks/simulation_shapes.py prints it in full."""

from __future__ import annotations

from types import ModuleType

import pytest
from helpers.benchmarks import load_benchmark


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    """Return the benchmark as a module."""
    return load_benchmark("simulation_shapes")


def test_verify_budget_falls_with_concurrency(shapes: ModuleType) -> None:
    """The paper's Figure 8: 4 to 6 tokens a request while 150 to 200 run, anchor included, and fewer beyond."""
    profile = shapes.flat_profile(shapes.level_of(3.3, 5))
    for policy in ("stale_topk", "adaptive"):
        budgets = shapes.sweep(shapes.v4_server(), profile, policy, (64, 160, 256, 384), per_user=2).budgets
        assert 3 <= budgets[1] <= 5
        assert budgets == sorted(budgets, reverse=True)
        assert budgets[3] < 0.6 * budgets[1]


def test_static_mtp_loses_throughput_at_high_concurrency(shapes: ModuleType) -> None:
    """MTP-5 is ahead of MTP-1 while passes are bound by memory, and behind when they are bound by computation."""
    chat, mtp = shapes.flat_profile(0.7), shapes.mtp_profile(0.85)
    curves = {
        policy: shapes.sweep(shapes.v4_server(), chat, policy, (48, 384), others=mtp, per_user=2).throughputs
        for policy in ("mtp1", "mtp3", "mtp5")
    }
    assert curves["mtp5"][0] > curves["mtp3"][0] > curves["mtp1"][0]
    assert curves["mtp5"][1] < curves["mtp3"][1] < curves["mtp1"][1]


def test_headline_region_holds_the_published_chat_profiles_and_not_the_math_ones(shapes: ModuleType) -> None:
    """+60 to +85 % per user at matched throughput; the drafts of an MTP module are taken at 85 to 90 %."""
    qwen = shapes.published("qwen3-4b").cut(5)
    lengths = [qwen.accepted_len("arena_hard"), qwen.accepted_len("mt_bench"), qwen.accepted_len("gsm8k")]
    rows = shapes.region(shapes.v4_server(), (0.85,), lengths, (24, 64, 128))
    arena, bench, math = (row[0] for row in rows)
    low, high = shapes.HEADLINE
    assert low - 0.05 <= arena < bench <= high
    assert math > high + 0.3


def test_vllms_adaptive_sweep_is_foretold_from_its_static_ones(shapes: ModuleType) -> None:
    """None and fixed-7 are what the times were fitted to; adaptive verification and its crossing are not."""
    users = (4, 16, 64, 256)
    published = {count: index for index, count in enumerate(shapes.VLLM_USERS)}
    none, fixed, adaptive, fast = shapes.vllm_sweep(users, per_user=2).values()
    for row, count in enumerate(users):
        index = published[count]
        assert none.throughputs[row] == pytest.approx(shapes.VLLM_NONE[index], rel=0.05)
        assert fixed.throughputs[row] == pytest.approx(shapes.VLLM_FIXED[index], rel=0.05)
        assert adaptive.throughputs[row] == pytest.approx(shapes.VLLM_ADAPTIVE[index], rel=0.08)
    # At 256 the whole block is below no speculation, and adaptive far above both.
    assert fixed.throughputs[-1] < none.throughputs[-1] < 0.75 * adaptive.throughputs[-1]
    # At 4 the variable-length path costs more than it saves; whole blocks there give it back, and lose nothing later.
    assert 0.88 < adaptive.throughputs[0] / fixed.throughputs[0] < 0.97
    assert fast.throughputs[0] > 0.99 * fixed.throughputs[0]
    assert fast.throughputs[-1] > 0.98 * adaptive.throughputs[-1]
