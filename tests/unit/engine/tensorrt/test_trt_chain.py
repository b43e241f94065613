"""The checks of tests/gpu/test_tensorrt_chain.py on a recording device: what will judge a GPU is judged here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.tiny_tensorrt import Written
from helpers.trt_chain import check_graphs, check_passes, check_tokens
from helpers.trt_fixtures import AnyOpened, Opened

PROMPTS = [[40 + index, 60 + index, 3] for index in range(6)]


def test_chain_passes_equal_cpu(random_weights: Written, opened: Opened) -> None:
    engine, _ = opened(random_weights)
    tokens = np.random.default_rng(0).integers(0, 97, (2, 20))
    check_passes(engine, random_weights.cpu, tokens, tolerance=1e-4)


def test_chain_tokens_equal_cpu_and_rounds_are_graphs(toy_weights: Written, opened_toy: AnyOpened) -> None:
    engine, _ = opened_toy(acceptance="rejection")
    session = check_tokens(engine, toy_weights.cpu, PROMPTS, max_tokens=24, tolerance=1e-4, least_equal=1.0)
    check_graphs(engine, session)


@pytest.mark.parametrize("part", ["logits", "context"])
def test_chain_notices_caches_that_are_not_kept(random_weights: Written, opened: Opened, part: str) -> None:
    engine, device = opened(random_weights)
    original: Callable[..., Any] = engine.absorb

    def absorb(batch: Any) -> None:
        original(batch)
        device.finish()
        cache = engine._model.cache if part == "logits" else engine._model.drafter_cache
        for address in cache.bindings(0).values():
            device.bytes_at(address, cache.slot_bytes)[:] = 0

    engine.absorb = absorb  # type: ignore[method-assign]
    tokens = np.random.default_rng(0).integers(0, 97, (2, 20))
    with pytest.raises(AssertionError, match="logits"):
        check_passes(engine, random_weights.cpu, tokens, tolerance=0.02)
