"""The transformer part of a Hugging Face `config.json`, for targets and for drafters' backbones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint.config import Architecture, ModelConfig, RopeScaling
from trtllm_dspark.errors import CheckpointError

ARCHITECTURES: dict[str, Architecture] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_MISSING = object()


class Fields:
    """Reads typed values of a configuration and names the field when one is missing or wrong."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def integer(self, name: str, default: Any = _MISSING, *, minimum: int = 1) -> int:
        """Return an integer field of at least `minimum`; null counts as absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected an integer of at least {minimum}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """Return a positive number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected a positive number")
        return float(value)

    def boolean(self, name: str, default: Any = _MISSING) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected true or false")
        return value

    def token_id(self, name: str) -> int | None:
        """Return a token id, or None where the field is absent or null."""
        return None if self.values.get(name) is None else self.integer(name, minimum=0)

    def padding_id(self) -> int | None:
        """Return `pad_token_id`, or None where it is absent, null or negative, as older exports write "none"."""
        value = self.values.get("pad_token_id")
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            return None
        return self.token_id("pad_token_id")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return a field that is one token id or a list of them; empty where it is absent or null."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise CheckpointError(f"{self.path}: {name} is {value!r}, expected token ids")
        return tuple(ids)

    def layer_ids(self, name: str) -> tuple[int, ...]:
        """Return a non-empty list of integers, unchecked against any model."""
        value = self.values.get(name)
        good = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        if not good or not value:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected a list of layer numbers")
        return tuple(value)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty where the field is absent or null."""
        value = self.values.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected a list of names")
        return tuple(value or ())

    def refuse_unless(self, name: str, allowed: tuple[Any, ...], what: str) -> None:
        """Refuse the checkpoint when a field that changes the maths is set to something other than `allowed`."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise CheckpointError(f"{self.path}: {name} is {value!r}; {what} not supported")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is _MISSING:
            raise CheckpointError(f"{self.path} has no {name}; the configuration is incomplete")
        return value


def parse_model_config(fields: Fields, architecture: Architecture) -> ModelConfig:
    """Translate the transformer fields of a Hugging Face configuration.

    Raises:
        CheckpointError: a field is missing or wrong, or asks for something the graphs do not have.
    """
    _refuse_unsupported(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: {num_heads} attention heads do not divide into {num_kv_heads} key-value heads"
        )
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.path} has no head_dim and hidden_size {hidden_size} is no multiple of {num_heads}"
        )
    head_dim = fields.integer("head_dim", hidden_size // num_heads, minimum=2)
    if head_dim % 2:
        raise CheckpointError(f"{fields.path}: head_dim is {head_dim}; rotary embedding needs an even one")
    rope_theta, rope_scaling = _rope(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qk_norm=architecture == "qwen3",
        attention_bias=fields.boolean("attention_bias", False),
        rope_scaling=rope_scaling,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        pad_token_id=fields.padding_id(),
    )


def _refuse_unsupported(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        entry = fields.values.get(name)
        if entry is not None:
            method = entry.get("quant_method", "unnamed") if isinstance(entry, dict) else entry
            raise CheckpointError(
                f"{fields.path}: the checkpoint is quantised ({method}); pass the unquantised one, "
                "the build quantises by itself (--weight_dtype)"
            )
    fields.refuse_unless("hidden_act", ("silu", "swish"), "this activation is")
    fields.refuse_unless("mlp_bias", (False,), "biases in the MLP are")
    fields.refuse_unless("partial_rotary_factor", (1, 1.0), "partial rotary embedding is")
    fields.refuse_unless("use_sliding_window", (False,), "sliding-window attention is")
    for layer_type in fields.names("layer_types"):
        if layer_type != "full_attention":
            raise CheckpointError(f"{fields.path}: layer_types names {layer_type!r}; only full_attention is supported")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling; `rope_scaling` hides `rope_parameters` (transformers 5), as in transformers."""
    given = {name: fields.values.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, value in given.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{fields.path}: {name} is {value!r}, expected an object")
    sources = [source for source in (fields.values, *given.values()) if source.get("rope_theta") is not None]
    thetas = sorted({Fields(fields.path, source).number("rope_theta") for source in sources})
    if len(thetas) > 1:
        raise CheckpointError(
            f"{fields.path}: rope_theta is {thetas[0]!r} in one place and {thetas[1]!r} in another (top level, "
            "rope_scaling, rope_parameters); keep the one the model was trained with"
        )
    theta = thetas[0] if thetas else 10000.0
    scaling = given["rope_scaling"] or given["rope_parameters"]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"{fields.path}: rope type {kind!r} is not supported, expected default or llama3; use another model"
        )
    values = Fields(fields.path, scaling)
    return theta, RopeScaling(
        factor=values.number("factor"),
        low_freq_factor=values.number("low_freq_factor"),
        high_freq_factor=values.number("high_freq_factor"),
        original_max_position_embeddings=values.integer("original_max_position_embeddings"),
    )
