"""Loads have the rates and lengths asked for, tables answer alike however they are asked, estimates follow figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from trtllm_dspark.errors import ConfigError, UsageError
from trtllm_dspark.simulate.estimate import GPUS, MODELS, Assumptions, Roofline, estimated_table, parse_estimate
from trtllm_dspark.simulate.pareto import Point, frontier, speed_at, throughput_at
from trtllm_dspark.simulate.server import Server
from trtllm_dspark.simulate.server_file import Overrides, load_server, write_server
from trtllm_dspark.simulate.times import EngineTimes, LookupTable
from trtllm_dspark.simulate.traffic import Lengths, Process, make_traffic, read_trace
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape


def times_of(text: str, count: int = 20_000) -> np.ndarray:
    return Process.parse(text).times(count, np.random.default_rng(1))


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(times_of("poisson:5"))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_bursts_keep_the_mean_rate_and_crowd_the_requests() -> None:
    times = times_of("bursty:5:4:20")
    assert len(times) / times[-1] == pytest.approx(5, rel=0.1)
    assert (np.diff(times) >= 0).all()

    def crowding(arrivals: np.ndarray) -> float:
        per_second = np.bincount(arrivals.astype(np.int64))
        return float(per_second.var() / per_second.mean())

    assert crowding(times_of("poisson:5")) == pytest.approx(1, abs=0.1)
    assert crowding(times) > 4


def test_lengths_have_the_distribution_asked_for() -> None:
    generator = np.random.default_rng(0)
    assert set(Lengths.parse("7").draw(5, generator)) == {7}
    uniform = Lengths.parse("uniform:3:5").draw(3000, generator)
    assert set(uniform.tolist()) == {3, 4, 5}
    drawn = Lengths.parse("lognormal:200:0.7").draw(20_000, generator)
    assert np.median(drawn) == pytest.approx(200, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.7, rel=0.03)


def test_domains_come_by_their_weights_and_a_seed_gives_the_same_load() -> None:
    def load(seed: int) -> object:
        return make_traffic(Process.parse("poisson:1"), count=4000, prompt=Lengths.parse("1"), seed=seed,
                            output=Lengths.parse("1"), domains={"a": 3.0, "b": 1.0})  # fmt: skip

    first = load(1)
    assert first == load(1) != load(2)
    share = np.mean([arrival.domain == "a" for arrival in first.arrivals])  # type: ignore[attr-defined]
    assert share == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("text", ["open:3", "closed:0", "closed:1.5", "poisson:-1", "poisson:x", "bursty:2:0.5", ""])
def test_bad_process_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="use closed:USERS, poisson:RATE"):
        Process.parse(text)


@pytest.mark.parametrize(
    "text",
    ["0", "0.5", "7.5", "x", "uniform:5:3", "uniform:0.2:0.7", "uniform:1:2.5", "lognormal:5", "lognormal:5:-1",
     "lognormal:0.5:1", "normal:5:1"],
)  # fmt: skip
def test_bad_lengths_are_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="use N, uniform:LOW:HIGH"):
        Lengths.parse(text)


def test_trace_is_replayed_in_time_order(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 6}\n\n'
        '{"arrival_s": 0.5, "prompt_tokens": 3, "output_tokens": 4, "domain": "chat"}\n'
    )
    arrivals = read_trace(path, ("math", "chat")).arrivals
    assert [(a.time_s, a.prompt_tokens, a.output_tokens, a.domain) for a in arrivals] == [
        (0.5, 3, 4, "chat"),
        (2.0, 5, 6, "math"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 needs the numbers"),
        ('{"arrival_s": 1, "prompt_tokens": 2}', "line 1 needs the numbers"),
        ('{"arrival_s": -1, "prompt_tokens": 2, "output_tokens": 2}', "at least 0"),
        ('{"arrival_s": 1, "prompt_tokens": 2.5, "output_tokens": 2}', "no whole number"),
        ('{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 2, "domain": "x"}', "the profile knows math"),
        ("", "holds no requests"),
    ],
)
def test_bad_trace_is_one_sentence(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=message):
        read_trace(path, ("math",))


@pytest.fixture(scope="module")
def table() -> CostTable:
    roofline = Roofline(GPUS["h100"], MODELS["qwen3-8b"])
    return estimated_table(roofline, max_requests=16, gamma=5)


@pytest.mark.parametrize("depth", [0, 128, 700, 4096, 9000])
@pytest.mark.parametrize("num_requests", [1, 5, 16, 40])
def test_lookup_table_answers_as_the_table(table: CostTable, num_requests: int, depth: int) -> None:
    kept = LookupTable.of(table)
    for _ in range(2):
        expected = table.step_time_us(num_requests, 6 * num_requests, depth=depth)
        found = kept.step_time_us(num_requests, 6 * num_requests, depth=depth)
        assert found.dtype == np.float32
        assert found == pytest.approx(expected, rel=1e-5)
        # A scheduler may write into what it got.
        found[:] = 0
    assert kept.draft_time_us(num_requests, depth=depth) == pytest.approx(
        table.draft_time_us(num_requests, depth=depth), rel=1e-6
    )


def test_engine_times_are_what_a_scheduler_expects(table: CostTable) -> None:
    times = EngineTimes(LookupTable.of(table), max_tokens=200)
    for count, tokens, depth in ((1, 3, 200.0), (7, 31, 1500.5), (16, 96, 3000.0)):
        expected = float(table.step_time_us(count, tokens, depth=int(depth))[tokens])
        assert times.verify_us(count, tokens, depth) == pytest.approx(expected, rel=1e-3)
        assert times.draft_us(count, depth) == pytest.approx(table.draft_time_us(count, depth=int(depth)), rel=1e-3)


def test_estimates_follow_the_figures_of_the_gpu() -> None:
    def first(gpu: str) -> float:
        return Roofline(GPUS[gpu], MODELS["qwen3-8b"]).verify_us(1, 1, 0)

    assert first("b200") < first("h200") < first("h100") < first("rtx5090") < first("rtx4090") < first("l40s")
    # 16 GB of weights at three quarters of 3.35 TB/s, and latencies.
    weights_us = 2 * MODELS["qwen3-8b"].active_params / (0.75 * 3.35e12) * 1e6
    assert first("h100") == pytest.approx(weights_us + 36 * 4 + 100, rel=1e-6)
    two = Roofline(GPUS["h100"], MODELS["qwen3-8b"], Assumptions(num_gpus=2)).verify_us(1, 1, 0)
    assert weights_us / 2 < two < first("h100")


def test_estimates_are_a_staircase_at_graph_sizes(table: CostTable) -> None:
    curve = table.step_time_us(64, 400, depth=128)
    assert curve[81] == curve[88]
    roofline = Roofline(GPUS["l40s"], MODELS["qwen3-8b"])
    # Bound by computation: a step is as long as its graph.
    assert roofline.verify_us(60, 401, 128) == pytest.approx(roofline.verify_us(60, 416, 128), rel=1e-3)
    assert roofline.verify_us(60, 417, 128) > 1.01 * roofline.verify_us(60, 416, 128)


def test_a_sparse_model_reads_more_experts_with_more_tokens() -> None:
    roofline = Roofline(GPUS["h200"], MODELS["v4-flash-like"])
    one, eight, many = (roofline.verify_us(1, tokens, 0) for tokens in (1, 8, 128))
    assert 1.5 * one < eight < many


def test_names_of_estimates() -> None:
    assert parse_estimate("8xrtx4090:qwen3-4b")[2] == 8
    for text in ("h100", "h100:gpt", "v100:qwen3-8b", "0xh100:qwen3-8b", "x:y"):
        with pytest.raises(ConfigError, match="use GPU:MODEL or NxGPU:MODEL"):
            parse_estimate(text)


def test_written_estimate_says_so_and_reads_back(tmp_path: Path) -> None:
    server = load_server("h100:qwen3-4b", Overrides(max_batch_size=4, max_draft_len=3))
    path = tmp_path / "t.json"
    write_server(path, server)
    assert json.loads(path.read_text())["estimated"] is True
    read = load_server(str(path), Overrides())
    assert (read.estimated, read.max_batch_size, read.max_draft_len) == (True, 4, 3)
    assert read.table.step_time_us(4, 16) == pytest.approx(server.table.step_time_us(4, 16), rel=1e-4)
    assert set(read.drafters) == set(server.drafters)


def test_written_server_reads_back_whole(tmp_path: Path) -> None:
    verify = {VerifyShape(1, tokens, tokens, 0): 1000.0 + 100 * tokens for tokens in (1, 8)}
    times = LookupTable.of(CostTable(verify, {DraftShape(1, 0): 50.0}, (2, 4, 8)))
    server = Server(
        "GPU", times, False, 4, 512, 64, 7, max_queue_size=9, shared_prefill=True, host_us=300.5, host_request_us=2.0,
        host_token_us=0.25, prefill_us=(800.0, 1.5), ragged_us=40.0, absorb_us=3.0, drafters={"mtp1": times},
    )  # fmt: skip
    path = tmp_path / "t.json"
    write_server(path, server)
    assert load_server(str(path), Overrides()) == server
    assert load_server(str(path), Overrides(host_us=0.0, max_queue_size=5)) == dataclasses.replace(
        server, host_us=0.0, max_queue_size=5
    )


def test_cost_table_of_an_engine_keeps_its_staircase_as_a_file(tmp_path: Path) -> None:
    limits = Overrides(max_batch_size=4, max_seq_len=512, max_num_tokens=64, max_draft_len=7)
    path = tmp_path / "cost_table.json"
    content = {"schema": "trtllm_dspark.cost_table", "schema_version": 1, "engine_hash": "0" * 64, "device": "GPU",
               "num_threads": 2, "token_sizes": [4, 8], "verify_us": [[1, 1, 1, 0, 100.0], [1, 8, 8, 0, 800.0]],
               "draft_us": [[1, 0, 20.0]]}  # fmt: skip
    path.write_text(json.dumps(content))
    assert load_server(str(path), limits).table.step_time_us(1, 8).tolist()[1:] == [400.0] * 4 + [800.0] * 4
    for changed in ({"token_sizes": [8, 4]}, {"token_sizes": [0]}, {"host_us": -1}, {"prefill_us": [1]}):
        path.write_text(json.dumps(content | changed))
        with pytest.raises(UsageError, match="is malformed"):
            load_server(str(path), limits)


def test_memory_bounds_the_slots_of_an_estimate() -> None:
    wide = load_server("rtx4090:qwen3-8b", Overrides(max_seq_len=2048))
    # 24 GB hold 16 GB of weights and a few caches of 300 MB.
    assert 4 < wide.max_batch_size < 32


@pytest.mark.parametrize("text", ["rtx4090:qwen3-14b", "2xrtx4090:v4-flash-like", "l40s:v4-flash-like"])
def test_model_that_does_not_fit_is_told_an_estimate_that_does(text: str) -> None:
    with pytest.raises(ConfigError, match="does not fit into . x (RTX 4090|L40S)") as refused:
        load_server(text, Overrides())
    advice = str(refused.value).rpartition(" ")[2]
    given, advised = parse_estimate(text), parse_estimate(advice)
    assert advised[:2] == given[:2]
    assert advised[2] > given[2]
    assert load_server(advice, Overrides()).max_batch_size >= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is malformed"), ("{}", "is no cost table"), ('{"schema": "trtllm_dspark.cost_table", "schema_version": 1}',
     "holds no limits")],
)  # fmt: skip
def test_bad_table_file_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        load_server(str(path), Overrides())
    with pytest.raises(UsageError, match="no engine directory, no file and no estimate"):
        load_server(str(tmp_path / "missing"), Overrides())


def test_frontier_and_what_is_read_off_it() -> None:
    points = [Point(100, 100), Point(80, 800), Point(40, 1600)]
    assert frontier([*points, Point(70, 700), Point(100, 90)]) == [0, 1, 2]
    assert throughput_at(points, 60) == 1200
    assert throughput_at(points, 101) is None
    assert speed_at(points, 1200) == 60
    assert speed_at(points, 2000) is None
