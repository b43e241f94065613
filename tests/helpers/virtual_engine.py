"""The fake engine on a clock of its own: passes take what a cost model says, and nothing else takes time."""

from __future__ import annotations

from dataclasses import dataclass

from helpers.fake_engine import FakeEngine
from trtllm_dspark.engine.base import BlockOutput, ContextBatch, IntArray, TargetOutput, TokenBatch
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape


@dataclass
class VirtualEngine(FakeEngine):
    """See the module.

    Attributes:
        now: seconds.
        base_us: of a target pass.
        per_token_us: of each token beyond one a request.
        block_us: of a drafter block.
        absorb_us: of absorbing a token.
    """

    now: float = 0.0
    base_us: float = 5000.0
    per_token_us: float = 200.0
    block_us: float = 400.0
    absorb_us: float = 50.0
    absorbed: int = 0

    def clock(self) -> float:
        return self.now

    def verify(self, batch: TokenBatch) -> TargetOutput:
        self.now += (self.base_us + self.per_token_us * (len(batch.token_ids) - len(batch.row_lens))) * 1e-6
        return super().verify(batch)

    def absorb(self, batch: ContextBatch) -> None:
        self.absorbed += len(batch.features)
        self.now += self.absorb_us * len(batch.features) * 1e-6
        super().absorb(batch)

    def draft_block(self, anchors: IntArray, positions: IntArray, *, first_slot: int = 0) -> BlockOutput:
        self.now += self.block_us * 1e-6
        return super().draft_block(anchors, positions, first_slot=first_slot)

    def cost_table(self) -> CostTable:
        """Return what the passes take."""
        counts, widths = range(1, self.max_batch_size + 1), range(1, self.gamma + 2)
        shapes = {VerifyShape(r, tokens, k, 32) for r in counts for k in widths for tokens in (r * k, r - 1 + k)}
        verify = {shape: self.base_us + self.per_token_us * (shape.num_tokens - shape.num_requests) for shape in shapes}
        return CostTable(verify, {DraftShape(r, 32): self.block_us + self.absorb_us * r for r in counts})
