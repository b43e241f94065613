"""Canonical model configurations to and from the JSON of a manifest, with every field checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from trtllm_dspark.checkpoint.config import (
    Architecture,
    DrafterConfig,
    DrafterKind,
    MarkovHead,
    ModelConfig,
    RopeScaling,
)
from trtllm_dspark.errors import EngineError


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object whose members are read with their type checked; errors name file and field."""

    raw: dict[str, Any]
    where: str

    def _get(self, name: str, kinds: tuple[type, ...], wanted: str) -> Any:
        value = self.raw.get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise EngineError(f"{self.where}: field '{name}' must be {wanted}, got {value!r}; build the engine again")
        return value

    def is_null(self, name: str) -> bool:
        """Tell whether the member is absent or null."""
        return self.raw.get(name) is None

    def string(self, name: str) -> str:
        """Read a string."""
        return str(self._get(name, (str,), "a string"))

    def integer(self, name: str) -> int:
        """Read an integer."""
        return int(self._get(name, (int,), "an integer"))

    def number(self, name: str) -> float:
        """Read a number."""
        return float(self._get(name, (int, float), "a number"))

    def boolean(self, name: str) -> bool:
        """Read a boolean."""
        return bool(self._get(name, (bool,), "true or false"))

    def integers(self, name: str) -> tuple[int, ...]:
        """Read a list of integers."""
        values = self._get(name, (list,), "a list of integers")
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise EngineError(f"{self.where}: field '{name}' must be a list of integers; build the engine again")
        return tuple(values)

    def strings(self, name: str) -> tuple[str, ...]:
        """Read a list of strings."""
        values = self._get(name, (list,), "a list of strings")
        if not all(isinstance(value, str) for value in values):
            raise EngineError(f"{self.where}: field '{name}' must be a list of strings; build the engine again")
        return tuple(values)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Read a list of numbers."""
        values = self._get(name, (list,), "a list of numbers")
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            raise EngineError(f"{self.where}: field '{name}' must be a list of numbers; make the file again")
        return tuple(float(value) for value in values)

    def optional_string(self, name: str) -> str | None:
        """Read a string or null."""
        return None if self.is_null(name) else self.string(name)

    def optional_integer(self, name: str) -> int | None:
        """Read an integer or null."""
        return None if self.is_null(name) else self.integer(name)

    def child(self, name: str) -> Fields:
        """Read a nested object."""
        return Fields(self._get(name, (dict,), "an object"), f"{self.where}: {name}")

    def children(self, name: str) -> list[Fields]:
        """Read a list of objects."""
        values = self._get(name, (list,), "a list of objects")
        if not all(isinstance(value, dict) for value in values):
            raise EngineError(f"{self.where}: field '{name}' must be a list of objects; build the engine again")
        return [Fields(value, f"{self.where}: {name}") for value in values]

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        """Read a string out of a closed set."""
        value = self.string(name)
        if value not in choices:
            raise EngineError(
                f"{self.where}: field '{name}' must be one of {', '.join(choices)}, got '{value}'; build it again"
            )
        return value


def model_config(fields: Fields) -> ModelConfig:
    """Read a `ModelConfig`.

    Raises:
        EngineError: a field is missing or has the wrong type.
    """
    scaling = None
    if not fields.is_null("rope_scaling"):
        rope = fields.child("rope_scaling")
        scaling = RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
    return ModelConfig(
        architecture=cast(Architecture, fields.one_of("architecture", ("llama", "qwen3"))),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_layers"),
        num_heads=fields.integer("num_heads"),
        num_kv_heads=fields.integer("num_kv_heads"),
        head_dim=fields.integer("head_dim"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=fields.number("rope_theta"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qk_norm=fields.boolean("qk_norm"),
        attention_bias=fields.boolean("attention_bias"),
        rope_scaling=scaling,
        bos_token_id=fields.optional_integer("bos_token_id"),
        eos_token_ids=fields.integers("eos_token_ids"),
        pad_token_id=fields.optional_integer("pad_token_id"),
    )


def drafter_fields(config: DrafterConfig) -> dict[str, Any]:
    """Return the JSON object of a drafter; `extra` belongs to the checkpoint's format and is left out."""
    fields = asdict(config)
    del fields["extra"]
    if not config.autoregressive:
        # Engines from before there were other kinds keep their hash.
        del fields["kind"]
    return fields


def drafter_config(fields: Fields) -> DrafterConfig:
    """Read a `DrafterConfig`.

    Raises:
        EngineError: a field is missing or has the wrong type.
    """
    return DrafterConfig(
        backbone=model_config(fields.child("backbone")),
        block_size=fields.integer("block_size"),
        target_layer_ids=fields.integers("target_layer_ids"),
        num_target_layers=fields.integer("num_target_layers"),
        target_hidden_size=fields.integer("target_hidden_size"),
        mask_token_id=fields.integer("mask_token_id"),
        markov_head=cast(MarkovHead, fields.one_of("markov_head", ("none", "vanilla", "gated", "rnn"))),
        markov_rank=fields.integer("markov_rank"),
        confidence=fields.boolean("confidence"),
        confidence_with_markov=fields.boolean("confidence_with_markov"),
        draft_vocab_size=fields.integer("draft_vocab_size"),
        kind="block" if fields.is_null("kind") else cast(DrafterKind, fields.one_of("kind", ("eagle3", "mtp"))),
    )
