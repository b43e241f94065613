"""Child of the tests: serve from an engine in NumPy while a trace plays, two rounds a sample; one JSON line a sample.

The monitor's own thread samples; it waits for the loop here, so every line belongs to its sample.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time

import helpers.fake_engine as fake
from trtllm_dspark.load import LoadMonitor, LoadPolicy, NvmlReader, Sample, monitor
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.load_control import LoadControl
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape

SLOTS, GAMMA = 4, 4
PROMPT = [5, 9, 2]


class Stepped:
    """A reader that reads when it is told to and then advances the trace."""

    def __init__(self) -> None:
        self.count = 0
        self.more = True
        self.go = threading.Semaphore(0)
        self._reader = NvmlReader(0, clock=lambda: self.count / 5)
        self._stub = ctypes.CDLL("libnvidia-ml.so.1")

    def read(self) -> Sample:
        self.go.acquire()
        sample = self._reader.read()
        self.more = bool(self._stub.stub_advance())
        self.count += 1
        return sample

    def close(self) -> None:
        self._reader.close()


def table() -> CostTable:
    """Return times under which a doubtful draft pays, and no longer when computation takes half as long again."""
    shapes = [(r, r * k, k) for r in range(1, SLOTS + 1) for k in range(1, GAMMA + 2)]
    verify = {VerifyShape(r, t, k, 16): 1000.0 + 28.0 * (t - r) for r, t, k in shapes}
    return CostTable(verify, {DraftShape(r, 16): 10.0 for r in range(1, SLOTS + 1)})


def main() -> None:
    monitor.RETRY_S = monitor.RETRY_ABSENT_S = 1e-4
    reader = Stepped()
    watcher = LoadMonitor(reader, LoadPolicy(), interval_s=1e-4, clock=lambda: reader.count / 5)
    control = LoadControl(watcher, max_requests=SLOTS, max_drafts=SLOTS * GAMMA)
    engine = fake.FakeEngine(max_batch_size=SLOTS, gamma=GAMMA, max_num_tokens=64)
    session = Session(engine, None, speculation=sys.argv[1], cost_table=table(), load=control)
    outputs: dict[str, list[int]] = {}
    control.start()
    taken = 0
    while reader.more:
        reader.go.release()
        deadline = time.monotonic() + 20
        while control.metrics()["dspark_load_samples"] == taken:
            if time.monotonic() > deadline:
                raise RuntimeError("the monitor took no sample")
            time.sleep(1e-4)
        taken += 1
        verified, joined = [], 0
        for _ in range(2):
            while session.num_running + session.num_waiting < SLOTS + 2:
                session.add(Request(str(len(outputs)), PROMPT, SamplingParams(max_tokens=30 + 11 * (len(outputs) % 5))))
                outputs[str(len(outputs))] = []
            before, waiting = len(engine.verified), session.num_waiting
            for output in session.step():
                outputs[output.request_id] += output.new_token_ids
            joined += waiting - session.num_waiting
            # A pass over decoding requests writes behind the prompt, one over prompts begins at 0.
            decode = [batch for batch in engine.verified[before:] if batch.write_indices.min() > 0]
            verified += [int((batch.row_lens - 1).sum()) for batch in decode]
        limits = session.controller.state.load
        print(
            json.dumps(
                {
                    "cost_scale": limits.cost_scale,
                    "verify_budget": limits.verify_budget,
                    "max_requests": limits.max_requests,
                    "admit": limits.admit,
                    "reason": limits.reason,
                    "verified": verified,
                    "joined": joined,
                    "running": session.num_running,
                }
            )
        )
    # Whatever the load did, the tokens are those of greedy decoding.
    for tokens in outputs.values():
        assert tokens == fake.greedy(PROMPT, len(tokens))
    assert sum(map(len, outputs.values())) > 40


main()
