"""Which engines are watched, and what `--calibration` means for which schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from trtllm_dspark.engine_process.__main__ import parse_arguments
from trtllm_dspark.engine_process.opening import SessionOptions, make_lane, open_load_control, open_session
from trtllm_dspark.speculation import Calibration
from trtllm_dspark.speculation.online_calibration import OnlineCalibration


@pytest.mark.parametrize(("wanted", "watched"), [("auto", False), ("on", True), ("off", False)])
def test_cpu_engine_is_watched_only_when_asked(
    toy_engine_dir: Path, wanted: Literal["auto", "on", "off"], watched: bool
) -> None:
    control = open_load_control(toy_engine_dir, wanted, 0)
    assert (control is not None) is watched


def test_gpu_engine_is_watched_unless_told_not_to(toy_engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trtllm_dspark.engine_process.opening as opening

    class OnGpu:
        backend = "tensorrt"

        def __init__(self, limits: Any) -> None:
            self.limits = limits

    class Directory:
        manifest: OnGpu

    limits = opening.open_engine_dir(toy_engine_dir, verify_hashes=False).manifest.limits
    Directory.manifest = OnGpu(limits)
    monkeypatch.setattr(opening, "open_engine_dir", lambda *args, **kwargs: Directory)
    control = open_load_control(toy_engine_dir, "auto", "GPU-1")
    assert control is not None
    assert control.max_drafts == min(
        limits.max_batch_size * limits.max_draft_len, limits.max_num_tokens - limits.max_batch_size
    )
    assert open_load_control(toy_engine_dir, "off", 0) is None


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


def test_process_defaults_adapt_by_themselves() -> None:
    args = parse_arguments(["--engine_dir", "e", "--socket", "s"])
    assert (args.calibration, args.load_monitor, args.load_device) == ("auto", "auto", "0")
