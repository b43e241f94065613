"""What a session takes beside its passes, and for prompts: the times a simulation needs that no cost table has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from load_sweep import AbsorbClock

from trtllm_dspark.runtime import Request, Session
from trtllm_dspark.simulate.server import Server

PROMPT_GROUPS = (1, 1, 1, 2, 4, 1, 1, 1, 2, 4)
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
        absorb_us: of absorbing a token of a prompt into the drafter's context, where there is one.
    """

    round_us: float
    request_us: float
    token_us: float
    prompt_us: tuple[float, float]
    absorb_us: float

    @staticmethod
    def mean(costs: Sequence[SessionCosts]) -> SessionCosts:
        """Return the mean of what was measured several times."""
        means = [
            np.mean([getattr(entry, field.name) for entry in costs], axis=0).tolist() for field in fields(SessionCosts)
        ]
        round_us, request_us, token_us, prompt_us, absorb_us = means
        return SessionCosts(round_us, request_us, token_us, tuple(prompt_us), absorb_us)

    def apply(self, server: Server) -> Server:
        """Return a server that takes these times."""
        return replace(
            server,
            host_us=self.round_us,
            host_request_us=self.request_us,
            host_token_us=self.token_us,
            prefill_us=(self.prompt_us[0] - self.round_us, self.prompt_us[1]),
            absorb_us=self.absorb_us,
        )


def session_costs(
    session: Session, absorbing: AbsorbClock, policies: Sequence[str], requests: Sequence[Request]
) -> dict[str, SessionCosts]:
    """Time every policy at one and at eight requests at once, and prompts of several lengths.

    Args:
        session: over the engine, with a cost table.
        absorbing: clock of that engine.
        policies: as `--speculation` takes them.
        requests: of equal `max_tokens`; prompts that the engine has not met, `sum(PROMPT_GROUPS)` of them at best.
    """
    drafts = [policy for policy in policies if policy != "off"]
    # A fixed length absorbs a prompt in the prompt's own round, where the clock tells one from the other.
    prompt_us, absorb_us = prompt_costs(
        session.sibling(speculation="fixed:1" if drafts else "off"), absorbing, requests
    )
    counts = tuple(dict.fromkeys((1, min(MANY, session.limits.max_batch_size))))
    choosing = _line([(count, _rounds(session, "off", requests, count)[1]) for count in counts])
    costs = {}
    for policy in policies:
        beside = _line([(count, _rounds(session, policy, requests, count)[0]) for count in counts])
        absorbs = absorb_us if policy in drafts else 0.0
        costs[policy] = SessionCosts(beside[0] + choosing[0], beside[1], choosing[1], prompt_us, absorbs)
    return costs


def prompt_costs(
    session: Session, absorbing: AbsorbClock, requests: Sequence[Request]
) -> tuple[tuple[float, float], float]:
    """Return microseconds of a round over prompts alone, of any and more for every token; and of absorbing a token.

    Each is a median over rounds: the slope over pairs of rounds that differ by a fifth of their tokens at least.
    """
    # Every prompt once: a server hardly ever meets the same lengths again, and what a pass allocates for lengths that
    # it has not met is a part of its time.
    turn, points, absorbed_us = 0, list[tuple[int, float]](), list[float]()
    for size in PROMPT_GROUPS:
        group = [requests[(turn + index) % len(requests)] for index in range(size)]
        turn += size
        for tokens, round_us, absorb_us in _prompt_rounds(session, absorbing, group):
            points.append((tokens, round_us - absorb_us))
            absorbed_us.append(absorb_us / tokens)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a in points for b in points if b[0] > 1.2 * a[0]]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    constant = max(0.0, statistics.median(us - slope * tokens for tokens, us in points))
    return (constant, slope), statistics.median(absorbed_us)


def _prompt_rounds(
    session: Session, absorbing: AbsorbClock, group: Sequence[Request]
) -> list[tuple[int, float, float]]:
    """Return tokens, microseconds and those of absorbing of every round that a group of prompts takes."""
    for index, request in enumerate(group):
        session.add(replace(request, request_id=str(index), params=replace(request.params, max_tokens=1)))
    points = []
    while session.has_unfinished():
        before, absorbed_s, started = session.stats.prompt_tokens, absorbing.seconds, time.perf_counter()
        session.step()
        round_us = 1e6 * (time.perf_counter() - started)
        points.append((session.stats.prompt_tokens - before, round_us, 1e6 * (absorbing.seconds - absorbed_s)))
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
