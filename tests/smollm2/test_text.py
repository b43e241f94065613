"""Real text through the real tokenizer: streams, stops, seeds, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.fake_engine import collect_outputs, text, token_ids

from trtllm_dspark.cli.main import main
from trtllm_dspark.engine.base import Engine
from trtllm_dspark.runtime import Request, SamplingParams, Session, Tokenizer

EMOJI = "Repeat: 😀 🎉 日本語 привет 😀 🎉 日本語 привет 😀 🎉 日本語 привет 😀 🎉 日本語"


@pytest.mark.parametrize("speculation", ["off", "fixed", "threshold:0.3"])
def test_stream_many_byte_text_is_whole_in_every_delta(engine: Engine, tokenizer: Tokenizer, speculation: str) -> None:
    session = Session(engine, tokenizer, speculation=speculation)
    session.add(Request("a", tokenizer.encode(EMOJI), SamplingParams(max_tokens=60)))
    outputs = collect_outputs(session)["a"]
    assert "привет" in text(outputs)
    assert not any("\ufffd" in output.text_delta for output in outputs)
    assert text(outputs) == tokenizer.decode(token_ids(outputs))


def test_encode_decode_round_trip_keeps_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(EMOJI)) == EMOJI


@pytest.mark.parametrize("speculation", ["off", "fixed"])
def test_stop_string_cuts_the_text_it_appears_in(
    engine: Engine, tokenizer: Tokenizer, demo_ids: list[list[int]], speculation: str
) -> None:
    session = Session(engine, tokenizer, speculation=speculation)
    session.add(Request("free", demo_ids[0], SamplingParams(max_tokens=80)))
    free = text(collect_outputs(session)["free"])
    stop = free[40:47]
    session.add(Request("cut", demo_ids[0], SamplingParams(max_tokens=80, stop=[stop])))
    outputs = collect_outputs(session)["cut"]
    assert text(outputs) == free[: free.index(stop)]
    assert outputs[-1].finish_reason == "stop"


def test_coupled_seed_gives_same_tokens_with_and_without_speculation(
    engine: Engine, tokenizer: Tokenizer, demo_ids: list[list[int]]
) -> None:
    results = []
    for speculation in ("off", "fixed", "threshold:0.3"):
        session = Session(engine, tokenizer, speculation=speculation, acceptance="coupled")
        session.add(Request("a", demo_ids[1], SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=60)))
        if speculation != "off":
            session.add(Request("b", demo_ids[2], SamplingParams(temperature=1.0, max_tokens=30)))
        results.append(token_ids(collect_outputs(session)["a"]))
    assert results[0] == results[1] == results[2]


def test_run_prompts_file_prints_one_object_a_prompt_and_logs_elsewhere(
    smollm2_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "Say hello.", "max_tokens": 5}, {"prompt": "Count to ten.", "domain": "chat"}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    flags = ["--engine_dir", str(smollm2_engine_dir), "--prompts_file", str(path), "--max_tokens", "20", "--json"]
    assert main(["run", *flags, "--speculation", "fixed:4", "--batch_size", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 2]
    assert lines[0]["num_output_tokens"] == len(lines[0]["token_ids"]) == 5
    for line in lines:
        assert line["rounds"] * line["accepted_len"] == pytest.approx(line["num_output_tokens"] - 1)
        assert sum(line["verified_per_position"]) == line["verified"] <= line["drafted"]
        assert sum(line["accepted_per_position"]) == line["accepted"] <= line["verified"]
        assert len(line["verified_per_position"]) == 7
        assert line["ttft_ms"] > 0
        assert line["tokens_per_s"] == pytest.approx(line["num_output_tokens"] / line["elapsed_s"])
