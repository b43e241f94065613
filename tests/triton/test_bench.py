"""`bench --url` against a live server: the same load over HTTP and over gRPC gives the same report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_pair import ToyPair
from helpers.toy_tokenizer import encode
from helpers.triton_server import Server

from trtllm_dspark.cli.main import main

TOKENS = 60


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a"}, {"prompt": "B"}, {"prompt": "c", "speculation": "off"}, {"prompt": "D", "stop": ["never"]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def bench(capsys: pytest.CaptureFixture[str], url: str, prompts: Path, *flags: str) -> dict[str, Any]:
    given = [
        "bench",
        "--url",
        url,
        "--prompts_file",
        str(prompts),
        "--raw",
        "--max_tokens",
        str(TOKENS),
        "--ignore_eos",
    ]
    assert main([*given, "--requests", "8", "--json", "--log_level", "error", *flags]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_every_token_and_round_is_counted(
    server: Server, toy_pair: ToyPair, prompts: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    url = f"{scheme}://127.0.0.1:{server.http_port if scheme == 'http' else server.grpc_port}"
    report = bench(capsys, url, prompts, "--traffic", "closed:1,3", "--label", "fixed")
    drafting = [len(toy_pair.rounds(encode(letter)[-1], TOKENS, toy_pair.block_size)) for letter in "aBD"]
    rounds = sum(drafting) + TOKENS - 1
    assert [row["load"] for row in report["rows"]] == ["1 users", "3 users"]
    for row in report["rows"]:
        assert (row["policy"], row["measured"], row["requests"], row["failed"]) == ("fixed", True, 8, 0)
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(8 * TOKENS, rel=1e-3)
        assert row["accepted_len"] == pytest.approx(4 * (TOKENS - 1) / rounds, rel=1e-3)
        assert 0 < row["ttft_ms_p50"] < row["seconds"] * 1e3
    facts = dict(report["facts"]) if isinstance(report["facts"], list) else report["facts"]
    assert {"http": "HTTP", "grpc": "gRPC"}[scheme] in facts["server"]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_open_loop_and_refusals(
    server: Server, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    url = f"{scheme}://127.0.0.1:{server.http_port if scheme == 'http' else server.grpc_port}"
    (row,) = bench(capsys, url, prompts, "--traffic", "poisson:40")["rows"]
    assert (row["load"], row["requests"], row["failed"]) == ("40 requests/s", 8, 0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"prompt": "b", "temperature": -1}\n')
    (row,) = bench(capsys, url, bad, "--traffic", "closed:2")["rows"]
    assert (row["requests"], row["failed"]) == (4, 4)
