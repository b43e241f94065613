"""Write tiny GGUF targets with the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from trtllm_dspark.checkpoint import Checkpoint
from trtllm_dspark.checkpoint.gguf_target import LAYER_NAMES

QuantizationType = gguf.GGMLQuantizationType


def write_gguf(
    path: Path,
    model: Checkpoint,
    *,
    quantisation: gguf.GGMLQuantizationType = QuantizationType.F32,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    **metadata: Any,
) -> Path:
    """Write `model` as a converter would: q and k of llama permuted; `metadata` overrides or adds fields.

    Field names have `__` for `.`; `arch__` stands for the architecture's prefix, None leaves a field out.
    """
    config = model.config
    fields: dict[str, Any] = {
        "arch__block_count": config.num_layers,
        "arch__context_length": config.max_position_embeddings,
        "arch__embedding_length": config.hidden_size,
        "arch__feed_forward_length": config.intermediate_size,
        "arch__attention__head_count": config.num_heads,
        "arch__attention__head_count_kv": config.num_kv_heads,
        "arch__attention__key_length": config.head_dim,
        "arch__attention__layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "arch__rope__freq_base": float(config.rope_theta),
        **metadata,
    }
    writer = gguf.GGUFWriter(path, fields.pop("architecture", config.architecture))
    for name, value in fields.items():
        if value is not None:
            key = name.replace("arch__", f"{config.architecture}.").replace("__", ".")
            writer.add_key_value(
                key, value, _value_type(value), sub_type=_value_type(value[0]) if _is_list(value) else None
            )
    names = {
        "embed.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, values in model.arrays.items():
        parts = name.split(".", 2)
        if parts[0] == "layers":
            if config.architecture == "llama" and parts[2].split(".")[0] in ("q", "k"):
                values = interleave(values, config.head_dim)
            target = f"blk.{parts[1]}.{LAYER_NAMES[parts[2]]}"
        else:
            target = names[name]
        if values.ndim == 2 and quantisation is not QuantizationType.F32:
            writer.add_tensor(target, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(target, values)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(values: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Return rows in ggml's order: row i of a head's first half, row i of its second half, row i + 1 of the first..."""
    rows = np.arange(len(values)).reshape(-1, head_dim)
    order = [
        index
        for head in rows
        for pair in zip(head[: head_dim // 2], head[head_dim // 2 :], strict=True)
        for index in pair
    ]
    return values[order]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _value_type(value: Any) -> gguf.GGUFValueType:
    kinds: list[tuple[type, gguf.GGUFValueType]] = [
        (bool, gguf.GGUFValueType.BOOL),
        (str, gguf.GGUFValueType.STRING),
        (list, gguf.GGUFValueType.ARRAY),
        (float, gguf.GGUFValueType.FLOAT32),
        (int, gguf.GGUFValueType.UINT32),
    ]
    return next(kind for python_type, kind in kinds if isinstance(value, python_type))
