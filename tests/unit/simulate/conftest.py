from __future__ import annotations

import pytest

from trtllm_dspark.simulate.acceptance import AcceptanceProfile
from trtllm_dspark.simulate.server import Server
from trtllm_dspark.simulate.times import LookupTable
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape

GAMMA = 5


def make_table(first_us: float, token_us: float, draft_us: float) -> LookupTable:
    """Return times that rise with every token from `first_us`."""
    verify = {
        VerifyShape(count, count * width, width, depth): first_us + token_us * count * width + 0.001 * count * depth
        for count in (1, 2, 4, 8, 16, 32, 64)
        for width in range(1, GAMMA + 2)
        for depth in (128, 1024)
    }
    draft = {DraftShape(count, depth): draft_us + 2.0 * count for count in (1, 64) for depth in (128, 1024)}
    return LookupTable.of(CostTable(verify, draft))


@pytest.fixture
def server() -> Server:
    return Server("test", make_table(5000.0, 10.0, 500.0), False, 64, 2048, 1024, GAMMA)


@pytest.fixture
def small() -> Server:
    """Return a server of 8 slots whose passes are bound by computation: about 33 requests of 70 tokens a second."""
    return Server("small", make_table(1000.0, 200.0, 100.0), False, 8, 2048, 256, GAMMA)


@pytest.fixture
def profile() -> AcceptanceProfile:
    return AcceptanceProfile("test", "assumed", {"math": (0.9,) * GAMMA, "chat": (0.6,) * GAMMA})
