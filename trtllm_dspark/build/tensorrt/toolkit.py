"""What TensorRT and TensorRT-RTX have in common, and where they differ."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from trtllm_dspark.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Toolkit:
    """One builder. Both have the same Python interface, so only this object tells them apart.

    Attributes:
        backend: its `--backend`.
        product: its name in messages.
        module: Python module.
        distribution: installed package whose version a manifest records.
        extra: extra of this package that installs it.
        version: release line that profiles, flags and layer lists were written for.
        needs_gpu: it compiles for the GPU it runs on; otherwise for any architecture, without a GPU.
    """

    backend: str
    product: str
    module: str
    distribution: str
    extra: str
    version: str
    needs_gpu: bool

    def load(self) -> Any:
        """Import the module.

        Raises:
            DeviceError: it is not installed, cannot be loaded, or is of another release line.
        """
        try:
            trt = importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise DeviceError(
                f"--backend {self.backend} needs {self.product} ({error}); pip install '.[{self.extra}]' in a checkout"
            ) from error
        found = str(getattr(trt, "__version__", "unknown"))
        if not f"{found}.".startswith(f"{self.version}."):
            raise DeviceError(
                f"{self.product} {found} is installed, this version builds with {self.version}; "
                f"pip install '.[{self.extra}]' in a checkout"
            )
        return trt


TENSORRT = Toolkit("tensorrt", "TensorRT", "tensorrt", "tensorrt_cu13", "tensorrt", "11", needs_gpu=True)
