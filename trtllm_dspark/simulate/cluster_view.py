"""How a cluster changed over a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_dspark.simulate.scenario import Run

STEPS = 200
Timeline = tuple[str, list[float], list[float]]


def timelines(runs: Sequence[Run]) -> list[Timeline]:
    """Return, of every run, replicas that serve, requests that wait and tokens a second over time."""
    lines: list[Timeline] = []
    for run in runs:
        name = f"{run.policy.name}, {run.load}"
        end = max((log.start_s[-1] for log in run.result.logs if len(log)), default=0.0)
        if end <= 0:
            continue
        times, counts = zip(*run.result.replicas, strict=True)
        lines.append((f"replicas: {name}", [*times, end], [*map(float, counts), float(counts[-1])]))
        edges = np.linspace(0, end, STEPS + 1)
        waiting, tokens = np.zeros(STEPS), np.zeros(STEPS)
        for log in run.result.logs:
            if not len(log):
                continue
            start = np.array(log.start_s)
            gained = np.array(log.num_requests) + np.array(log.accepted) + np.array(log.first_tokens)
            tokens += np.histogram(start, edges, weights=gained)[0]
            # What waited at the last round before an edge.
            last = np.searchsorted(start, edges[1:], side="right") - 1
            waiting += np.where(last >= 0, np.array(log.waiting)[np.maximum(last, 0)], 0)
        lines.append((f"requests waiting: {name}", edges[1:].tolist(), waiting.tolist()))
        lines.append((f"tokens/s: {name}", edges[1:].tolist(), (tokens / (end / STEPS)).tolist()))
    return lines
