"""`trtllm-dspark load_report` as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.nvml_stub import NvmlStub

from trtllm_dspark.cli.main import main
from trtllm_dspark.load import metric_names

COMMAND = ("-m", "trtllm_dspark.cli.main", "load_report")


def test_report_names_inputs_and_decisions(nvml_stub: NvmlStub) -> None:
    done = nvml_stub.run("memory_full_by_design", *COMMAND, "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert {name.strip(): value.strip() for name, value in rows.items()} | {"reasons": "none"} == {
        "device": "0",
        "SM utilization": "90%",
        "memory utilization": "60%",
        "free memory": "800.0 MB of 80.0 GB",
        "memory of others": "60.0 GB",
        "processes of others": "1",
        "SM use of others": "80%",
        "SM clock": "1980 MHz of 1980 MHz",
        "power": "500 W of 700 W",
        "temperature": "60 C",
        "slows down at": "90 C",
        "throttle reasons": "0x0",
        "ECC errors, uncorrected": "0",
        "ECC errors, corrected": "0",
        "MIG": "off",
        "compute-bound time": "x 1.00",
        "verify budget": "100%",
        "admission": "up to 100% of the slots",
        "reasons": "none",
    }


def test_json_report_has_documented_keys(nvml_stub: NvmlStub) -> None:
    done = nvml_stub.run("container", *COMMAND, "--json", "--seconds", "1.5", "--pid", "77")
    report = json.loads(done.stdout)
    assert set(report) == {"device", "failure", "message", "state", "metrics"}
    assert set(report["metrics"]) <= set(metric_names())
    assert report["metrics"]["dspark_load_num_others"] == 0.0
    assert report["state"]["available"] is True


def test_strangers_shrink_the_budget_once_they_lasted(nvml_stub: NvmlStub) -> None:
    done = nvml_stub.run("container", *COMMAND, "--json", "--seconds", "1.5")
    assert json.loads(done.stdout)["state"]["reasons"] == ["co_tenant"]


def test_lost_gpu_closes_admission(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    trace = tmp_path / "lost.trace"
    trace.write_text("mem_total=1 error=15\n")
    environment = {**nvml_stub.environment("healthy"), "NVML_STUB_TRACE": str(trace)}
    done = subprocess.run([sys.executable, *COMMAND], env=environment, capture_output=True, text=True, check=True)
    assert "admission           closed" in done.stdout
    assert "the GPU is lost or needs a reset" in done.stdout


def test_machine_without_a_driver_says_so_and_succeeds(tmp_path: Path) -> None:
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_text("not a library")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *COMMAND], env=environment, capture_output=True, text=True, check=True)
    assert "libnvidia-ml.so.1 is not installed" in done.stdout
    assert "verify budget       100%" in done.stdout


@pytest.mark.parametrize(
    ("flags", "word"), [(["--seconds", "0"], "--seconds"), (["--reference_sm_clock_mhz", "-5"], "reference")]
)
def test_impossible_flags_are_refused(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load_report", *flags]) == 2
    assert word in capsys.readouterr().err
