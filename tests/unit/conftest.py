"""Fixtures that several unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.toy_pair import ToyPair, build_toy_engine, write_toy_pair


@pytest.fixture(scope="session")
def toy_pair(tmp_path_factory: pytest.TempPathFactory) -> ToyPair:
    """Return the closed-form pair: the drafter is wrong after every fifth token of the loop."""
    return write_toy_pair(tmp_path_factory.mktemp("toy_pair"))


@pytest.fixture(scope="session")
def toy_engine_dir(toy_pair: ToyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an engine of the toy pair: 4 requests of 512 tokens, 64 tokens a pass."""
    return build_toy_engine(toy_pair, tmp_path_factory.mktemp("toy_engine") / "engine")
