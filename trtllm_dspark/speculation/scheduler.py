"""The policy that turns confidences into verify lengths."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import compress
from operator import ne

import numpy as np

from trtllm_dspark import _core
from trtllm_dspark.engine.base import FloatArray, IntArray
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation.config import SpeculationConfig
from trtllm_dspark.speculation.cost_table import CostTable

logger = logging.getLogger(__name__)

STALE_ROUNDS = 2


class PrefixScheduler:
    """Choose how many drafts of each request a round verifies.

    Every mode is causal: whether draft k is verified depends on drafts before k and on past rounds only, so that the
    output law stays the target's (docs/losslessness.md).

    Args:
        config: mode and its number; not `off`.
        max_draft_len: gamma of the engine.
        cost_table: times of the engine's passes, for modes that need them.

    Raises:
        ConfigError: the mode asks for more drafts than the block has, or needs a cost table.
    """

    def __init__(self, config: SpeculationConfig, *, max_draft_len: int, cost_table: CostTable | None = None) -> None:
        if config.draft_len is not None and config.draft_len > max_draft_len:
            raise ConfigError(
                f"speculation '{config}' asks for {config.draft_len} drafts, "
                f"the engine verifies at most {max_draft_len}"
            )
        if config.needs_cost_table and cost_table is None:
            raise ConfigError(f"speculation '{config}' needs a cost table; measure the engine first")
        self.config = config
        self.draft_len = max_draft_len if config.draft_len is None else config.draft_len
        self.cost_table = cost_table
        self._by_costs = config.needs_cost_table
        self._past: deque[_PastRound] = deque(maxlen=STALE_ROUNDS)
        self._warned: set[str] = set()

    def verify_lens(
        self,
        requests: Sequence[Hashable],
        *,
        caps: IntArray,
        confidence: FloatArray | None,
        token_budget: int,
        depth: int = 0,
        load_scale: float = 1.0,
    ) -> IntArray:
        """Return [R] int64 drafts to verify, 0..caps.

        Args:
            requests: who the rows belong to; keys of the confidences of past rounds.
            caps: [R] int64, most drafts of each request; 0 for one that does not draft.
            confidence: [R, draft_len] float32, None in modes that need none.
            token_budget: drafts that fit into the round.
            depth: tokens cached before each row, on average.
            load_scale: factor on what tokens beyond one a request cost.
        """
        config, num_requests, keys = self.config, len(requests), list(requests)
        step_time = fixed_time = None
        if self.cost_table is not None and self._by_costs:
            most = num_requests * (1 + self.draft_len)
            step_time = self.cost_table.step_time_us(num_requests, most, depth=depth)
            fixed_time = self.cost_table.draft_time_us(num_requests, depth=depth)
        budget = self._budget(keys, caps, token_budget, step_time, fixed_time or 0.0, load_scale)
        schedule = _core.schedule_prefixes(
            config.mode,  # type: ignore[arg-type]
            num_requests=num_requests,
            max_draft_len=self.draft_len,
            confidence=confidence,
            caps=caps,
            draft_len=self.draft_len if config.mode == "fixed" else None,
            threshold=config.threshold if config.mode == "threshold" else None,
            step_time_us=step_time if config.mode == "early_stop" else None,
            budget=budget,
            token_budget=token_budget,
            load_scale=load_scale,
            fixed_time_us=fixed_time or 0.0,
        )
        self._warn(schedule.warnings, step_time)
        if config.mode == "stale_topk" and confidence is not None:
            self._past.append(_PastRound(keys, confidence))
        return schedule.verify_len

    def _budget(
        self,
        requests: list[Hashable],
        caps: IntArray,
        token_budget: int,
        step_time: FloatArray | None,
        fixed_time: float,
        load_scale: float,
    ) -> int | None:
        if self.config.mode != "stale_topk" or self.config.budget is not None:
            return self.config.budget
        # A request that was not there two rounds ago counts as certain: its first rounds are verified in full.
        if len(self._past) == STALE_ROUNDS:
            stale = self._past[0].of(requests)
        else:
            stale = np.ones((len(requests), self.draft_len), np.float32)
        budget, warnings = _core.verify_budget(
            stale,
            step_time_us=step_time,
            caps=caps,
            token_budget=token_budget,
            load_scale=load_scale,
            fixed_time_us=fixed_time,
        )
        self._warn(warnings, step_time)
        return budget

    def forget(self, request: Hashable) -> None:
        """Drop what is kept about a request that has ended."""
        for entry in self._past:
            entry.forget(request)

    def _warn(self, warnings: Sequence[str], step_time: FloatArray | None) -> None:
        for name in warnings:
            # Near a request's end few drafts are left, and a stretch that short may be level in any table.
            if name == "flat_cost_table" and step_time is not None and step_time[-1] > step_time[1]:
                continue
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("speculation '%s': %s (said once)", self.config, name.replace("_", " "))


class _PastRound:
    """Confidences of one past round; mostly asked for the very requests it had, or for all but one or two of them."""

    def __init__(self, requests: list[Hashable], confidence: FloatArray) -> None:
        self._requests = requests
        self._confidence = confidence

    def __len__(self) -> int:
        """Return how many requests it knows."""
        return sum(request is not _GONE for request in self._requests)

    def of(self, requests: list[Hashable]) -> FloatArray:
        """Return [R, gamma] confidences; 1 for a request it does not know."""
        known = self._requests
        if known == requests:
            return self._confidence
        found = np.empty((len(requests), self._confidence.shape[1]), np.float32)
        same = min(len(known), len(requests))
        found[:same] = self._confidence[:same]
        for row in (*compress(range(same), map(ne, known, requests)), *range(same, len(requests))):
            request = requests[row]
            found[row] = self._confidence[known.index(request)] if request in known else 1.0
        return found

    def forget(self, request: Hashable) -> None:
        """Drop a request; another of its name is not it."""
        if request in self._requests:
            self._requests[self._requests.index(request)] = _GONE


_GONE = object()
"""Stands where a request was forgotten."""
