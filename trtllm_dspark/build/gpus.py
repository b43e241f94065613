"""GPUs by name: architecture and memory, so that an engine can be sized for a machine one does not sit at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from trtllm_dspark.errors import ConfigError

# What the driver reports as total memory, in MiB, ECC on where it is by default.
_GPUS: dict[str, tuple[str, int]] = {
    "A100 40GB": ("sm80", 40960),
    "A100 80GB": ("sm80", 81920),
    "A30": ("sm80", 24576),
    "A10": ("sm86", 23028),
    "A10G": ("sm86", 23028),
    "A40": ("sm86", 46068),
    "RTX A6000": ("sm86", 49140),
    "RTX 3080": ("sm86", 10240),
    "RTX 3090": ("sm86", 24576),
    "L4": ("sm89", 23034),
    "L40S": ("sm89", 46068),
    "RTX 6000 Ada": ("sm89", 49140),
    "RTX 4070": ("sm89", 12282),
    "RTX 4080": ("sm89", 16376),
    "RTX 4090": ("sm89", 24564),
    "H100": ("sm90", 81559),
    "H200": ("sm90", 143771),
    "B200": ("sm100", 183359),
    "RTX 5070": ("sm120", 12227),
    "RTX 5080": ("sm120", 16303),
    "RTX 5090": ("sm120", 32607),
    "RTX PRO 6000 Blackwell": ("sm120", 97887),
}
_WORDS_OF_MAKERS = re.compile(r"\b(nvidia|geforce|tesla|quadro|graphics|gpu)\b")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU an engine is built for; `memory_bytes` is all of its memory."""

    name: str
    architecture: str
    memory_bytes: int


def find_gpu(name: str) -> Gpu:
    """Look a GPU up by its name; case, spaces and makers' words (NVIDIA, GeForce) do not matter.

    Raises:
        ConfigError: it is not in the table; names those that sound alike, and the flags that replace it.
    """
    keys = {_key(known): known for known in _GPUS}
    known = keys.get(_key(name))
    if known is None:
        close = [keys[key] for key in get_close_matches(_key(name), keys, n=4, cutoff=0.4)]
        hint = f"did you mean {' or '.join(close)}" if close else f"known are {', '.join(_GPUS)}"
        raise ConfigError(f"--gpu {name!r} is not known; {hint}, or give --gpu_architecture and --gpu_memory_gib")
    architecture, mib = _GPUS[known]
    return Gpu(known, architecture, mib << 20)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _WORDS_OF_MAKERS.sub("", name.lower()))
