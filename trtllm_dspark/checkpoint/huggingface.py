"""Targets stored as Hugging Face directories of safetensors files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint._hf_config import ARCHITECTURES, Fields, parse_model_config
from trtllm_dspark.checkpoint._mapping import TensorMapper
from trtllm_dspark.checkpoint.arrays import equal_values
from trtllm_dspark.checkpoint.config import ModelConfig
from trtllm_dspark.checkpoint.safetensors_io import read_directory, read_json, read_text
from trtllm_dspark.checkpoint.types import Checkpoint, CheckpointFile, TokenizerAssets
from trtllm_dspark.errors import CheckpointError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Old exports store the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load_huggingface(directory: Path) -> Checkpoint:
    """Read a Llama or Qwen3 target from `config.json`, safetensors and `tokenizer.json`.

    Raises:
        CheckpointError: the directory is incomplete or holds something this package does not run.
    """
    if (directory / "adapter_config.json").is_file():
        raise CheckpointError(f"{directory} is a LoRA adapter; merge it into its base model and pass the merged one")
    config_path = directory / "config.json"
    config, defaults = read_target_config(config_path)
    stored, paths = read_directory(directory)
    mapper = TensorMapper(directory, {name: tensor.lazy() for name, tensor in stored.items()})
    _map_target(mapper, config, directory)
    files = tuple(CheckpointFile(path) for path in (config_path, *paths))
    return Checkpoint(config, mapper.finish(), files, _tokenizer(directory, config, defaults), "huggingface")


def read_target_config(config_path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a target's `config.json` and the `generation_config.json` beside it, empty where there is none.

    Raises:
        CheckpointError: it describes something this package does not run.
    """
    fields = Fields(config_path, read_json(config_path))
    names = fields.names("architectures")
    architecture = ARCHITECTURES.get(names[0]) if len(names) == 1 else None
    if architecture is None:
        raise CheckpointError(
            f"{config_path}: architecture {', '.join(names) or 'none'} is not supported as a target, "
            f"expected {' or '.join(ARCHITECTURES)}"
        )
    generation = config_path.parent / "generation_config.json"
    defaults = read_json(generation) if generation.is_file() else {}
    return _with_generation_ids(parse_model_config(fields, architecture), Fields(generation, defaults)), defaults


def _map_target(mapper: TensorMapper, config: ModelConfig, directory: Path) -> None:
    vocab_shape = (config.vocab_size, config.hidden_size)
    for name in mapper.names():
        if _DERIVED.fullmatch(name):
            mapper.drop(name)
    mapper.take("model.embed_tokens.weight", "embed.weight", vocab_shape)
    mapper.take_layers(config, "model.")
    mapper.take("model.norm.weight", "norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        mapper.take("lm_head.weight", "lm_head.weight", vocab_shape)
        return
    copy = mapper.drop("lm_head.weight")
    if copy is not None:
        embed = mapper.mapped("embed.weight")
        if not equal_values(copy, embed):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false in config.json if the head is its own"
            )


def _with_generation_ids(config: ModelConfig, generation: Fields) -> ModelConfig:
    """Let `generation_config.json` override the special ids, as the Hugging Face library does."""
    bos, pad = generation.token_id("bos_token_id"), generation.padding_id()
    return replace(
        config,
        bos_token_id=config.bos_token_id if bos is None else bos,
        pad_token_id=config.pad_token_id if pad is None else pad,
        eos_token_ids=generation.token_ids("eos_token_id") or config.eos_token_ids,
    )


def _tokenizer(directory: Path, config: ModelConfig, generation: dict[str, Any]) -> TokenizerAssets | None:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    others = {name: value for name, value in generation.items() if name not in ids}
    known = {name: value for name, value in ids.items() if value is not None}
    settings_path = directory / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    template = _chat_template(directory, settings)
    return TokenizerAssets(read_text(path), template, {**others, **known}, _special_tokens(directory, settings))


def _special_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, str | None]:
    """Return the special tokens that the tokenizer's own files name, and None for those that they say it lacks."""
    path, older = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    named = {name: settings[name] for name in _SPECIAL_TOKENS if name in settings}
    # Before tokenizer_config.json listed the added tokens, the map beside it had the last word.
    if "added_tokens_decoder" not in settings and older.is_file():
        named |= {name: value for name, value in read_json(older).items() if name in _SPECIAL_TOKENS}
        path = older
    found: dict[str, str | None] = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(text, str):
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a token's text")
        found[name] = text
    return found


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """Return the template from `chat_template.jinja` or `tokenizer_config.json`; of several, the default one."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be text or a list with an entry named default"
        )
    return template
