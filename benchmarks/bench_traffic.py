"""CPU time that recording costs a token: on the session's thread, and on the worker's.

Usage: bench_traffic.py [--vocab 49152] [--feature_size 2880] [--accepted_len 2.2] [--tokens 2000]

Thread CPU time, so what else runs on the machine does not count. Multiply by the share that is recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from trtllm_dspark.traffic.layout import TrafficInfo
from trtllm_dspark.traffic.recorder import CollectOptions, TrafficRecorder


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--feature_size", type=int, default=2880)
    parser.add_argument("--accepted_len", type=float, default=2.2)
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    info = TrafficInfo(("0" * 64,), "int8", (0,), args.feature_size, args.vocab, 32, "drop")
    with tempfile.TemporaryDirectory() as directory:
        recorder = recorder_of(info, Path(directory) / "traffic")
        session_s, bytes_written = record(recorder, args)
        worker_s = recorder_time(recorder)
    print(
        json.dumps(
            {
                "session_us_per_token": round(1e6 * session_s / args.tokens, 1),
                "worker_us_per_token": round(1e6 * worker_s / args.tokens, 1),
                "bytes_per_token": round(bytes_written / args.tokens),
            }
        )
    )
    return 0


def recorder_of(info: TrafficInfo, directory: Path) -> Any:
    """Return a recorder of every request that needs no engine."""
    made: list[int] = []

    class Recorder(TrafficRecorder):
        def _run(self) -> None:
            super()._run()
            made.append(time.thread_time_ns())

    manifest = SimpleNamespace(
        target=SimpleNamespace(checkpoint_files=(), weight_dtype=info.target_weight_dtype),
        drafter_config=SimpleNamespace(target_layer_ids=info.target_layer_ids, target_hidden_size=info.hidden_size),
        target_config=SimpleNamespace(vocab_size=info.vocab_size),
    )
    options = CollectOptions(directory, 1 << 34, share=1.0, prompts="drop")
    recorder = Recorder(manifest, dataclasses.replace(options, max_waiting_bytes=1 << 40))  # type: ignore[arg-type]
    recorder.worker_ns = made  # type: ignore[attr-defined]
    return recorder


def record(recorder: Any, args: argparse.Namespace) -> tuple[float, int]:
    """Feed requests of 100 tokens; return the CPU seconds it took here and the bytes on disk."""
    rng, generator = np.random.default_rng(1), random.Random(1)
    logits = rng.standard_normal((8, args.vocab)).astype(np.float32)
    features = rng.standard_normal((8, args.feature_size)).astype(np.float32)
    decode = SimpleNamespace(verify_len=np.array([7]), output=SimpleNamespace(logits=logits, features=features))
    params = SimpleNamespace(temperature=0.0, top_k=0, top_p=1.0)
    spent, left = 0, args.tokens
    while left > 0:
        request = OneRequest(params)
        recorder._see_output(request, SimpleNamespace(new_token_ids=(1,), finished=False), "")
        while request.num_output < 100:
            count = min(8, max(1, round(generator.gauss(args.accepted_len, 1))), 100 - request.num_output)
            choice = SimpleNamespace(tokens=[1] * count)
            started = time.thread_time_ns()
            recorder._see_round(decode, [(request, choice)])
            spent += time.thread_time_ns() - started
            request.num_output += count
            finished = request.num_output >= 100
            recorder._see_output(
                request, SimpleNamespace(new_token_ids=(1,) * count, finished=finished, finish_reason="length"), ""
            )
        left -= 100
    recorder.close(timeout_s=600.0)
    return spent / 1e9, recorder._writer.total_bytes


class OneRequest:
    """What the recorder reads of a request."""

    def __init__(self, params: SimpleNamespace) -> None:
        self.params, self.num_output, self.prompt = params, 1, np.zeros(10, np.int64)


def recorder_time(recorder: Any) -> float:
    """Return the CPU seconds of the worker."""
    return float(recorder.worker_ns[0]) / 1e9


if __name__ == "__main__":
    sys.exit(main())
