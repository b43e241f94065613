"""What online calibration costs a round, in microseconds of one thread: python benchmarks/bench_calibration.py."""

from __future__ import annotations

import argparse
import time

import numpy as np

from trtllm_dspark.speculation.calibration import Calibration, sigmoid
from trtllm_dspark.speculation.online_calibration import OnlineCalibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--draft_len", type=int, default=7)
    parser.add_argument("--repetitions", type=int, default=80)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the logits of the head; 1 = it is right")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (args.batch_size, args.draft_len)
    online = OnlineCalibration(Calibration.identity(args.draft_len))
    whole = np.full(args.batch_size, args.draft_len)
    times = []
    for _ in range(args.repetitions):
        rounds = []
        for _ in range(online.config.every):
            truth = 0.8 + 1.2 * rng.normal(size=shape)
            right = rng.uniform(size=shape) < sigmoid(truth)
            rounds.append((sigmoid(args.scale * truth).astype(np.float32), np.cumprod(right, axis=1).sum(axis=1)))
        started = time.thread_time()
        for confidence, accepted in rounds:
            online.observe(confidence, whole, accepted)
        times.append((time.thread_time() - started) / online.config.every * 1e6)
    print(f"a round of {args.batch_size}: least {min(times):.0f} us, median {np.median(times):.0f} us")


if __name__ == "__main__":
    main()
