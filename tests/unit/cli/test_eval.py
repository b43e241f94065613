"""`eval` on the toy pair."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_pair import ToyPair

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.cli import eval as eval_command
from trtllm_dspark.cli.main import main
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.evaluation import EvaluationRun, run_domain
from trtllm_dspark.runtime import Request
from trtllm_dspark.speculation import Calibration
from trtllm_dspark.speculation.calibration_file import write_calibration

SHORT = ("--max_tokens", "40", "--batch_size", "2", "--ignore_eos", "--seed", "5")


def write_prompts(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"prompt": text, "domain": domain} for text, domain in (("abc", "x"), ("de", "y"), ("fgh", "x"))]
    return write_prompts(tmp_path / "p.jsonl", *rows)


def test_eval_reports_every_domain_and_temperature(
    toy_engine_dir: Path, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "eval.json"
    flags = ["eval", "--engine_dir", str(toy_engine_dir), "--prompts_file", prompts, *SHORT, "--output", str(output)]
    assert main([*flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == report
    labels = [(entry["domain"], entry["temperature"], entry["prompts"]) for entry in report["results"]]
    assert labels == [(d, t, n) for t in (0.0, 1.0) for d, n in (("x", 2), ("y", 1), ("all", 3))]
    for entry in report["results"]:
        assert 1 <= entry["accepted_len"] <= 8
        assert len(entry["conditional_acceptance"]) == 7
        sweep = entry["sweep"]
        # A higher threshold verifies less and emits no more.
        assert [p["verified"] for p in sweep] == sorted((p["verified"] for p in sweep), reverse=True)
        assert [p["accepted_len"] for p in sweep] == sorted((p["accepted_len"] for p in sweep), reverse=True)
    assert main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report


def test_eval_accepted_length_is_that_of_run(
    toy_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", {"prompt": "abcab"})
    common = ["--engine_dir", str(toy_engine_dir), "--max_tokens", "40", "--ignore_eos", "--json"]
    assert main(["eval", *common, "--prompts_file", path, "--temperatures", "0"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["results"]
    assert main(["run", *common, "--prompt", "abcab", "--speculation", "fixed"]) == 0
    ran = json.loads(capsys.readouterr().out)
    assert [entry["accepted_len"] for entry in evaluated] == [ran["accepted_len"]]


def test_eval_shows_the_engines_calibration(
    toy_engine_dir: Path, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Path(shutil.copytree(toy_engine_dir, tmp_path / "engine"))
    write_calibration(open_engine_dir(engine), Calibration((1.0,) * 7, (-30.0,) * 7), {})
    flags = ["eval", "--engine_dir", str(engine), "--prompts_file", prompts, *SHORT, "--temperatures", "0"]
    assert main([*flags, "--json"]) == 0
    for entry in json.loads(capsys.readouterr().out)["results"]:
        assert entry["calibrated"]["mean_ece"] != entry["quality"]["mean_ece"]
        assert entry["sweep"][1]["verified"] == 0
    assert main(flags) == 0
    out = capsys.readouterr().out
    for title in ("acceptance", "confidence", "threshold"):
        assert title in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temperatures", "0,hot"), "--temperatures '0,hot' must be numbers of at least 0"),
        (("--temperatures", "-1"), "--temperatures '-1' must be numbers of at least 0"),
        (("--temperature", "1"), "eval takes --temperatures"),
        (("--batch_size", "9"), "--batch_size must be from 1 to the engine's 4"),
        (("--max_tokens", "0"), "max_tokens must be"),
    ],
)
def test_eval_bad_flag_is_one_sentence(
    toy_engine_dir: Path, prompts: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, str], message: str
) -> None:
    common = ["--engine_dir", str(toy_engine_dir), "--prompts_file", prompts, "--log_level", "error"]
    assert main(["eval", *common, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


def test_eval_prompts_share_no_random_draws_across_domains(
    toy_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int | None] = []

    def run(engine: Any, tokenizer: Any, requests: Sequence[Request], **options: Any) -> EvaluationRun:
        seeds.extend(request.params.seed for request in requests)
        return run_domain(engine, tokenizer, requests, **options)

    monkeypatch.setattr(eval_command, "run_domain", run)
    rows = [{"prompt": text, "domain": domain} for text, domain in (("abc", "x"), ("abc", "y"), ("ab", "x"))]
    path = write_prompts(tmp_path / "p.jsonl", *rows, {"prompt": "cd", "domain": "y", "seed": 5})
    flags = ("--prompts_file", path, "--temperatures", "1", *SHORT)
    assert main(["eval", "--engine_dir", str(toy_engine_dir), *flags]) == 0
    assert seeds[-1] == 5
    assert len(set(seeds)) == 4


def test_eval_refuses_prompts_that_set_a_temperature(
    toy_engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", {"prompt": "a", "temperature": 0.5})
    assert main(["eval", "--engine_dir", str(toy_engine_dir), "--prompts_file", path]) == 2
    assert "sets 'temperature'; leave it to --temperatures" in capsys.readouterr().err


def test_eval_refuses_an_engine_without_drafter(
    toy_pair: ToyPair, tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build_engine(BuildConfig(str(toy_pair.target_dir), tmp_path / "plain", max_batch_size=1, max_seq_len=64))
    assert main(["eval", "--engine_dir", str(tmp_path / "plain"), "--prompts_file", prompts]) == 2
    assert "has no drafter; there is nothing to evaluate" in capsys.readouterr().err


@pytest.mark.parametrize("own_drafter", [True, False])
def test_eval_of_a_lookup(
    toy_pair: ToyPair,
    toy_engine_dir: Path,
    tmp_path: Path,
    prompts: str,
    capsys: pytest.CaptureFixture[str],
    own_drafter: bool,
) -> None:
    engine = toy_engine_dir
    if not own_drafter:
        engine = tmp_path / "plain"
        build_engine(BuildConfig(str(toy_pair.target_dir), engine, max_batch_size=2, max_seq_len=64))
    flags = ["--temperatures", "0", "--drafter", "ngram", "--draft_len", "3", "--json"]
    assert main(["eval", "--engine_dir", str(engine), "--prompts_file", prompts, *SHORT, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["drafter"] == "ngram"
    assert [len(entry["conditional_acceptance"]) for entry in report["results"]] == [3, 3, 3]
