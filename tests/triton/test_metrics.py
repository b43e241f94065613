"""What /metrics says after known work; every declared family is there, the names of old dashboards included."""

from __future__ import annotations

import re
import time

import pytest
from helpers import toy_pair as toy
from helpers.toy_tokenizer import encode
from helpers.triton_server import Server, wait_for

from trtllm_dspark.serving.metric_schema import FAMILIES, Kind


def total(server: Server, name: str) -> float:
    """Add all series of a family."""
    text = server.get("/metrics", port=server.metrics_port)[1]
    return sum(float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))


def settled(server: Server, names: list[str]) -> dict[str, float]:
    """Return series once the work of earlier tests has been published."""
    readings = [{}, {name: total(server, name) for name in names}]
    while readings[-1] != readings[-2]:
        time.sleep(1.2)  # the stub publishes every 0.5 s
        readings.append({name: total(server, name) for name in names})
    return readings[-1]


def test_metrics_move_by_exactly_what_was_asked(server: Server, toy_pair: toy.ToyPair) -> None:
    rounds = toy_pair.rounds(encode("a")[-1], 80, toy_pair.block_size)
    verified, accepted = toy.per_position(rounds, toy_pair.block_size)
    names = {
        "dspark_output_tokens": 3 * 80,
        "dspark_input_tokens": 3,
        "dspark_requests_received": 3,
        "dspark_requests_finished": 3,
        "dspark_verify_rounds": 3 * len(rounds),
        "dspark_verified_tokens": 3 * sum(verified),
        "dspark_accepted_tokens": 3 * sum(accepted),
        "dspark_verify_emitted_tokens": 3 * 79,
        "dspark_time_to_first_token_seconds_count": 3,
        "dspark_queue_seconds_count": 3,
        "dspark_request_seconds_count": 3,
        "dspark_inter_token_seconds_count": 3 * len(rounds),
        "nv_llm_output_token_len_count": 3,
    }
    before = settled(server, list(names))
    positions = {p: server.metric("dspark_accepted_at_position", position=str(p)) for p in range(1, 8)}
    server.generate_text("a", 80)
    server.generate_text("a", 80, "tensorrt_llm_bls_unary")
    list(server.events(text_input="a", max_tokens=80, stream=True))
    wait_for(lambda: {name: total(server, name) - before[name] for name in names} == names)
    for position, count in positions.items():
        moved = server.metric("dspark_accepted_at_position", position=str(position)) - count
        assert moved == 3 * accepted[position - 1]
    assert server.metric("dspark_engine_up") == 1
    assert server.metric("dspark_accepted_len") > 1


def test_metrics_histograms_are_cumulative_and_end_at_the_count(server: Server) -> None:
    server.generate_text("a", 20)
    wait_for(lambda: total(server, "dspark_round_seconds_count") > 0)
    text = server.get("/metrics", port=server.metrics_port)[1]
    found = dict(re.findall(r'^dspark_round_seconds_bucket\{le="([^"]+)"[^}]*\} (\S+)$', text, re.MULTILINE))
    ordered = [float(found[bound]) for bound in sorted(found, key=float)]
    assert ordered == sorted(ordered)
    (count,) = re.findall(r"^dspark_round_seconds_count\{[^}]*\} (\S+)$", text, re.MULTILINE)
    assert found["+Inf"] == count


# Of a GPU that is watched, a swap under way, traffic that is recorded; of rounds that adapt, with a calibration.
SOMETIMES = (
    "dspark_load_",
    "dspark_limit_",
    "dspark_swap_",
    "dspark_collect_",
    "dspark_speculation_",
    "dspark_calibration_",
    "dspark_trim_ratio",
)
ALWAYS = [family for family in FAMILIES if not family.name.startswith(SOMETIMES)]


@pytest.mark.parametrize("family", ALWAYS, ids=lambda family: family.name)
def test_metrics_declare_every_family(server: Server, family: object) -> None:
    text = server.get("/metrics", port=server.metrics_port)[1]
    name, kind = family.name, family.kind  # type: ignore[attr-defined]
    for suffix in ("_bucket", "_sum", "_count") if kind is Kind.HISTOGRAM else ("",):
        shown = "gauge" if kind is Kind.GAUGE else "counter"
        assert f"# TYPE {name}{suffix} {shown}" in text


def test_rejections_before_the_engine_are_counted(server: Server) -> None:
    before = server.metric("dspark_requests_rejected", reason="unknown_parameter")
    server.generate(text_input="a", max_tokens=1, temprature=2)
    wait_for(lambda: server.metric("dspark_requests_rejected", reason="unknown_parameter") == before + 1)


def test_metrics_of_drafts_follow_the_rounds(server: Server) -> None:
    before = server.metric("dspark_drafts_at_position", stage="verified", position="1") or 0
    server.generate_text("abc", 60)
    wait_for(lambda: (server.metric("dspark_drafts_at_position", stage="verified", position="1") or 0) > before)
    text = server.get("/metrics", port=server.metrics_port)[1]
    counted = dict(re.findall(r'^dspark_speculation_rounds\{[^}]*reason="(\w+)"[^}]*\} (\S+)$', text, re.MULTILINE))
    assert set(counted) >= {"off", "idle", "load", "bypass", "probe", "speculate"}
    assert sum(map(float, counted.values())) > 0
