"""Whatever a file holds, reading it either works or ends in a CheckpointError."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_files import write_gguf
from helpers.tiny_models import write_drafter, write_target
from helpers.toy_tokenizer import tokenizer_json

from trtllm_dspark.checkpoint import Checkpoint, load_drafter, load_target
from trtllm_dspark.errors import CheckpointError

WEIRD: list[Any] = [None, True, -1, 0, 3.5, "x", [], [1], ["a"], {}, {"a": 1}, [[1]], float("inf"), 10**30]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_target(write_target(tmp_path_factory.mktemp("target"), num_shards=2))


def _json_variants(path: Path, extra: tuple[str, ...]) -> list[str]:
    base = json.loads(path.read_text())
    return [json.dumps({**base, name: value}) for name in (*base, *extra) for value in WEIRD]


def test_target_config_of_any_types_never_crashes(target: Checkpoint) -> None:
    path = target.files[0].path
    original, refused = path.read_text(), 0
    for text in _json_variants(path, ("rope_scaling", "rope_parameters", "layer_types", "quantization_config")):
        path.write_text(text)
        try:
            load_target(path.parent)
        except CheckpointError:
            refused += 1
    path.write_text(original)
    assert refused > 100
    for text in _json_variants(path.parent / "model.safetensors.index.json", ()):
        (path.parent / "model.safetensors.index.json").write_text(text)
        with contextlib.suppress(CheckpointError):
            load_target(path.parent)


def test_drafter_config_of_any_types_never_crashes(tmp_path: Path, target: Checkpoint) -> None:
    path = write_drafter(tmp_path) / "config.json"
    refused = 0
    extra = (
        "dflash_config",
        "speculators_model_type",
        "transformer_layer_config",
        "quantization",
        "sample_from_anchor",
    )
    for text in _json_variants(path, extra):
        path.write_text(text)
        try:
            load_drafter(tmp_path, target.config)
        except CheckpointError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("seed", range(4))
def test_gguf_with_random_bytes_in_header_never_crashes(tmp_path: Path, target: Checkpoint, seed: int) -> None:
    tokens = list(json.loads(tokenizer_json())["model"]["vocab"])
    metadata = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [1] * len(tokens), "merges": ["a b"]}
    named = {f"tokenizer__ggml__{name}": value for name, value in metadata.items()}
    path = write_gguf(tmp_path / "m.gguf", target, tokenizer__ggml__eos_token_id=2, general__alignment=32, **named)
    intact = np.fromfile(path, np.uint8)
    header = int(bytes(intact).index(b"output_norm.weight"))
    rng, refused = np.random.default_rng(seed), 0
    for _ in range(150):
        damaged = intact.copy()
        places = rng.integers(0, header, rng.integers(1, 4))
        damaged[places] = rng.choice([0, 1, 255, rng.integers(256)], places.size)
        damaged.tofile(path)
        try:
            load_target(path)
        except CheckpointError:
            refused += 1
    assert refused > 10


def test_gguf_with_deeply_nested_arrays_is_refused(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path = tmp_path / "m.gguf"
    path.write_bytes(head + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 0))
    with pytest.raises(CheckpointError, match="damaged"):
        load_target(path)


@pytest.mark.parametrize(
    "name",
    ["alignment", "tokens", "token_type", "merges", "pre", "model", "eos_token_id", "bos_token_id", "chat_template"],
)
@pytest.mark.parametrize("value", [True, 0, 3.5, "x", [1], ["a"]], ids=repr)
def test_gguf_metadata_of_any_types_never_crashes(tmp_path: Path, target: Checkpoint, name: str, value: Any) -> None:
    tokens = list(json.loads(tokenizer_json())["model"]["vocab"])
    fields: dict[str, Any] = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "smollm"}
    fields |= {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [1] * len(tokens)}
    prefix = {"alignment": "general__", "chat_template": "tokenizer__"}.get(name, "tokenizer__ggml__")
    path = write_gguf(tmp_path / "m.gguf", target, **{**fields, prefix + name: value})
    with contextlib.suppress(CheckpointError):
        load_target(path)
