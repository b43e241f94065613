"""A fake engine whose drafter drafts token after token and checks that every pair is the one it should be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from helpers.fake_engine import VOCAB, FakeEngine, next_token
from trtllm_dspark import _core
from trtllm_dspark.engine.base import EngineLimits, FloatArray, IntArray, PairBatch, StepOutput


class FakeDraftHead:
    """Row j of a slot pairs token j with token j + 1; a state is (token, place) of what came before, both plus 1."""

    def __init__(self, engine: AutoregressiveFake) -> None:
        self._engine = engine
        self.pairs: list[dict[int, tuple[int, int]]] = [{} for _ in range(engine.max_batch_size)]
        self.absorbed = [0] * engine.max_batch_size
        self._last = [-1] * engine.max_batch_size

    def absorb(self, batch: PairBatch) -> FloatArray:
        self._engine.passes.append("absorb")
        assert 0 < len(batch.token_ids) == len(batch.features) <= self._engine.max_num_tokens
        start = 0
        for row, length in enumerate(batch.row_lens.tolist()):
            slot, place = batch.first_slot + row, int(batch.write_indices[row])
            if place and not batch.features.any():
                # A rehearsal, which measures passes over a text of zeros.
                self.pairs[slot] = dict.fromkeys(range(place + length), (0, 0))
                self._engine.target[slot] = [0] * (place + length)
                place, length = place + length, 0
                self.absorbed[slot] = place
            for index in range(start, start + length):
                token, position = batch.features[index].astype(int).tolist()
                assert position == place, "a pair in the wrong place"
                self.pairs[slot][place] = token, int(batch.token_ids[index])
                place += 1
            if length:
                self.absorbed[slot], self._last[slot] = place, -1
            start += length
        return batch.features + 1

    def step(self, state: FloatArray, token_ids: IntArray, rows: IntArray, *, first_slot: int = 0) -> StepOutput:
        engine = self._engine
        engine.passes.append("step")
        logits = np.zeros((len(token_ids), VOCAB), np.float32)
        after = np.zeros_like(state)
        for index, (token, row) in enumerate(zip(token_ids.tolist(), rows.tolist(), strict=True)):
            slot = first_slot + index
            pairs, absorbed = self.pairs[slot], self.absorbed[slot]
            before, place = (state[index] - 1).astype(int).tolist()
            assert row >= absorbed - 1, "a step over a pair of the request"
            pairs[row] = before, token
            if place != row or (row != absorbed - 1 and row != self._last[slot] + 1):
                # It rides along: what it gives is not read.
                continue
            self._last[slot] = row
            prefix = [pairs[0][0], *(pairs[earlier][1] for earlier in range(row + 1))]
            assert [pairs[earlier][0] for earlier in range(row + 1)] == prefix[:-1], "pairs that do not follow"
            if row == absorbed - 1:
                assert prefix[:-1] == engine.target[slot][: row + 1], "not the target's text"
            wrong = engine.mistake_every and len(prefix) % engine.mistake_every == 0
            # Where it is wrong it is less sure.
            logits[index, (next_token(prefix) + bool(wrong)) % VOCAB] = engine.draft_logit / (1 + bool(wrong))
            if prefix[0] == engine.nan_draft:
                logits[index] = np.nan
            after[index] = token + 1, row + 2
        return StepOutput(logits, after)


@dataclass
class AutoregressiveFake(FakeEngine):
    """See the module.

    Attributes:
        draft_logit: logit of the drafter's choice, half of it where it is wrong; every other token has 0.
    """

    draft_logit: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.draft_head = FakeDraftHead(self)
        self.heads = _core.DraftHeads(vocab_size=VOCAB, draft_vocab_size=VOCAB, kind="none")

    @property
    def limits(self) -> EngineLimits:
        return replace(super().limits, autoregressive=True)

    def copy_slot(self, source: int, destination: int, *, num_tokens: int, num_context: int) -> None:
        super().copy_slot(source, destination, num_tokens=num_tokens, num_context=0)
        head = self.draft_head
        head.pairs[destination] = {row: head.pairs[source][row] for row in range(num_context)}
        head.absorbed[destination] = num_context

    def draft_block(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("an autoregressive drafter has no blocks")
