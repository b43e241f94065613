"""Processor time the host spends on a round of a TensorRT engine: it must stay below the round's time on the device.

A device that does nothing takes the place of the GPU; every request gains four tokens a round.

    python benchmarks/bench_device_rounds.py            # native plans
    python benchmarks/bench_device_rounds.py --plugins
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.plugin_engine import open_plugins, write_plugin_pair
from helpers.recording_device import Op, RecordingDevice
from helpers.tiny_tensorrt import open_on, random_pair, random_weights

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.engine.tensorrt._memory import Layout
from trtllm_dspark.engine.tensorrt._runner import RoundRunner
from trtllm_dspark.engine_dir import BuildLimits
from trtllm_dspark.graph import RoundOptions
from trtllm_dspark.runtime import Request, SamplingParams, Session

WARM_UP, EMITTED = 30, 4


class IdleDevice(RecordingDevice):
    """Runs nothing and returns at once; results say that every row emitted `EMITTED` tokens."""

    def __init__(self, heads: Any) -> None:
        super().__init__(heads=heads)
        self.layouts: dict[int, Layout] = {}

    def record(self, event: int, stream: int) -> None:
        """Remember nothing."""

    def synchronize(self, event: int) -> None:
        """Wait for nothing."""

    def elapsed_us(self, start: int, end: int) -> float:
        """Return some time."""
        return 1000.0

    def to_host(self, target: NDArray[Any], address: int, stream: int) -> None:
        """Write results."""
        target[:] = 0
        layout = self.layouts.get(target.size)
        if layout is not None:
            views = layout.views(target)
            views["out_tokens"][...] = 7
            views["emitted_len"][...] = EMITTED if "verify_len" in views else 1
            if "verify_len" in views:
                views["verify_len"][...] = EMITTED + 1

    def _enqueue(self, op: Op) -> Op:
        if self._recording is not None:
            self._recording.append(op)
        return op


def main() -> None:
    """Print microseconds a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--plugins", action="store_true", help="plans with plugins")
    args = parser.parse_args()
    limits = BuildLimits(max_batch_size=32, max_seq_len=8192, max_num_tokens=256, max_draft_len=5)
    with tempfile.TemporaryDirectory() as directory:
        pair = random_pair(Path(directory), limits=limits)
        device = IdleDevice(pair.heads)
        engine: RoundRunner
        if args.plugins:
            options = RoundOptions("rejection", "threshold")
            (Path(directory) / "plugins").mkdir()
            engine = open_plugins(
                device, write_plugin_pair(Path(directory) / "plugins", pair, random_weights(), options)
            )
        else:
            engine = open_on(device, pair)
    rounds = engine._rounds
    assert rounds is not None
    device.layouts = {layout.num_bytes: layout for layout in (rounds._outputs, rounds._prompt_outputs)}
    most = EMITTED * (args.rounds + WARM_UP + 2)
    print("requests   us a round   us a request")
    for count in (1, 8, 32):
        session = Session(cast(Engine, engine), None, speculation="fixed")
        for index in range(count):
            session.add(Request(str(index), [3, 4], SamplingParams(max_tokens=most, temperature=0)))
        for _ in range(WARM_UP):
            session.step()
        started = time.process_time()
        for _ in range(args.rounds):
            session.step()
        spent = (time.process_time() - started) / args.rounds * 1e6
        assert session.num_running == count
        print(f"{count:8} {spent:12.0f} {spent / count:14.1f}")
        for index in range(count):
            session.cancel(str(index))
        while session.has_unfinished():
            session.step()


if __name__ == "__main__":
    main()
