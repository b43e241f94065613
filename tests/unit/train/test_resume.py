"""A run that was stopped, killed or starved goes on as if nothing had happened."""

from __future__ import annotations

import csv
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training import make_run, small_config, train, write_responses

from trtllm_dspark.checkpoint.safetensors_io import read_file
from trtllm_dspark.errors import CheckpointError, DeviceError
from trtllm_dspark.train import saved_state, trainer
from trtllm_dspark.train.pipeline import LOG_FILE, STATE_DIR, TrainConfig
from trtllm_dspark.train.responses import Response
from trtllm_dspark.train.saved_state import STATE_FILE, load_state
from trtllm_dspark.train.trainer import StepReport, TrainingFailed


def losses(reports: list[StepReport]) -> list[tuple[object, ...]]:
    return [(r.step, r.loss, r.cross_entropy, r.l1, r.confidence, r.accept) for r in reports]


class Killed(Exception):
    pass


def train_until_killed(config: TrainConfig, responses: list[Response], step: int) -> list[StepReport]:
    """Train and break off after the update of `step`, before anything of it is saved."""
    reports: list[StepReport] = []

    def told(report: StepReport, _: object) -> None:
        if report.step > step:
            raise Killed
        reports.append(report)

    run = make_run(config, responses)
    try:
        with pytest.raises(Killed):
            run.train(stop=lambda: False, told=told)
    finally:
        run.close()
    return reports


@pytest.fixture(scope="module")
def whole_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(whole_dir: Path, target_dir: Path, responses: list[Response]) -> list[tuple[object, ...]]:
    """Return the losses of a run that nothing happens to."""
    return losses(train(small_config(target_dir, whole_dir), responses))


@pytest.mark.parametrize("step", [1, 3, 5])
def test_killed_at_any_step_goes_on_with_the_same_losses(
    config: TrainConfig, responses: list[Response], whole: list[tuple[object, ...]], whole_dir: Path, step: int
) -> None:
    first = losses(train_until_killed(config, responses, step))
    rest = losses(train(config, responses, resume=True))
    assert first + rest == whole
    stored = [read_file(path / "drafter" / "model.safetensors") for path in (whole_dir, config.output_dir)]
    for name, entry in stored[0].items():
        np.testing.assert_array_equal(entry.read(), stored[1][name].read())
    with (config.output_dir / LOG_FILE).open() as stream:
        assert [int(row["step"]) for row in csv.DictReader(stream)] == list(range(1, 7))


def test_stop_leaves_a_usable_drafter_and_the_same_future(
    config: TrainConfig, responses: list[Response], whole: list[tuple[object, ...]]
) -> None:
    reports: list[StepReport] = []
    run = make_run(config, responses, save_every=100)
    run.train(stop=lambda: len(reports) == 2, told=lambda report, _: reports.append(report))
    run.close()
    assert (config.output_dir / "drafter" / "model.safetensors").is_file()
    assert losses(reports) + losses(train(config, responses, resume=True)) == whole


def test_run_that_drew_blocks_otherwise_is_refused(
    config: TrainConfig, responses: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "DRAWING", trainer.DRAWING - 1)
    train(config, responses, steps=2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="drew its blocks as another version does"):
        make_run(config, responses, resume=True)


def test_threads_do_not_change_the_losses(
    config: TrainConfig, responses: list[Response], whole: list[tuple[object, ...]]
) -> None:
    assert losses(train(config, responses, num_threads=3)) == whole


def test_cache_that_forgets_does_not_change_the_losses(
    config: TrainConfig, responses: list[Response], whole: list[tuple[object, ...]]
) -> None:
    assert losses(train(config, responses, feature_cache_gib=30e3 / 2**30)) == whole
    assert sum(path.stat().st_size for path in (config.output_dir / "features").iterdir()) < 60e3


def test_minutes_become_a_number_of_steps_that_a_resumed_run_keeps(
    config: TrainConfig, responses: list[Response]
) -> None:
    run = make_run(config, responses, steps=None, minutes=30.0)
    run.train(stop=lambda: run.trainer.steps_done == 11, told=lambda *_: None)
    run.close()
    schedule = load_state(config.output_dir / STATE_DIR).facts["schedule"]
    assert schedule["num_steps"] > 11
    resumed = make_run(config, responses, steps=None, minutes=30.0, resume=True)
    resumed.close()
    assert resumed._steps.schedule is not None
    assert resumed._steps.schedule.as_json() == schedule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scale": 2.0}, "optimizer"),
        ({"markov_rank": 4}, "another shape"),
        ({"seed": 9}, "batch"),
        ({"warmup_steps": 3}, "--warmup_steps 2, this command 3; resume with the same"),
        ({"decay_share": 0.3}, r"--decay_share 0\.6, this command 0\.3"),
        ({"steps": 9, "decay_share": 0.3}, r"--decay_share 0\.6"),
        ({"init_from": "OWN"}, "began without --init_from; resume with the same"),
    ],
)
def test_resume_refuses_another_run(
    config: TrainConfig, responses: list[Response], changes: dict[str, object], message: str
) -> None:
    train(config, responses, steps=1)
    if changes.get("init_from") == "OWN":
        changes = {"init_from": str(config.output_dir / "drafter")}
    with pytest.raises(CheckpointError, match=message):
        make_run(config, responses, resume=True, **changes)


def test_resume_goes_on_from_the_same_drafter_wherever_it_stands(
    config: TrainConfig, responses: list[Response], tmp_path: Path
) -> None:
    """What a run was begun with decides rows that it does not train."""
    train(config, responses, steps=1, output_dir=tmp_path / "first")
    begun, moved = tmp_path / "first" / "drafter", tmp_path / "moved"
    train(config, responses, steps=1, init_from=str(begun))
    with pytest.raises(CheckpointError, match="began with another drafter; resume with the same --init_from"):
        make_run(config, responses, resume=True)
    with pytest.raises(CheckpointError, match="began with another drafter"):
        make_run(config, responses, resume=True, init_from=str(config.output_dir / "drafter"))
    begun.rename(moved)
    assert [one.step for one in train(config, responses, steps=2, resume=True, init_from=str(moved))] == [2]


def test_state_that_does_not_say_how_it_began_goes_on(config: TrainConfig, responses: list[Response]) -> None:
    train(config, responses, steps=1)
    directory = config.output_dir / STATE_DIR
    state = load_state(directory)
    for name in ("warmup_steps", "decay_share", "init_from"):
        del state.facts[name]
    saved_state.save_state(directory, state.facts, state.tensors)
    changes: dict[str, object] = {"warmup_steps": 5, "decay_share": 0.1}
    assert [report.step for report in train(config, responses, steps=2, resume=True, **changes)] == [2]


@pytest.mark.parametrize("saved", [True, False])
def test_resume_refuses_a_cpu_of_another_kind(
    config: TrainConfig, responses: list[Response], monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: saved)
    train(config, responses, steps=1)
    make_run(config, responses, resume=True).close()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: not saved)
    with pytest.raises(CheckpointError, match=r"another kind of CPU.*resume on one of that kind"):
        make_run(config, responses, resume=True)


def test_state_that_does_not_say_its_precision_goes_on(
    config: TrainConfig, responses: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config, responses, steps=1)
    directory = config.output_dir / STATE_DIR
    state = load_state(directory)
    precision = state.facts["trainer"].pop("bfloat16")
    saved_state.save_state(directory, state.facts, state.tensors)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: not precision)
    assert [report.step for report in train(config, responses, steps=2, resume=True)] == [2]


def test_resume_refuses_other_responses(config: TrainConfig, responses: list[Response]) -> None:
    train(config, responses, steps=1)
    with pytest.raises(CheckpointError, match="other responses"):
        make_run(config, responses[1:], resume=True)


def test_resume_without_a_state_is_refused(config: TrainConfig, responses: list[Response]) -> None:
    with pytest.raises(CheckpointError, match="start without --resume"):
        make_run(config, responses, resume=True)


def test_loss_that_is_no_number_stops_with_the_last_state_intact(
    config: TrainConfig, responses: list[Response]
) -> None:
    run = make_run(config, responses, save_every=2)

    def told(report: StepReport, _: object) -> None:
        if report.step == 3:
            run.trainer.parameters["fc.weight"][0, 0] = float("nan")

    with pytest.raises(TrainingFailed, match="step 4"):
        run.train(stop=lambda: False, told=told)
    run.close()
    state = load_state(config.output_dir / STATE_DIR)
    assert state.facts["steps_done"] == 2
    assert all(np.isfinite(values).all() for values in state.tensors.values())


def test_full_disk_keeps_the_state_before(config: TrainConfig, responses: list[Response]) -> None:
    """A limit on the size of files stands for a disk that is full in the middle of a write."""
    train(config, responses, steps=2)
    before = (config.output_dir / STATE_DIR / STATE_FILE).read_bytes()
    run = make_run(config, responses, resume=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(DeviceError, match="the one before is intact"):
            run.train(stop=lambda: False, told=lambda *_: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
        run.close()
    assert (config.output_dir / STATE_DIR / STATE_FILE).read_bytes() == before
    assert [path.name for path in (config.output_dir / STATE_DIR).iterdir()] == [STATE_FILE]


def test_failed_rename_keeps_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_state.save_state(tmp_path, {"steps_done": 1}, {"x": np.ones(3, np.float32)})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saved_state.os, "replace", fail)
    with pytest.raises(DeviceError, match="No space left"):
        saved_state.save_state(tmp_path, {"steps_done": 2}, {"x": np.zeros(3, np.float32)})
    assert load_state(tmp_path).facts == {"steps_done": 1}


# Saves over and over, slowly enough that a kill lands in the middle of a file.
SAVER = """
import sys
from pathlib import Path
import numpy as np
from trtllm_dspark.train.saved_state import save_state
number = 0
while True:
    number += 1
    save_state(Path(sys.argv[1]), {"steps_done": number}, {"x": np.full(4_000_000, number, np.float32)})
    print(number, flush=True)
"""


def test_kill_in_the_middle_of_a_write_leaves_a_whole_state(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    part = tmp_path / f"{STATE_FILE}.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and 0 < part.stat().st_size < 16_000_000) and time.monotonic() < deadline:
        pass
    process.kill()
    process.wait()
    state = load_state(tmp_path)
    assert state.facts["steps_done"] >= 1
    np.testing.assert_array_equal(state.tensors["x"], np.float32(state.facts["steps_done"]))


def test_sigterm_ends_the_command_with_a_drafter(target_dir: Path, tmp_path: Path, responses: list[Response]) -> None:
    path = write_responses(tmp_path / "r.jsonl", responses)
    command = [sys.executable, "-m", "trtllm_dspark.cli.main", "train", "--target_checkpoint", str(target_dir)]
    command += ["--output_dir", str(tmp_path / "out"), "--responses_file", str(path), "--steps", "1000000"]
    command += ["--num_layers", "1", "--target_layer_ids", "0,2", "--max_seq_len", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "out" / LOG_FILE
    deadline = time.monotonic() + 600
    while not (log.exists() and log.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "drafter" in output
    assert (tmp_path / "out" / "drafter" / "config.json").is_file()
