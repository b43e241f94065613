"""Host arrays of any size into fixed places on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from trtllm_dspark.engine.tensorrt._memory import Layout, PinnedRing
from trtllm_dspark.engine.tensorrt._model import SlotModel


def stage(model: SlotModel, ring: PinnedRing, arrays: Mapping[int, NDArray[Any]]) -> None:
    """Enqueue copies of arrays to device addresses through page-locked memory."""
    layout = Layout({str(address): (array.shape, array.dtype) for address, array in arrays.items()})
    piece = ring.take(layout.num_bytes)
    views = layout.views(piece.memory)
    for address, array in arrays.items():
        views[str(address)][...] = array
        model.device.to_device(address, views[str(address)], model.stream)
    ring.give(piece, model.stream)
