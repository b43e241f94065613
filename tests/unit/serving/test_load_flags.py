"""Which engines are watched, and what `--calibration` means for which schedule."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from trtllm_dspark.cli import serve
from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir
from trtllm_dspark.engine_process import opening
from trtllm_dspark.engine_process.__main__ import parse_arguments
from trtllm_dspark.engine_process.opening import SessionOptions, make_lane, open_load_control, open_session
from trtllm_dspark.load import Sample
from trtllm_dspark.speculation import Calibration, CostTable
from trtllm_dspark.speculation.cost_table_file import StoredCostTable
from trtllm_dspark.speculation.online_calibration import OnlineCalibration


@pytest.mark.parametrize(("wanted", "watched"), [("auto", False), ("on", True), ("off", False)])
def test_cpu_engine_is_watched_only_when_asked(
    toy_engine_dir: Path, wanted: Literal["auto", "on", "off"], watched: bool
) -> None:
    control = open_load_control(toy_engine_dir, wanted, 0)
    assert (control is not None) is watched


@pytest.fixture
def on_gpu(toy_engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> EngineDirectory:
    """Let the toy engine pass for one whose passes run on a GPU."""
    found = open_engine_dir(toy_engine_dir, verify_hashes=False)
    directory = replace(found, manifest=replace(found.manifest, backend="tensorrt"))
    monkeypatch.setattr(opening, "open_engine_dir", lambda *args, **kwargs: directory)
    return directory


def test_gpu_engine_is_watched_unless_told_not_to(on_gpu: EngineDirectory) -> None:
    limits = on_gpu.manifest.limits
    control = open_load_control(on_gpu.path, "auto", "GPU-1")
    assert control is not None
    assert control.max_drafts == min(
        limits.max_batch_size * limits.max_draft_len, limits.max_num_tokens - limits.max_batch_size
    )
    assert open_load_control(on_gpu.path, "off", 0) is None


@pytest.mark.parametrize(("clock", "scale"), [(1500, 1.5), (None, 1.98)])
def test_clocks_are_judged_against_those_of_the_cost_table(
    on_gpu: EngineDirectory, monkeypatch: pytest.MonkeyPatch, clock: int | None, scale: float
) -> None:
    stored = None if clock is None else StoredCostTable(CostTable({}, {}), "GPU", 1, sm_clock_mhz=clock)
    monkeypatch.setattr(opening, "read_cost_table", lambda directory: stored)
    control = open_load_control(on_gpu.path, "auto", 0)
    assert control is not None
    throttled = Sample(0.0, sm_clock_mhz=1000, sm_clock_max_mhz=1980, throttle_reasons=0x20, sm_utilization=0.9)
    for index in range(20):
        control.monitor._policy.update(replace(throttled, time_s=index / 5))
    assert control.monitor._policy._state.compute_scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("calibration", "speculation", "online"),
    [
        ("auto", "adaptive", True),
        ("auto", "early_stop", True),
        ("auto", "threshold", False),
        ("auto", "fixed", False),
        ("online", "threshold", True),
        ("stored", "adaptive", False),
    ],
)
def test_calibration_is_online_where_a_seed_fixes_nothing(
    calibration: Literal["auto", "online", "stored"], speculation: str, online: bool
) -> None:
    assert SessionOptions(1, speculation, "rejection", calibration=calibration).online_calibration is online


def test_session_gets_the_load_and_a_calibration_that_learns(toy_engine_dir: Path) -> None:
    control = open_load_control(toy_engine_dir, "on", 0)
    options = SessionOptions(1, "threshold", "rejection", load=control, calibration="online")
    session = open_session(toy_engine_dir, options)
    try:
        assert isinstance(session.calibration, OnlineCalibration)
        assert session.calibration.stored == Calibration.identity(session.limits.max_draft_len)
        lane = make_lane(session, toy_engine_dir, control)
        assert lane.num_free == session.limits.max_batch_size
        # Nothing was read yet, so nothing is limited.
        assert control is not None
        assert session.controller.limits() == control.limits()
    finally:
        session.close()


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_process_logs_what_serve_was_asked_for(level: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--engine_dir=e"])
    args.log_level = level
    command = serve._engine_command(args, "the.sock", "")
    assert parse_arguments(command[3:]).log_level == level


def test_process_defaults_adapt_by_themselves() -> None:
    args = parse_arguments(["--engine_dir", "e", "--socket", "s"])
    assert (args.calibration, args.load_monitor, args.load_device) == ("auto", "auto", "0")
