"""`bench --url` counts what a server streams, and `bench --acceptance_output` what an engine's drafts do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.sse_server import SseServer, running

from trtllm_dspark.cli.main import main
from trtllm_dspark.simulate.acceptance import read_acceptance
from trtllm_dspark.simulate.load_report import read_rows


@pytest.fixture
def server() -> Iterator[SseServer]:
    # Long enough that three users overlap on a busy machine too.
    yield from running(pause_s=0.02)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "abc", "domain": "math"}\n{"prompt": "ab", "max_tokens": 4, "speculation": "off"}\n')
    return str(path)


def bench(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    try:
        code = main(["bench", "--log_level", "warning", *flags])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_closed_loop_counts_requests_tokens_and_rounds(
    server: SseServer, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--url", server.url, "--prompts_file", prompts, "--max_tokens", "10", "--traffic", "closed:1,3")
    code, out, err = bench(capsys, *flags, "--requests", "12", "--label", "adaptive", "--json", "--ignore_eos")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(row["load"], row["users"], row["measured"]) for row in report["rows"]] == [
        ("1 users", 1, True),
        ("3 users", 3, True),
    ]
    for row in report["rows"]:
        assert (row["policy"], row["requests"], row["failed"]) == ("adaptive", 12, 0)
        # Ten tokens in four events and four in two: 3 + 1 rounds, 6 + 2 drafts accepted.
        assert row["accepted_len"] == 3.0
        # One token more or less is 1.2 %; a fast run's rounded seconds are off by some tenths of a percent.
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(6 * 10 + 6 * 4, rel=5e-3)
        assert row["ttft_ms_p50"] > 0
    assert server.most_at_once == 3
    path, body = server.bodies[0]
    assert path == "/v2/models/ensemble/generate_stream"
    assert (body["text_input"], body["max_tokens"], body["ignore_eos"]) == ("abc", 10, True)
    assert body["apply_chat_template"] is True
    assert (server.bodies[1][1]["max_tokens"], server.bodies[1][1]["num_draft_tokens"]) == (4, 0)


def test_open_loop_sends_at_its_rate_whatever_comes_back(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    for server in running(pause_s=0.05):
        flags = ("--url", server.url, "--prompts_file", prompts, "--max_tokens", "10", "--traffic", "poisson:100")
        code, out, _ = bench(capsys, *flags, "--requests", "20", "--json")
        assert code == 0
        assert json.loads(out)["rows"][0]["requests"] == 20
        assert server.most_at_once >= 5


def test_raw_text_is_sent_as_it_is(server: SseServer, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As in process; and a server of another project knows no input for templates."""
    flags = ("--url", server.url, "--prompts_file", prompts, "--traffic", "closed:1", "--requests", "2", "--raw")
    assert bench(capsys, *flags)[0] == 0
    assert all("apply_chat_template" not in body for _, body in server.bodies)


def test_openai_front_is_asked_for_its_usage(
    server: SseServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = str(tmp_path / "p.jsonl")
    Path(prompts).write_text('{"prompt": "abc"}\n{"prompt": "ab", "max_tokens": 4, "stop": ["y"]}\n')
    flags = ("--url", server.url, "--prompts_file", prompts, "--max_tokens", "10", "--traffic", "closed:2")
    code, out, _ = bench(capsys, *flags, "--requests", "4", "--api", "openai", "--json")
    row = json.loads(out)["rows"][0]
    assert code == 0
    assert row["tokens_per_s"] * row["seconds"] == pytest.approx(28, rel=1e-2)
    assert row["accepted_len"] is None
    path, body = server.bodies[0]
    assert path == "/v1/chat/completions"
    assert body["stream_options"] == {"include_usage": True}
    # Two users send at once, in either order.
    stops = {sent["messages"][0]["content"]: sent.get("stop") for _, sent in server.bodies}
    assert stops == {"abc": None, "ab": ["y"]}


@pytest.mark.parametrize(
    ("api", "field", "message"),
    [
        ("openai", '"speculation": "off"', "prompt on line 2: the openai API takes no speculation; use --api triton"),
        ("openai", '"max_draft_len": 2', "prompt on line 2: the openai API takes no max_draft_len; use --api triton"),
        (
            "openai",
            '"stop_token_ids": [2]',
            "prompt on line 2: the openai API takes no stop_token_ids; use stop strings",
        ),
        (
            "triton",
            '"stop_token_ids": [2]',
            "prompt on line 2: the triton API takes no stop_token_ids; use stop strings",
        ),
    ],
)
def test_prompt_with_a_field_that_cannot_be_sent_is_refused_before_the_load(
    server: SseServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], api: str, field: str, message: str
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(f'{{"prompt": "abc"}}\n{{"prompt": "ab", {field}}}\n')
    code, out, err = bench(capsys, "--url", server.url, "--prompts_file", str(prompts), "--api", api)
    assert (code, out) == (2, "")
    assert message in err
    assert server.bodies == []


def test_refused_requests_are_counted_and_not_averaged(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    for server in running(refuse_after=6):
        flags = ("--url", server.url, "--prompts_file", prompts, "--max_tokens", "10", "--traffic", "closed:1")
        code, out, _ = bench(capsys, *flags, "--requests", "10", "--json")
        report = json.loads(out)
        assert code == 0
        assert (report["rows"][0]["requests"], report["rows"][0]["failed"]) == (6, 4)
        assert report["notes"] == ["4 requests were refused or failed."]
        code, _, err = bench(capsys, *flags, "--requests", "2")
        assert code == 2
        assert "every request failed, the first with: HTTP 503: " in err
        assert "the queue is full" in err


def test_measured_rows_lie_beside_simulated_ones(
    server: SseServer, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "m.json"
    flags = ("--url", server.url, "--prompts_file", prompts, "--max_tokens", "10", "--traffic", "closed:1,2")
    assert bench(capsys, *flags, "--requests", "4", "--label", "off", "--report", str(measured))[0] == 0
    assert [row.curve for row in read_rows(measured)] == ["off, measured"] * 2
    page = tmp_path / "r.html"
    code = main(
        ["simulate", "--cost_table", "l40s:qwen3-4b", "--acceptance", "qwen3-4b", "--traffic", "closed:1,2"]
        + ["--policy", "off", "--requests", "6", "--output_tokens", "16", "--measured", str(measured)]
        + ["--max_batch_size", "4", "--report", str(page), "--log_level", "error"]
    )
    assert code == 0
    text = page.read_text()
    assert ">off</text>" in text
    assert ">off, measured</text>" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --engine_dir to measure an engine here, or --url to load a server"),
        (("--url", "localhost:8000"), "use http://HOST:PORT or grpc://HOST:PORT"),
        (("--url", "grpc://127.0.0.1:9"), "nothing listens on 127.0.0.1:9"),
        (("--url", "grpc://h:1", "--api", "openai"), "the OpenAI API is spoken over HTTP only"),
        (("--url", "http://localhost"), "use http://HOST:PORT"),
        (("--url", "http://127.0.0.1:9"), "nothing listens on 127.0.0.1:9"),
        (("--url", "http://h:1", "--traffic", "open:3"), "traffic 'open:3' is not known"),
        (("--url", "http://h:1", "--requests", "0"), "--requests must be at least 1"),
        (("--url", "http://h:1", "--acceptance_output", "a"), "a server does not tell confidences"),
        (("--url", "http://h:1", "--report", "a.pdf"), "must end in .html, .json, .csv, .svg"),
        (("--url", "http://h:1", "--sla", "ttft=3"), "use tok_s_user=NUMBER"),
        (("--engine_dir", "e", "--report", "a.html"), "belong to --url"),
    ],
)
def test_bad_flag_is_one_sentence(
    prompts: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    code, out, err = bench(capsys, "--prompts_file", prompts, *flags)
    assert code in (2, 4)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err


def test_acceptance_output_is_what_the_engine_did(
    toy_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "a.json"
    prompts.write_text('{"prompt": "abc", "domain": "math"}\n{"prompt": "c"}\n')
    flags = ("--engine_dir", str(toy_engine_dir), "--prompts_file", str(prompts), "--max_tokens", "60", "--ignore_eos")
    code, out, err = bench(capsys, *flags, "--acceptance_output", str(output))
    assert (code, err) == (0, "")
    profile = read_acceptance(output)
    assert profile.domains == ("math", "all")
    assert f"math {profile.accepted_len('math'):.2f}" in out
    assert "measured" in profile.source
    blocks = profile.blocks("math", seed=0)
    assert blocks.confidence.shape[1] == 7
    # The toy drafter is wrong after every fifth token and knows it: confidence tells acceptance.
    assert 0 < blocks.accepted.mean() < 7
    # One block for every token that may follow, and one text.
    assert (len(blocks), blocks.starts) == (60, (0,))
    cut = blocks.accepted < 7
    at_rejection = blocks.confidence[cut, blocks.accepted[cut]]
    assert at_rejection.max() < blocks.confidence[blocks.accepted > 0, 0].min()
