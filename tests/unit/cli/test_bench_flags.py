"""Every flag of `bench` is read by a use of it or refused there by name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.sse_server import running

from trtllm_dspark.cli import bench
from trtllm_dspark.cli._bench_flags import settle
from trtllm_dspark.cli.main import main

SAMPLING = {"max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos", "raw"}
ENGINE = {"engine_dir", "num_threads", "kernel_library", "acceptance"}
READ = {
    "engine_dir": {
        "prompts_file", *SAMPLING, *ENGINE, "batch_size", "speculation", "repeats", "json", "drafter",
        "draft_engine_dir", "draft_len",
    },
    "acceptance_output": {"prompts_file", *SAMPLING, *ENGINE, "acceptance_output"},
    "url": {
        "prompts_file", *SAMPLING, "url", "api", "model", "traffic", "requests", "label", "report", "sla", "measured",
        "json",
    },
}  # fmt: skip
"""What each use of `bench` reads."""
BEGUN = {
    "engine_dir": ["--engine_dir", "e"],
    "acceptance_output": ["--engine_dir", "e", "--acceptance_output", "a.json"],
    "url": ["--url", "http://127.0.0.1:9"],
}
# Defaults too: what is given counts, not what it differs from.
VALUES = {
    "batch_size": "1",
    "num_threads": "2",
    "acceptance": "rejection",
    "speculation": "off,fixed:3,fixed:7,threshold:0.3,adaptive",
    "repeats": "3",
    "drafter": "engine",
    "draft_len": "3",
    "api": "triton",
    "model": "ensemble",
    "traffic": "closed:1,2,4,8",
    "requests": "4",
    "label": "server",
    "report": "r.html",
    "sla": "tok_s_user=3",
    "temperature": "0",
    "top_p": "1",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    bench.add_arguments(made)
    return made


def flags() -> list[argparse.Action]:
    return [action for action in parser()._actions if action.dest != "help"]


def given(action: argparse.Action) -> list[str]:
    name = action.option_strings[0]
    return [name] if action.nargs == 0 else [name, VALUES.get(action.dest, "1")]


@pytest.mark.parametrize("action", flags(), ids=lambda action: action.dest)
@pytest.mark.parametrize("use", READ)
def test_flag_is_read_or_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str, action: argparse.Action
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}')
    begun = [*BEGUN[use], "--prompts_file", str(prompts)]
    if action.dest in READ[use]:
        # Further down, the use itself reads it.
        settle(parser().parse_args([*begun, *given(action)]))
        return
    if use == "engine_dir" and action.dest in ("url", "acceptance_output"):
        return  # the others
    assert main(["bench", "--log_level", "error", *begun, *given(action)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    # Of two uses at once the sentence names both.
    named = "give --engine_dir" if action.dest in ("url", "engine_dir") else action.option_strings[0]
    assert sentence.startswith(f"trtllm-dspark bench: {named} ")


class Watched(argparse.Namespace):
    """Flags that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            super().__getattribute__("__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("use", READ)
def test_use_reads_the_flags_it_takes_and_no_other(
    toy_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abc"}')
    engine = ["--engine_dir", str(toy_engine_dir)]
    for server in running():
        begun = {
            "engine_dir": [*engine, "--repeats", "1", "--speculation", "off"],
            "acceptance_output": [*engine, "--acceptance_output", str(tmp_path / "a.json"), "--ignore_eos"],
            "url": ["--url", server.url, "--requests", "1", "--traffic", "closed:1"],
        }[use]
        flags = [*begun, "--prompts_file", str(prompts), "--max_tokens", "12"]
        args = parser().parse_args(flags, Watched())

        def settled(args: argparse.Namespace) -> None:
            settle(args)
            args._read.clear()

        monkeypatch.setattr(bench, "settle", settled)
        assert bench.run(args) == 0
        # Which use it is, and a number that is checked for all of them.
        assert args._read - {"url", "acceptance_output", "requests"} == READ[use] - {
            "url",
            "acceptance_output",
            "requests",
        }


@pytest.mark.parametrize("use", READ)
def test_what_is_not_given_has_its_default(use: str) -> None:
    args = parser().parse_args([*BEGUN[use], "--prompts_file", "p"])
    settle(args)
    assert (args.batch_size, args.num_threads, args.acceptance, args.repeats) == (1, 2, "rejection", 3)
    assert (args.drafter, args.speculation) == ("engine", bench.DEFAULT_MODES)
    assert (args.api, args.model, args.traffic, args.label) == ("triton", "ensemble", "closed:1,2,4,8", "server")
    assert (args.report, args.requests, args.draft_len) == ([], None, None)


def test_help_still_shows_the_defaults() -> None:
    text = " ".join(parser().format_help().split())
    for shown in ("rejection", "engine", bench.DEFAULT_MODES, "closed:1,2,4,8", "ensemble", "triton", "server"):
        assert f"(default: {shown})" in text


@pytest.mark.parametrize(
    ("draft_len", "modes"),
    [
        ("2", ["off", "fixed:2", "threshold:0.3", "adaptive"]),
        ("5", ["off", "fixed:3", "fixed:5", "threshold:0.3", "adaptive"]),
    ],
)
def test_default_modes_end_with_the_block(
    toy_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], draft_len: str, modes: list[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abc"}')
    common = ["bench", "--engine_dir", str(toy_engine_dir), "--prompts_file", str(prompts), "--max_tokens", "12"]
    common += ["--drafter", "ngram", "--draft_len", draft_len, "--json", "--log_level", "error"]
    assert main(common) == 0
    assert [mode["speculation"] for mode in json.loads(capsys.readouterr().out)["modes"]] == modes
    # What was asked for is not changed behind anybody's back.
    assert main([*common, "--speculation", "fixed:7"]) == 2
    assert "asks for 7 drafts" in capsys.readouterr().err
