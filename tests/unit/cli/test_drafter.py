"""`--drafter`: same text from whatever drafts, and flags that do not go together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.toy_pair import ToyPair

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.cli.main import main


@pytest.fixture
def plain_dir(toy_pair: ToyPair, tmp_path: Path) -> Path:
    build_engine(BuildConfig(str(toy_pair.target_dir), tmp_path / "plain", max_batch_size=4, max_seq_len=512))
    return tmp_path / "plain"


def run(engine: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    common = ("--prompt", "abcabc", "--max_tokens", "30", "--ignore_eos", "--json", "--log_level", "error")
    assert main(["run", "--engine_dir", str(engine), *common, *flags]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_run_every_drafter_gives_the_same_tokens(
    toy_engine_dir: Path, plain_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(toy_engine_dir, capsys, "--speculation", "off")
    # The toy target drafts for itself: every draft is right.
    model = ("--drafter", "draft_model", "--draft_engine_dir", str(plain_dir), "--draft_len", "4")
    for engine in (toy_engine_dir, plain_dir):
        drafted = run(engine, capsys, "--speculation", "fixed", *model)
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["accepted"] == drafted["verified"] != 0
        looked_up = run(engine, capsys, "--speculation", "adaptive", "--drafter", "ngram")
        assert looked_up["token_ids"] == plain["token_ids"]
    both = run(toy_engine_dir, capsys, "--speculation", "fixed", "--drafter", "engine+ngram")
    assert both["token_ids"] == plain["token_ids"]
    assert both["verified"] != 0
    flags = ("--prompt", "a", "--speculation", "fixed", "--drafter", "engine+ngram", "--log_level", "error")
    assert main(["run", "--engine_dir", str(plain_dir), *flags]) == 2
    assert "needs an engine with a block drafter" in capsys.readouterr().err


def test_bench_compares_modes_of_another_drafter(
    toy_engine_dir: Path, plain_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "abc"}))
    flags = ["--prompts_file", str(prompts), "--max_tokens", "16", "--ignore_eos", "--repeats", "1", "--json"]
    drafter = ["--drafter", "draft_model", "--draft_engine_dir", str(plain_dir), "--draft_len", "3"]
    assert main(["bench", "--engine_dir", str(toy_engine_dir), *flags, *drafter, "--speculation", "fixed"]) == 0
    modes = {mode["speculation"]: mode for mode in json.loads(capsys.readouterr().out)["modes"]}
    assert modes["fixed"]["accepted_len"] > 3
    assert modes["off"]["accepted_len"] in (None, 1.0)


@pytest.mark.parametrize("name", ["run", "bench", "eval"])
@pytest.mark.parametrize(
    "drafter",
    [("engine+ngram",), ("ngram",), ("ngram", "--draft_len", "3"), ("draft_model",), ("dspark",)],
    ids=" ".join,
)
def test_every_drafter_works_with_the_defaults_of_the_other_flags(
    toy_engine_dir: Path,
    plain_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    drafter: tuple[str, ...],
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "abc"}))
    flags = ["--engine_dir", str(toy_engine_dir), "--prompts_file", str(prompts), "--max_tokens", "20", "--ignore_eos"]
    model = ["--draft_engine_dir", str(plain_dir)] if drafter == ("draft_model",) else []
    assert main([name, *flags, "--drafter", *drafter, *model, "--log_level", "error"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--draft_len", "3"), "--draft_len goes with --drafter ngram or draft_model"),
        (("--drafter", "ngram", "--draft_engine_dir", "x"), "--draft_engine_dir goes with --drafter draft_model"),
        (("--drafter", "draft_model"), "--drafter draft_model needs --draft_engine_dir"),
        (("--drafter", "ngram", "--draft_len", "900"), "900 drafts a request do not fit"),
        (("--drafter", "engine+ngram", "--draft_len", "3"), "drafts the engine's block; leave --draft_len out"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    toy_engine_dir: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    common = ["run", "--engine_dir", str(toy_engine_dir), "--prompt", "a", "--speculation", "fixed"]
    assert main([*common, "--log_level", "error", *flags]) == 2
    assert message in capsys.readouterr().err
