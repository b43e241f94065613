"""Child of the tests: read a trace to its end, 0.2 s a sample on a clock of its own; one JSON line a sample."""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import asdict

from trtllm_dspark.load import LoadPolicy, NvmlReader


def main(device: str) -> None:
    stub = ctypes.CDLL("libnvidia-ml.so.1")
    count = 0
    reader = NvmlReader(int(device) if device.isdecimal() else device, clock=lambda: count / 5)
    policy = LoadPolicy()
    more = 1
    while more:
        sample = reader.read()
        print(json.dumps({"sample": asdict(sample), "state": asdict(policy.update(sample))}))
        more = stub.stub_advance()
        count += 1
    reader.close()


main(sys.argv[1])
