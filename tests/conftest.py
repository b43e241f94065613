"""Shared pytest configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers.work_units import starts_first, work_unit

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensorrt_include_dir",
        type=Path,
        help="folder of TensorRT 11's own headers, to compare plugins/tensorrt/abi with",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first: with several workers nobody waits for it at the end."""
    items.sort(key=lambda item: not starts_first(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """With `-n`: a worker takes whole units, in the order collected."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Give the rest of a dead worker's tests to others, but not the one it died of, as the base class does."""
            units = self.assigned_work[node]
            died_of = next((test for unit in units.values() for test, done in unit.items() if not done), None)
            for unit in units.values():
                unit.pop(died_of, None)
            self.assigned_work[node] = {name: unit for name, unit in units.items() if not all(unit.values())}
            super().remove_node(node)
            return died_of

    config.option.loadscopereorder = False
    return Scheduling(config, log)
