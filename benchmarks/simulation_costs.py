"""What a session takes beside its passes, and for prompts: the times a simulation needs that no cost table has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtllm_dspark.runtime import Request, Session
from trtllm_dspark.simulate.server import Server

PROMPT_GROUPS = (1, 1, 1, 2, 4)
"""Prompts that are prefilled together, in turn."""
MANY = 8


@dataclass(frozen=True)
class SessionCosts:
    """Microseconds beside the passes, under one policy.

    Attributes:
        round_us: of a round.
        request_us: more for every decoding request.
        token_us: more for every token of its decoding rows: choosing tokens among logits.
        prompt_us: of a round of prompts alone, and more for every token of them.
    """

    round_us: float
    request_us: float
    token_us: float
    prompt_us: tuple[float, float]

    def apply(self, server: Server) -> Server:
        """Return a server that takes these times."""
        return replace(
            server,
            host_us=self.round_us,
            host_request_us=self.request_us,
            host_token_us=self.token_us,
            prefill_us=(self.prompt_us[0] - self.round_us, self.prompt_us[1]),
        )


def session_costs(session: Session, policies: Sequence[str], requests: Sequence[Request]) -> dict[str, SessionCosts]:
    """Time every policy at one and at eight requests at once, and prompts of several lengths.

    Args:
        session: over the engine, with a cost table.
        policies: as `--speculation` takes them.
        requests: of equal `max_tokens`.
    """
    counts = tuple(dict.fromkeys((1, min(MANY, session.limits.max_batch_size))))
    choosing = _line([(count, _rounds(session, "off", requests, count)[1]) for count in counts])
    prompts: dict[bool, tuple[float, float]] = {}
    costs = {}
    for policy in policies:
        beside = _line([(count, _rounds(session, policy, requests, count)[0]) for count in counts])
        # What drafts keeps the drafter's context of a prompt too.
        drafts = policy != "off"
        if drafts not in prompts:
            prompts[drafts] = prompt_line(session.sibling(speculation=policy), requests)
        costs[policy] = SessionCosts(beside[0] + choosing[0], beside[1], choosing[1], prompts[drafts])
    return costs


def prompt_line(session: Session, requests: Sequence[Request]) -> tuple[float, float]:
    """Return microseconds of a round over prompts alone: of any, and more for every token.

    Every round is timed three times, since the first pass of a shape allocates, and the fastest counts. The slope is
    the median over pairs of rounds that differ by a fifth of their tokens at least.
    """
    points: list[tuple[int, float]] = []
    queue = list(requests)
    for size in PROMPT_GROUPS:
        group = [queue[index % len(queue)] for index in range(size)]
        queue = queue[size % len(queue) :] + queue[: size % len(queue)]
        taken = [_prompt_rounds(session, group) for _ in range(3)]
        points += [min(times, key=lambda point: point[1]) for times in zip(*taken, strict=True)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a in points for b in points if b[0] > 1.2 * a[0]]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    return max(0.0, statistics.median(us - slope * tokens for tokens, us in points)), slope


def _prompt_rounds(session: Session, group: Sequence[Request]) -> list[tuple[int, float]]:
    """Return tokens and microseconds of every round that a group of prompts takes."""
    for index, request in enumerate(group):
        session.add(replace(request, request_id=str(index), params=replace(request.params, max_tokens=1)))
    points = []
    while session.has_unfinished():
        before, started = session.stats.prompt_tokens, time.perf_counter()
        session.step()
        points.append((session.stats.prompt_tokens - before, 1e6 * (time.perf_counter() - started)))
    return points


def _rounds(base: Session, policy: str, requests: Sequence[Request], count: int) -> tuple[float, float]:
    """Return microseconds of a decoding round beside drafting, its pass and choosing, and of choosing without drafts.

    Medians over the rounds in which all requests decode.
    """
    session = base.sibling(speculation=policy)
    for index in range(count):
        session.add(replace(requests[index % len(requests)], request_id=str(index)))
    waiting = {str(index) for index in range(count)}
    stats, counters = session.stats, session.controller.counters
    beside, choosing = [], []
    while session.has_unfinished():
        decoding = not waiting
        before = np.array([stats.round_s, 1e-6 * counters.measured_us, stats.engine_s])
        outputs = session.step()
        taken = 1e6 * (np.array([stats.round_s, 1e-6 * counters.measured_us, stats.engine_s]) - before)
        ended = any(output.finished for output in outputs)
        waiting -= {output.request_id for output in outputs}
        if decoding and not ended and session.num_running == count:
            beside.append(taken[0] - taken[1])
            choosing.append(taken[1] - taken[2])
        elif decoding:
            break
    for index in range(count):
        session.cancel(str(index))
    while session.has_unfinished():
        session.step()
    if not beside:
        raise SystemExit("requests end before a round could be timed; raise --max_tokens")
    return statistics.median(beside), statistics.median(choosing)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return what is constant and what grows with the number of requests."""
    (few, low), (many, high) = points[0], points[-1]
    slope = max(0.0, (high - low) / (many - few)) if many > few else 0.0
    return max(0.0, low - slope * few), slope
