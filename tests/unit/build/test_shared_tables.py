"""A drafter that ships copies of its target's tables builds as one that ships none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from helpers import tiny_models

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.checkpoint.safetensors_io import read_file, write_file


def with_copies(target: Path, drafter: Path, names: tuple[str, str]) -> Path:
    tensors = {name: tensor.read() for name, tensor in read_file(drafter / "model.safetensors").items()}
    theirs = read_file(target / "model.safetensors")
    tensors["embed_tokens.weight"] = theirs[names[0]].read()
    tensors["lm_head.weight"] = theirs[names[1]].read()
    copy = drafter.with_name("copies")
    copy.mkdir()
    (copy / "config.json").write_text((drafter / "config.json").read_text())
    write_file(copy / "model.safetensors", tensors)
    return copy


def test_copies_of_the_tables_are_stored_once(tiny_config: BuildConfig, tmp_path: Path) -> None:
    target, drafter = tiny_models.write_target(tmp_path / "t"), tiny_models.write_drafter(tmp_path / "d")
    tied = json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    copies = with_copies(target, drafter, ("model.embed_tokens.weight", head))
    sizes = []
    for name, path in (("one", drafter), ("two", copies)):
        config = replace(
            tiny_config, target_checkpoint=str(target), draft_checkpoint=str(path), output_dir=tmp_path / name
        )
        files = {entry.name: entry.sha256 for entry in build_engine(config).manifest.files}
        sizes.append({name: files[name] for name in files if name.startswith("drafter")})
    assert sizes[0] == sizes[1]
