"""The real nvidia-ml-py over the stub library, in child processes."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
from helpers.nvml_stub import NvmlStub


def read(stub: NvmlStub, trace: str, code: str) -> Any:
    """Run code that prints JSON."""
    done = stub.run(trace, "-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sample_holds_what_the_trace_says(nvml_stub: NvmlStub) -> None:
    sample = nvml_stub.replay("co_tenant")[10]["sample"]
    assert sample.pop("time_s") == pytest.approx(2.0)
    assert sample == {
        "failure": None,
        "message": "",
        "generation": 1,
        "sm_utilization": 0.9,
        "memory_utilization": 0.6,
        "memory_total_bytes": 80_000_000_000,
        "memory_free_bytes": 12_000_000_000,
        "others_memory_bytes": 8_000_000_000,
        "others_sm_utilization": 0.4,
        "num_others": 1,
        "sm_clock_mhz": 1980,
        "sm_clock_max_mhz": 1980,
        "power_watts": 500.0,
        "power_limit_watts": 700.0,
        "temperature_celsius": 60,
        "temperature_slowdown_celsius": 90,
        "throttle_reasons": 0,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "xids": [],
        "mig": "off",
    }


def test_mig_instance_has_its_own_memory_and_the_boards_clocks(nvml_stub: NvmlStub) -> None:
    sample = nvml_stub.replay("mig", "MIG-0")[-1]["sample"]
    assert (sample["mig"], sample["memory_total_bytes"], sample["sm_clock_mhz"]) == ("instance", 40_000_000_000, 1320)
    assert (sample["sm_utilization"], sample["num_others"]) == (None, 0)


def test_mig_parent_judges_neither_memory_nor_others(nvml_stub: NvmlStub) -> None:
    sample = nvml_stub.replay("mig", "0")[-1]["sample"]
    assert sample["mig"] == "parent"
    assert {sample[name] for name in ("memory_total_bytes", "memory_free_bytes", "others_memory_bytes")} == {None}


def test_unknown_device_is_no_gpu(nvml_stub: NvmlStub) -> None:
    for device in ("3", "GPU-none"):
        sample = nvml_stub.replay("healthy", device)[0]["sample"]
        assert sample["failure"] == "no_gpu"
        assert device in sample["message"]


def test_generation_grows_after_a_loss_and_not_after_a_hiccup(nvml_stub: NvmlStub) -> None:
    assert nvml_stub.replay("gpu_lost")[-1]["sample"]["generation"] == 2
    assert nvml_stub.replay("hiccup")[-1]["sample"]["generation"] == 1


@pytest.mark.parametrize(("own", "expected"), [("None", [None, None, None]), ("lambda: 59 * 10**9", [0, 10**9, None])])
def test_container_does_not_mistake_itself_for_another(nvml_stub: NvmlStub, own: str, expected: list[Any]) -> None:
    code = f"""
        import json
        from trtllm_dspark.load import NvmlReader
        sample = NvmlReader(own_memory_bytes={own}).read()
        print(json.dumps([sample.num_others, sample.others_memory_bytes, sample.others_sm_utilization]))
    """
    assert read(nvml_stub, "container", code) == expected


def test_binding_without_a_function_reads_the_rest(nvml_stub: NvmlStub) -> None:
    code = """
        import json, pynvml
        from trtllm_dspark.load import NvmlReader
        del pynvml.nvmlDeviceGetCurrentClocksEventReasons, pynvml.nvmlDeviceGetTotalEccErrors
        sample = NvmlReader().read()
        print(json.dumps([sample.failure, sample.throttle_reasons, sample.ecc_corrected, sample.sm_clock_mhz]))
    """
    assert read(nvml_stub, "healthy", code) == [None, 0, None, 1980]


def test_monitor_thread_survives_the_loss_of_the_gpu_and_its_return(nvml_stub: NvmlStub) -> None:
    code = """
        import ctypes, json, time
        from trtllm_dspark.load import LoadMonitor, LoadPolicy, NvmlReader, PolicyConfig, monitor as module
        from trtllm_dspark.load import monitor
        monitor.RETRY_S = 0.01
        stub = ctypes.CDLL("libnvidia-ml.so.1")
        seen, more = [], 1
        policy = LoadPolicy(PolicyConfig(release_s=0.05))
        with LoadMonitor(NvmlReader(), policy, interval_s=0.005) as watched:
            while more:
                count = watched.metrics()["dspark_load_samples"]
                while watched.metrics()["dspark_load_samples"] < count + 2:
                    time.sleep(0.001)
                state = watched.state()
                if not seen or seen[-1] != [state.available, state.admission_closed]:
                    seen.append([state.available, state.admission_closed])
                more = stub.stub_advance()
        print(json.dumps(seen))
    """
    assert read(nvml_stub, "gpu_lost", code)[-3:] == [[True, True], [False, True], [True, False]]


def test_missing_binding_is_said_with_its_name(nvml_stub: NvmlStub) -> None:
    code = """
        import json, sys
        sys.modules["pynvml"] = None
        from trtllm_dspark.load import NvmlReader
        sample = NvmlReader().read()
        print(json.dumps([sample.failure, sample.message]))
    """
    failure, message = read(nvml_stub, "healthy", code)
    assert failure == "no_library"
    assert "install nvidia-ml-py" in message


def test_importing_load_does_not_import_the_binding(nvml_stub: NvmlStub) -> None:
    code = "import json, sys, trtllm_dspark.load; print(json.dumps('pynvml' in sys.modules))"
    assert read(nvml_stub, "healthy", code) is False
