"""`profile` on the toy pair, and sessions that read what it wrote."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.toy_pair import ToyPair

from trtllm_dspark.cli import profile
from trtllm_dspark.cli.main import main
from trtllm_dspark.engine import Engine
from trtllm_dspark.engine.device import cpu_name, device_name
from trtllm_dspark.engine_dir import EngineDirectory, open_engine_dir
from trtllm_dspark.load import Sample
from trtllm_dspark.runtime import Session
from trtllm_dspark.runtime.scheduling import load_cost_table
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape
from trtllm_dspark.speculation.cost_table_file import StoredCostTable, read_cost_table, write_cost_table

RISING = CostTable(
    {VerifyShape(1, tokens, tokens, 128): 100.0 + 50 * tokens for tokens in (1, 2, 4, 8)}, {DraftShape(1, 128): 20.0}
)


@pytest.fixture
def engine_dir(toy_engine_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_engine_dir, tmp_path / "engine"))


def measured(monkeypatch: pytest.MonkeyPatch, table: CostTable) -> None:
    """Make `profile` find these times: those of an engine this small are noise."""

    def measure(engine: Engine, *, quick: bool, progress: object) -> CostTable:
        return table

    monkeypatch.setattr(profile, "measure_cost_table", measure)


def test_profile_writes_a_table_that_fits_the_engine(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "check_cost_table", lambda table: None)
    assert main(["profile", "--engine_dir", str(engine_dir), "--quick", "--num_threads", "1"]) == 0
    out = capsys.readouterr().out
    stored = read_cost_table(open_engine_dir(engine_dir))
    assert stored is not None
    assert (stored.device, stored.num_threads) == (cpu_name(), 1)
    assert {shape.num_requests for shape in stored.table.verify_us} == {1, 2, 4}
    assert {shape.depth for shape in stored.table.verify_us} == {128}
    assert str(engine_dir / "cost_table.json") in out
    assert "4 requests, 128 cached" in out
    assert main(["inspect", "--engine_dir", str(engine_dir)]) == 0
    assert "belongs to another" not in capsys.readouterr().out


@pytest.mark.parametrize("last", [80.0, 100.0])
def test_profile_flat_or_inverted_times_write_nothing(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: float
) -> None:
    measured(monkeypatch, CostTable({VerifyShape(1, 1, 1, 0): 100.0, VerifyShape(1, 8, 8, 0): last}, {}))
    assert main(["profile", "--engine_dir", str(engine_dir)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "measure again while the machine is idle" in captured.err.splitlines()[-1]
    assert not (engine_dir / "cost_table.json").exists()


def test_session_uses_the_stored_table_and_says_so(engine_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_cost_table(open_engine_dir(engine_dir), StoredCostTable(RISING, cpu_name(), 1))
    caplog.set_level(logging.INFO)
    session = Session.open(engine_dir, num_threads=1, speculation="early_stop")
    session.close()
    assert "pass times come from" in caplog.text
    assert "measuring" not in caplog.text
    assert session.cost_table == RISING
    assert session.sibling(speculation="stale_topk").cost_table == RISING


@pytest.mark.parametrize(("device", "threads"), [("another processor", 1), (cpu_name(), 2)])
def test_session_measures_anew_where_the_table_was_measured_elsewhere(
    engine_dir: Path, caplog: pytest.LogCaptureFixture, device: str, threads: int
) -> None:
    write_cost_table(open_engine_dir(engine_dir), StoredCostTable(RISING, device, threads))
    caplog.set_level(logging.INFO)
    session = Session.open(engine_dir, num_threads=1, speculation="early_stop")
    session.close()
    assert f"was measured on {device} with {threads} threads" in caplog.text
    assert "measuring the engine once" in caplog.text
    assert session.cost_table is not None
    assert session.cost_table != RISING


class TimedOnDevice:
    """An engine that times its rounds itself."""

    pass_timer = object()


@pytest.mark.parametrize(("engine", "here"), [(object(), "without one"), (TimedOnDevice(), "with one")])
@pytest.mark.parametrize("device_rounds", [False, True])
def test_table_counts_only_for_engines_that_are_timed_alike(
    engine_dir: Path, caplog: pytest.LogCaptureFixture, engine: Any, here: str, device_rounds: bool
) -> None:
    directory = open_engine_dir(engine_dir)
    write_cost_table(directory, StoredCostTable(RISING, cpu_name(), 1, device_rounds=device_rounds))
    table = load_cost_table(directory, engine, num_threads=1)
    alike = device_rounds == isinstance(engine, TimedOnDevice)
    assert table == (RISING if alike else None)
    assert (f"this engine is loaded {here}: not used; profile again" in caplog.text) == (not alike)


def test_profile_with_a_kernel_library_times_rounds_on_the_device(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Path] = []

    class Loaded(TimedOnDevice):
        def close(self) -> None:
            pass

    def load(path: Path, *, kernel_library: Path, **options: object) -> Loaded:
        given.append(kernel_library)
        return Loaded()

    monkeypatch.setattr(profile, "load_engine", load)
    measured(monkeypatch, RISING)
    assert main(["profile", "--engine_dir", str(engine_dir), "--kernel_library", "k.so"]) == 0
    assert given == [Path("k.so")]
    assert "whole rounds on the device" in capsys.readouterr().out
    stored = read_cost_table(open_engine_dir(engine_dir))
    assert stored is not None
    assert stored.device_rounds


def test_profile_kernel_library_for_a_cpu_engine_is_refused(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--engine_dir", str(engine_dir), "--kernel_library", "k.so"]) == 2
    assert "has no use for a kernel library; leave it out" in capsys.readouterr().err


def test_session_that_needs_no_times_measures_and_reads_none(
    engine_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = Session.open(engine_dir, num_threads=1, speculation="threshold")
    session.close()
    assert session.cost_table is None
    assert "measuring" not in caplog.text


def test_run_table_of_another_engine_is_exit_code_3(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_cost_table(open_engine_dir(engine_dir), StoredCostTable(RISING, cpu_name(), 2))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"engine_hash": "f" * 64}))
    flags = ["--prompt", "a", "--speculation", "early_stop", "--max_tokens", "3"]
    assert main(["run", "--engine_dir", str(engine_dir), *flags]) == 3
    assert "belongs to another engine" in capsys.readouterr().err


def test_profile_plot_is_an_image_of_every_measured_line(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, RISING)
    image = tmp_path / "times.svg"
    assert main(["profile", "--engine_dir", str(engine_dir), "--plot", str(image)]) == 0
    text = image.read_text()
    assert text.startswith("<svg")
    assert "1 requests, 128 cached (draft 0.0 ms)" in text


@pytest.mark.parametrize(("name", "message"), [("x.png", "'.[plot]' in a checkout"), ("x.jpg", "ends in .svg or .png")])
def test_profile_plot_that_cannot_be_written_is_refused_before_measuring(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["profile", "--engine_dir", str(engine_dir), "--plot", name]) == 2
    assert message in capsys.readouterr().err
    assert not (engine_dir / "cost_table.json").exists()


def test_profile_keeps_a_clock_of_null_on_a_cpu(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, RISING)
    assert main(["profile", "--engine_dir", str(engine_dir)]) == 0
    assert json.loads((engine_dir / "cost_table.json").read_text())["sm_clock_mhz"] is None


class TwoGpus:
    """NVML of a machine whose second GPU is at work."""

    samples: ClassVar[dict[int | str, Sample]] = {
        0: Sample(0.0, sm_clock_mhz=345, throttle_reasons=0x1),
        1: Sample(0.0, sm_clock_mhz=1755, throttle_reasons=0x4),
        "GPU-silent": Sample(0.0, sm_clock_mhz=900),
        "GPU-old": Sample(0.0, sm_clock_mhz=1100, sm_utilization=0.9),
        "GPU-gone": Sample(0.0, failure="no_gpu", message="no such GPU"),
    }

    def __init__(self, device: int | str) -> None:
        self.device = device

    def read(self) -> Sample:
        return self.samples[self.device]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("flags", "clock", "message"),
    [
        ((), None, "the GPU was idle"),
        (("--load_device", "1"), 1755, ""),
        (("--load_device", "GPU-silent"), None, "the GPU was idle"),
        (("--load_device", "GPU-old"), 1100, ""),
        (("--load_device", "GPU-gone"), None, "no such GPU"),
    ],
)
def test_profile_keeps_the_clock_of_the_named_gpu_unless_it_is_idle(
    engine_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: tuple[str, ...],
    clock: int | None,
    message: str,
) -> None:
    def open_for_gpu(path: Path, **options: Any) -> EngineDirectory:
        directory = open_engine_dir(path, **options)
        return replace(directory, manifest=replace(directory.manifest, backend="tensorrt"))

    monkeypatch.setattr(profile, "open_engine_dir", open_for_gpu)
    kept: list[StoredCostTable] = []
    monkeypatch.setattr(profile, "write_cost_table", lambda directory, stored: kept.append(stored))
    monkeypatch.setattr(profile, "NvmlReader", TwoGpus)
    measured(monkeypatch, RISING)
    assert main(["profile", "--engine_dir", str(engine_dir), *flags]) == 0
    assert [stored.sm_clock_mhz for stored in kept] == [clock]
    assert ("the table keeps no SM clock" in caplog.text) == (clock is None)
    assert message in caplog.text


def test_profile_gpu_of_an_engine_on_a_cpu_is_refused(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--engine_dir", str(engine_dir), "--load_device", "0"]) == 2
    assert "this engine runs on a CPU; leave it out" in capsys.readouterr().err


def test_table_of_a_gpu_engine_is_labelled_by_what_it_was_compiled_for() -> None:
    assert device_name("tensorrt", ("sm90", "sm120")) == "GPU sm90, sm120"
    assert device_name("onnxruntime", ()) == cpu_name()


@pytest.mark.parametrize("last", [300.0, 100.0])
@pytest.mark.parametrize("flags", [[], ["--no_profile"]])
def test_build_writes_a_quick_table_unless_told_not_to(
    toy_pair: ToyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: list[str],
    last: float,
) -> None:
    verify = {VerifyShape(1, 1, 1, 0): 100.0, VerifyShape(1, 8, 8, 0): last}
    measured(monkeypatch, CostTable(verify, {DraftShape(1, 0): 9.0}))
    models = ["--target_checkpoint", str(toy_pair.target_dir), "--draft_checkpoint", str(toy_pair.drafter_dir)]
    limits = ["--max_batch_size", "1", "--max_seq_len", "128", "--max_num_tokens", "16"]
    output = tmp_path / "built"
    assert main(["build", *models, *limits, "--output_dir", str(output), *flags]) == 0
    stored = read_cost_table(open_engine_dir(output))
    assert (stored is not None) == (not flags and last > 100)
    assert ("no cost table was written" in caplog.text) == (not flags and last == 100)
