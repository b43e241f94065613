"""`simulate` prints and writes one report, in every form, and refuses mistakes in one sentence."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trtllm_dspark.cli.main import main
from trtllm_dspark.simulate.acceptance import AcceptanceProfile, write_acceptance

BASE = ("--cost_table", "h100:qwen3-4b", "--max_batch_size", "8", "--output_tokens", "24", "--requests", "16")


def simulate(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    try:
        code = main(["simulate", "--log_level", "error", *flags])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def profile_file(tmp_path: Path) -> str:
    path = tmp_path / "<b>a&b.json"
    evil = "<script>alert(1)</script>"
    write_acceptance(path, AcceptanceProfile(evil, evil, {"math": (0.9,) * 7, evil: (0.5,) * 7}))
    return str(path)


def test_reports_hold_the_same_figures_in_every_form(
    tmp_path: Path, profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"r.{suffix}" for suffix in ("html", "json", "csv", "svg")]
    reports = [flag for path in paths for flag in ("--report", str(path))]
    flags = (
        "--acceptance",
        profile_file,
        "--traffic",
        "closed:1,4",
        "--policy",
        "off,fixed:5",
        "--sla",
        "tok_s_user=80",
    )
    code, out, err = simulate(capsys, *BASE, *flags, *reports)
    assert (code, err) == (0, "")
    assert "estimated: pass times come from public figures" in out
    report = json.loads(paths[1].read_text())
    assert report["estimated"] is True
    assert [(row["policy"], row["users"]) for row in report["rows"]] == [
        ("off", 1),
        ("off", 4),
        ("fixed:5", 1),
        ("fixed:5", 4),
    ]
    assert report["throughput_at_service_level"]["fixed:5"] > report["throughput_at_service_level"]["off"]
    assert report["advice"].startswith("At 80 tokens/s per user use fixed:5: it carries ")
    rows = list(csv.DictReader(paths[2].open()))
    assert [float(row["tokens_per_s"]) for row in rows] == [row["tokens_per_s"] for row in report["rows"]]
    ElementTree.fromstring(paths[3].read_text())
    page = paths[0].read_text()
    assert "Estimated: pass times" in page
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=|@import|url\((?!#)", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    assert page.count("<svg") >= 4
    assert "trtllm_dspark 0." in page


def test_same_seed_prints_the_same_report(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*BASE, "--acceptance", "qwen3-4b", "--traffic", "bursty:40", "--policy", "adaptive", "--json", "--seed")
    first, again, other = (simulate(capsys, *flags, seed)[1] for seed in ("1", "1", "2"))
    assert first == again
    assert json.loads(first)["rows"] != json.loads(other)["rows"]


def test_trace_mtp_and_cluster_flags_reach_the_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    line = '{{"arrival_s": {}, "prompt_tokens": 40, "output_tokens": 20, "domain": "math"}}\n'
    trace.write_text("".join(line.format(0.01 * index) for index in range(30)))
    page = tmp_path / "r.html"
    flags = ("--acceptance", "qwen3-4b", "--traffic", str(trace), "--policy", "mtp2", "--mtp_acceptance", "0.8,0.7")
    cluster = ("--replicas", "2", "--router", "load_aware", "--nvml", "--fault", "throttle:0:0:9:0.5")
    code, out, err = simulate(capsys, *BASE, *flags, *cluster, "--json", "--report", str(page))
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["rows"][0]["requests"] == 30
    assert 1.5 < report["rows"][0]["accepted_len"] < 2.6
    assert "2 replicas, load_aware, reading NVML; throttle:0:0:9:0.5" in report["facts"]["cluster"]
    assert "replicas: mtp2" in page.read_text()


def test_written_cost_table_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.json"
    flags = ("--acceptance", "qwen3-4b", "--traffic", "closed:2", "--policy", "fixed:3", "--json")
    first = simulate(capsys, *BASE, *flags, "--write_cost_table", str(table))[1]
    again = simulate(capsys, "--cost_table", str(table), *BASE[2:], *flags)[1]
    assert json.loads(again)["rows"][0]["tokens_per_s"] == pytest.approx(
        json.loads(first)["rows"][0]["tokens_per_s"], rel=1e-3
    )
    assert json.loads(again)["estimated"] is True


def test_written_cost_table_keeps_what_a_round_takes_beside_the_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.json"
    flags = ("--acceptance", "qwen3-4b", "--traffic", "closed:2", "--policy", "off", "--json")
    slow = ("--host_us", "9000", "--max_queue_size", "3", "--write_cost_table", str(table))
    first = simulate(capsys, *BASE, *flags, *slow)[1]
    again = simulate(capsys, "--cost_table", str(table), *BASE[2:], *flags)[1]
    assert json.loads(again)["rows"][0]["tokens_per_s"] == pytest.approx(
        json.loads(first)["rows"][0]["tokens_per_s"], rel=1e-3
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--acceptance", "nothing"), "acceptance profile nothing cannot be read"),
        (("--acceptance", "qwen3-4b", "--policy", "of"), "speculation 'of' is not known"),
        (("--acceptance", "qwen3-4b", "--policy", "fixed:9"), "asks for 9 drafts, the engine verifies at most 7"),
        (("--acceptance", "qwen3-4b", "--policy", "mtp1"), "give --mtp_acceptance"),
        (("--acceptance", "qwen3-4b", "--policy", "adaptive/all"), "must be full:N"),
        (("--acceptance", "qwen3-4b", "--mtp_acceptance", "x"), "must hold numbers from 0 to 1"),
        (("--acceptance", "qwen3-4b", "--domains", "poetry"), "has no domain 'poetry'"),
        (("--acceptance", "qwen3-4b", "--domains", "math=-1"), "use NAME=WEIGHT"),
        (("--acceptance", "qwen3-4b", "--max_draft_len", "12"), "knows 7 drafts"),
        (("--acceptance", "qwen3-4b", "--requests", "0"), "--requests must be at least 1"),
        (("--acceptance", "qwen3-4b", "--report", "/no/such/r.html"), "the folder /no/such does not exist"),
        (("--acceptance", "qwen3-4b", "--sla", "fast"), "use tok_s_user=NUMBER"),
        (("--acceptance", "qwen3-4b", "--autoscale", "9"), "use LEAST:MOST"),
        (("--acceptance", "qwen3-4b", "--seed", "-1"), "--seed must be at least 0, got -1"),
        (("--acceptance", "qwen3-4b", "--prompt_tokens", "0.5"), "lengths '0.5' are not known"),
        (("--acceptance", "qwen3-4b", "--prompt_tokens", "uniform:0.2:0.7"), "N, LOW and HIGH whole"),
        (("--acceptance", "qwen3-4b", "--host_us", "-1"), "--host_us must be at least 0"),
        (("--acceptance", "qwen3-4b", "--cost_table", "v100:x"), "estimate 'v100:x' is not known"),
    ],
)
def test_bad_flag_is_one_sentence(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    code, out, err = simulate(capsys, *BASE, "--traffic", "closed:1", *flags)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
