"""The comparison runs through on an engine of toy size, both ways, and counts errors and turned rankings by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from helpers.benchmarks import load_benchmark
from helpers.toy_pair import ToyPair, build_toy_engine

from trtllm_dspark.engine.device import cpu_name
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape
from trtllm_dspark.speculation.cost_table_file import StoredCostTable, write_cost_table


@pytest.fixture(scope="module")
def comparison() -> ModuleType:
    """Return the benchmark as a module."""
    return load_benchmark("simulated_vs_measured")


@pytest.fixture
def engine_dir(toy_pair: ToyPair, tmp_path: Path) -> Path:
    """Return an engine on which three policies and a measuring one take turns with two requests each."""
    path = build_toy_engine(toy_pair, tmp_path / "engine", max_batch_size=8)
    verify = {VerifyShape(r, r * w, w, 128): 1000.0 + 50 * r * w for r in (1, 2, 4) for w in range(1, 9)}
    table = CostTable(verify, {DraftShape(r, 128): 100.0 for r in (1, 2, 4)})
    write_cost_table(open_engine_dir(path), StoredCostTable(table, cpu_name(), 2))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "abc", "domain": "math"}, {"prompt": "C", "domain": "chat"}] * 6
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def flags(engine_dir: Path, prompts: Path, output: Path) -> list[str]:
    given = ["--engine_dir", str(engine_dir), "--prompts_file", str(prompts), "--output", str(output)]
    return [*given, "--raw", "--keep_profile", "--max_tokens", "40", "--users", "1,2"] + [
        "--policies",
        "off,fixed:3,adaptive",
    ]


def test_measured_here(
    comparison: ModuleType, engine_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, svg = tmp_path / "o.json", tmp_path / "o.svg"
    assert comparison.main([*flags(engine_dir, prompts, output), "--repeats", "2", "--svg", str(svg)]) == 0
    result = json.loads(output.read_text())
    assert [(row["policy"], row["users"]) for row in result["rows"]] == [
        (policy, users) for policy in ("off", "fixed:3", "adaptive") for users in (1, 2)
    ]
    assert all(row["measured"] > 0 and row["simulated"] > 0 for row in result["rows"])
    assert "fixed:3, simulated" in svg.read_text()
    off, fixed = result["rows"][0], result["rows"][2]
    foretold = fixed["simulated"] / off["simulated"]
    assert fixed["error_over_off"] == pytest.approx(foretold / (fixed["measured"] / off["measured"]) - 1, abs=0.01)
    assert off["error_over_off"] == 0
    # Greedy texts are those that were recorded, whoever has had a turn in between.
    for row in result["rows"][:4]:
        assert row["measured_accepted_len"] == pytest.approx(row["simulated_accepted_len"], rel=0.02)
    assert result["costs"]["off"]["absorb_us"] == 0 < result["costs"]["fixed:3"]["absorb_us"]
    assert "repeat 2, 2 at once: " in capsys.readouterr().err


def test_measured_by_the_sweep(comparison: ModuleType, engine_dir: Path, prompts: Path, tmp_path: Path) -> None:
    """By the table a plain round takes 1050 us; beside it stand a prompt's pass and what the session itself takes."""
    sweep, output = tmp_path / "sweep.json", tmp_path / "o.json"
    cells = [
        {
            "speculation": "off",
            "concurrency": 1,
            "whole_tokens_per_s": 900.0,
            "whole_interval": [890.0, 910.0],
            "accepted_len": 1,
        },
        {"speculation": "fixed:3", "concurrency": 1, "whole_tokens_per_s": 500.0, "whole_interval": [490.0, 510.0]},
        {"speculation": "fixed:5", "concurrency": 1, "whole_tokens_per_s": 1.0, "whole_interval": [1.0, 1.0]},
    ]
    runs = [{"repeat": repeat, "domain": domain, "concurrency": 1} for repeat in (0, 1) for domain in ("math", "chat")]
    sweep.write_text(json.dumps({"cells": cells, "runs": runs, "facts": {"max_tokens": 40}}))
    assert comparison.main([*flags(engine_dir, prompts, output), "--sweep", str(sweep)]) == 0
    result = json.loads(output.read_text())
    off, fixed = result["rows"]
    costs = result["costs"]["off"]
    round_us = 1050 + costs["round_us"] + costs["request_us"] + costs["token_us"]
    # Prompts of three and of one token.
    prompt_us = costs["prompt_us"][0] + 2 * costs["prompt_us"][1]
    assert off["simulated"] == pytest.approx(40e6 / (39 * round_us + prompt_us), rel=0.02)
    assert off["error"] == pytest.approx(off["simulated"] / 900 - 1, abs=1e-3)
    assert (off["measured_accepted_len"], off["simulated_accepted_len"]) == (1, 1)
    # Drafts that are mostly right at four tokens for 1300 us are no loss: the sweep's ranking is turned round.
    assert fixed["simulated"] > off["simulated"]
    assert 2 < fixed["simulated_accepted_len"] < 4
    assert (result["separable_pairs"], result["turned_pairs"]) == (1, ["1: fixed:3 against off"])


def test_loads_are_the_runs_of_the_sweep(comparison: ModuleType) -> None:
    arrivals = [comparison.Arrival(0.0, 3, 4, f"{name}/{index}") for name in ("math", "chat") for index in range(6)]
    order = [(0, "math", 1), (0, "math", 8), (0, "chat", 1), (1, "math", 1)]
    runs = [
        {"repeat": repeat, "domain": domain, "concurrency": users, "speculation": policy}
        for repeat, domain, users in order
        for policy in ("off", "adaptive")
    ]
    loads = comparison.sweep_loads(runs, arrivals, 40)
    assert [(load.repeat, load.domain, load.users) for load in loads] == order
    taken = [[int(arrival.domain.partition("/")[2]) for arrival in load.arrivals] for load in loads]
    assert taken == [[0, 1, 2, 3], [*range(6)] * 4, [0, 1, 2, 3], [4, 5, 0, 1]]
    assert [arrival.output_tokens for arrival in loads[0].arrivals] == [20, 50, 30, 60]


def test_loads_mix_domains_and_take_other_prompts_in_each_repeat(comparison: ModuleType) -> None:
    arrivals = [comparison.Arrival(0.0, 3, 4, f"{name}/{index}") for index, name in enumerate(["m"] * 6 + ["c"] * 6)]
    loads = comparison.mixed_loads(arrivals, [1, 2], 2, 40)
    assert [(load.repeat, load.users, len(load.arrivals)) for load in loads] == [
        (0, 1, 4),
        (0, 2, 6),
        (1, 1, 4),
        (1, 2, 6),
    ]
    taken = [[int(arrival.domain.partition("/")[2]) for arrival in load.arrivals] for load in loads]
    assert taken == [[0, 6, 1, 7], [0, 6, 1, 7, 2, 8], [2, 8, 3, 9], [3, 9, 4, 10, 5, 11]]
    assert [arrival.output_tokens for arrival in loads[1].arrivals] == [20, 50, 30, 60, 40, 20]


def test_times_are_means(comparison: ModuleType) -> None:
    times = comparison.Times(None, ["off"], [])
    times._tables = [
        CostTable({VerifyShape(1, 1, 1, 128): us}, {DraftShape(1, 128): 2 * us}, (1, 8)) for us in (100.0, 400.0)
    ]
    times._costs = [{"off": comparison.SessionCosts(us, 2.0, 3.0, (us, 5.0), 6.0)} for us in (1.0, 2.0)]
    assert times.table() == CostTable({VerifyShape(1, 1, 1, 128): 250.0}, {DraftShape(1, 128): 500.0}, (1, 8))
    assert times.costs() == {"off": comparison.SessionCosts(1.5, 2.0, 3.0, (1.5, 5.0), 6.0)}
