import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import write_drafter, write_target
from helpers.toy_tokenizer import tokenizer_json

from trtllm_dspark.checkpoint import load_drafter, load_target, resolve_path
from trtllm_dspark.checkpoint.paths import find_models
from trtllm_dspark.errors import CheckpointError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "toy_models_package"
    root.mkdir()
    (root / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def test_resolve_package_with_one_model_finds_it_without_import(package: Path) -> None:
    (package / "data").mkdir()
    (package / "data" / "model.gguf").write_bytes(b"")
    assert resolve_path("package:toy_models_package") == package / "data" / "model.gguf"
    (package / "data" / "model.gguf").unlink()
    write_target(package / "data")
    assert resolve_path("package:toy_models_package") == package / "data"
    assert load_target("package:toy_models_package/data").config.num_layers == 4


def test_resolve_package_with_two_models_lists_them(package: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (package / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds a\.gguf, b\.gguf; name one as package:toy_models_package/FILE"):
        resolve_path("package:toy_models_package")
    assert resolve_path("package:toy_models_package/b.gguf") == package / "b.gguf"
    with pytest.raises(CheckpointError, match=r"has no c\.gguf"):
        resolve_path("package:toy_models_package/c.gguf")


def test_find_models_leaves_out_directories_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "gone"):
        write_target(tmp_path / name)
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert find_models(tmp_path) == [tmp_path / "here"]


@pytest.mark.parametrize("name", ["no_such_package_here", "os.path", "", "json"])
def test_resolve_package_without_model_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="install it|holds none"):
        resolve_path(f"package:{name}")


def test_load_from_wrong_places_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json; pass a Hugging Face directory"):
        load_target(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no config\.json; pass .*m\.gguf"):
        load_target(tmp_path)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load_target(tmp_path / "m.gguf")
    target = write_target(tmp_path / "target")
    with pytest.raises(CheckpointError, match="pass its directory"):
        load_target(target / "model.safetensors")
    config = load_target(target).config
    with pytest.raises(CheckpointError, match="pass the drafter's directory"):
        load_drafter(write_drafter(tmp_path / "drafter") / "model.safetensors", config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_drafter(tmp_path / "empty", config)


def test_checkpoint_files_are_configuration_and_weights(tmp_path: Path) -> None:
    write_target(tmp_path, num_shards=2)
    # Engines hold these as they are used and hash them there: they do not say which weights an engine has.
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    files = load_target(tmp_path).files
    assert [file.name for file in files] == [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    for file in files:
        raw = (tmp_path / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
