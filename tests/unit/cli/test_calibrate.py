"""`calibrate` on the toy pair, and sessions that read what it wrote."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_pair import ToyPair

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.cli import calibrate
from trtllm_dspark.cli.main import main
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.runtime import Request, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.speculation import Calibration
from trtllm_dspark.speculation.calibration_file import read_calibration, write_calibration

LONG = ("--max_tokens", "480", "--batch_size", "4", "--ignore_eos")


@pytest.fixture
def engine_dir(toy_engine_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_engine_dir, tmp_path / "engine"))


def prompts(path: Path, *texts: str) -> str:
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return str(path)


def refused(engine_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the one sentence of a refusal with exit code 2 that wrote nothing."""
    assert main(["calibrate", "--engine_dir", str(engine_dir), "--log_level", "error", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert not (engine_dir / "calibration.json").exists()
    lines: list[str] = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_calibrate_fits_writes_and_judges_on_other_prompts(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [prompts(tmp_path / "a.jsonl", "a", "b", "c"), prompts(tmp_path / "b.jsonl", "ab", "cd", "x" * 600, "ef")]
    other = prompts(tmp_path / "other.jsonl", "AB")
    sts = tmp_path / "sts.json"
    flags = (
        "--prompts_file",
        *files,
        "--eval_prompts_file",
        other,
        "--sts_output",
        str(sts),
        "--plot",
        str(tmp_path / "p.svg"),
        *LONG,
    )
    assert main(["calibrate", "--engine_dir", str(engine_dir), *flags]) == 0
    out = capsys.readouterr().out
    directory = open_engine_dir(engine_dir)
    calibration = read_calibration(directory)
    assert calibration is not None
    assert calibration != Calibration.identity(7)
    fit = json.loads((engine_dir / "calibration.json").read_text())["fit"]
    assert fit["blocks"] > 4 * fit["judged_blocks"] > 0
    assert fit["judged_on_other_prompts"] is True
    assert sum(fit["ece_after"]) <= sum(fit["ece_before"])
    assert len(json.loads(sts.read_text())["sts_temperatures"]) == 7
    assert f"judged on    {fit['judged_blocks']} blocks of {other}" in out
    assert "position 7" in out
    assert f"would show {fit['ece_floor']:.4f}" in out
    assert 0 <= fit["ece_floor"] < 0.1
    plot = (tmp_path / "p.svg").read_text()
    assert plot.startswith("<svg")
    assert "calibrated" in plot


def test_session_applies_the_stored_calibration_and_says_so(
    engine_dir: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    write_calibration(open_engine_dir(engine_dir), Calibration((1.0,) * 7, (-30.0,) * 7), {})
    caplog.set_level(logging.INFO)
    flags = ["--prompt", "abc", "--max_tokens", "20", "--speculation", "threshold:0.3", "--json"]
    assert main(["run", "--engine_dir", str(engine_dir), *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "confidences are calibrated by" in caplog.text
    # So low a bias leaves no draft worth verifying.
    assert (result["drafted"] > 0, result["verified"]) == (True, 0)


def test_session_that_reads_no_confidence_still_refuses_a_calibration_of_another_engine(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_calibration(open_engine_dir(engine_dir), Calibration.identity(7), {})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"engine_hash": "f" * 64}))
    assert main(["run", "--engine_dir", str(engine_dir), "--prompt", "a", "--max_tokens", "3"]) == 3
    assert "belongs to another engine" in capsys.readouterr().err


def test_calibrate_ignores_the_calibration_that_is_there(engine_dir: Path, tmp_path: Path) -> None:
    path = prompts(tmp_path / "a.jsonl", "a", "b", "c", "d", "e", "f")
    flags = ["calibrate", "--engine_dir", str(engine_dir), "--prompts_file", path, *LONG]
    assert main(flags) == 0
    first = read_calibration(open_engine_dir(engine_dir))
    assert main(flags) == 0
    assert read_calibration(open_engine_dir(engine_dir)) == first


def test_calibrate_prompts_share_no_random_draws(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int | None] = []

    def run(session: Session, requests: Sequence[Request], **options: Any) -> Iterator[Any]:
        seeds.extend(request.params.seed for request in requests)
        return run_closed_loop(session, requests, **options)

    monkeypatch.setattr(calibrate, "run_closed_loop", run)
    files = [prompts(tmp_path / name, "a", "b", "c") for name in ("a.jsonl", "b.jsonl", "other.jsonl")]
    own = tmp_path / "a.jsonl"
    own.write_text(own.read_text() + "\n" + json.dumps({"prompt": "d", "seed": 0}))
    flags = ("--prompts_file", *files[:2], "--eval_prompts_file", files[2], "--seed", "0", "--temperature", "1", *LONG)
    for _ in range(2):
        assert main(["calibrate", "--engine_dir", str(engine_dir), *flags]) == 0
    assert seeds[:10] == seeds[10:]
    assert seeds[3] == 0
    assert len(set(seeds)) == 10


def test_calibrate_too_little_text_is_refused(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts(tmp_path / "a.jsonl", "a")
    assert "whole blocks are too few" in refused(engine_dir, capsys, "--prompts_file", path, "--max_tokens", "60")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch_size", "5"), "--batch_size must be from 1 to the engine's 4"),
        (("--max_prompts", "0"), "--max_prompts must be at least 1"),
        (("--plot", "p.gif"), "--plot p.gif: give a name that ends in .svg"),
        (("--max_tokens", "0"), "max_tokens must be"),
    ],
)
def test_calibrate_bad_flag_is_one_sentence(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    path = prompts(tmp_path / "a.jsonl", "a")
    assert message in refused(engine_dir, capsys, "--prompts_file", path, *flags)


def test_calibrate_batch_whose_blocks_would_be_cut_is_refused(
    toy_pair: ToyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_engine(
        BuildConfig(
            str(toy_pair.target_dir),
            tmp_path / "narrow",
            str(toy_pair.drafter_dir),
            max_batch_size=2,
            max_seq_len=64,
            max_num_tokens=12,
        )
    )
    path = prompts(tmp_path / "a.jsonl", "a")
    message = refused(tmp_path / "narrow", capsys, "--prompts_file", path, "--batch_size", "2")
    assert "--batch_size 2 needs 16 tokens a pass to verify whole blocks, the engine has 12" in message


def test_calibrate_engine_without_drafter_is_refused(
    toy_pair: ToyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_engine(BuildConfig(str(toy_pair.target_dir), tmp_path / "plain", max_batch_size=1, max_seq_len=64))
    path = prompts(tmp_path / "a.jsonl", "a")
    assert "no confidence head" in refused(tmp_path / "plain", capsys, "--prompts_file", path)


def test_session_without_calibration_file_has_raw_confidences(
    toy_engine_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Session.open(toy_engine_dir, num_threads=1, speculation="threshold").close()
    assert "calibrated" not in caplog.text
