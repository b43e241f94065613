"""Builds as processes: killed, out of disk, two at once; afterwards the destination is as it was, or whole."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_dspark.build import BuildConfig, build_engine, open_engine_dir

# Builds, and waits for its end in the middle of the step it is told.
SLOW_BUILD = """
import sys, time
from pathlib import Path
from trtllm_dspark.build import BuildConfig, build_engine
def pause(step, done):
    if step == sys.argv[4]:
        print("in", step, flush=True)
        time.sleep(60)
build_engine(BuildConfig(sys.argv[1], Path(sys.argv[3]), sys.argv[2], max_seq_len=64, overwrite=True), progress=pause)
"""


@contextmanager
def paused_build(config: BuildConfig, step: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [config.target_checkpoint, str(config.draft_checkpoint), str(config.output_dir), step]
    with subprocess.Popen([sys.executable, "-c", SLOW_BUILD, *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"in {step}\n"
        try:
            yield child
        finally:
            child.kill()


def command(config: BuildConfig, *flags: str, file_limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `trtllm-dspark build` as a user does; `file_limit` bounds the size of its files, as a full disk would."""

    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    return subprocess.run(
        [
            *(sys.executable, "-m", "trtllm_dspark.cli.main", "build"),
            *("--target_checkpoint", config.target_checkpoint, "--draft_checkpoint", str(config.draft_checkpoint)),
            *("--output_dir", str(config.output_dir), "--max_seq_len", "64", *flags),
        ],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )


@pytest.mark.parametrize("step", ["target", "drafter", "verify", "publish"])
def test_build_killed_leaves_no_engine_and_the_next_one_succeeds(tiny_config: BuildConfig, step: str) -> None:
    with paused_build(tiny_config, step) as child:
        child.send_signal(signal.SIGKILL)
    assert not tiny_config.output_dir.exists()
    build_engine(tiny_config)
    open_engine_dir(tiny_config.output_dir)
    assert os.listdir(tiny_config.output_dir.parent) == ["engine"]


def test_build_killed_while_replacing_keeps_the_old_engine(tiny_config: BuildConfig) -> None:
    before = build_engine(tiny_config).manifest
    with paused_build(tiny_config, "drafter") as child:
        child.send_signal(signal.SIGKILL)
    assert open_engine_dir(tiny_config.output_dir).manifest == before


def test_build_second_to_one_destination_is_refused(tiny_config: BuildConfig) -> None:
    with paused_build(tiny_config, "target"):
        done = command(tiny_config)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("trtllm-dspark build: another build is writing --output_dir")
    assert "Traceback" not in done.stderr


def test_build_on_a_full_disk_is_exit_code_4_and_leaves_nothing(tiny_config: BuildConfig) -> None:
    done = command(tiny_config, file_limit=100_000)
    assert done.returncode == 4
    last = done.stderr.splitlines()[-1]
    assert "free space or choose another --output_dir, nothing was left behind" in last
    assert "Traceback" not in done.stderr
    assert os.listdir(tiny_config.output_dir.parent) == []


def test_build_interrupted_from_the_keyboard_cleans_up(tiny_config: BuildConfig) -> None:
    with paused_build(tiny_config, "drafter") as child:
        child.send_signal(signal.SIGINT)
        child.wait()
    assert os.listdir(tiny_config.output_dir.parent) == []


def test_build_command_prints_the_table_and_dry_run_writes_nothing(tiny_config: BuildConfig) -> None:
    planned = command(tiny_config, "--dry_run")
    assert planned.returncode == 0
    assert not tiny_config.output_dir.parent.exists()
    done = command(tiny_config)
    assert done.returncode == 0, done.stderr
    for word in ("engine ", "target.onnx.data", "limits", "peak memory", "time"):
        assert word in done.stdout


def test_inspect_command_describes_and_refuses(tiny_config: BuildConfig) -> None:
    build_engine(replace(tiny_config))
    inspect = [sys.executable, "-m", "trtllm_dspark.cli.main", "inspect", "--engine_dir", str(tiny_config.output_dir)]
    shown = subprocess.run(inspect, capture_output=True, text=True)
    assert shown.returncode == 0
    assert "blocks of 5, vanilla head of rank 32" in shown.stdout
    as_json = subprocess.run([*inspect, "--json"], capture_output=True, text=True)
    assert as_json.stdout == (tiny_config.output_dir / "manifest.json").read_text()
    weights = tiny_config.output_dir / "target.onnx.data"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 0x10
    weights.write_bytes(content)
    damaged = subprocess.run(inspect, capture_output=True, text=True)
    assert damaged.returncode == 3
    assert damaged.stderr == (
        f"trtllm-dspark inspect: engine file {weights} is damaged (its SHA-256 differs); copy it again or build again\n"
    )


def test_inspect_side_table_of_another_engine_is_named(tiny_config: BuildConfig, tmp_path: Path) -> None:
    from trtllm_dspark.cli._tables import inspect_table

    build_engine(tiny_config)
    engine = open_engine_dir(tiny_config.output_dir)
    for text, expected in (
        ('{"engine_hash": "other"}', "belongs to another engine"),
        (f'{{"engine_hash": "{engine.manifest.engine_hash}"}}', "0.1 kB"),
        ("[", "unreadable"),
    ):
        (engine.path / "cost_table.json").write_text(text)
        assert dict(inspect_table(engine))["cost_table.json"].startswith(expected)
