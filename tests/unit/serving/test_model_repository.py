"""The checked-in repository is what the declaration generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_dspark.errors import UsageError
from trtllm_dspark.serving.contract import MODELS, TEXT_INPUTS, TOKEN_INPUTS
from trtllm_dspark.serving.model_repository import PLACEHOLDERS, write_repository

ROOT = Path(__file__).parents[3]


def tree(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def test_checked_in_repository_equals_the_declaration(tmp_path: Path) -> None:
    write_repository(tmp_path / "repository", PLACEHOLDERS)
    checked_in = tree(ROOT / "triton_server_repo")
    checked_in.pop("README.md", None)
    assert checked_in == tree(tmp_path / "repository")


def test_exactly_one_model_publishes_metrics() -> None:
    assert [spec.name for spec in MODELS if spec.publishes_metrics] == ["ensemble"]


@pytest.mark.parametrize("inputs", [TEXT_INPUTS, TOKEN_INPUTS])
def test_input_names_are_unique(inputs: tuple[object, ...]) -> None:
    names = [declared.name for declared in inputs]  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)


def test_write_repository_replaces_its_own_and_refuses_others(tmp_path: Path) -> None:
    write_repository(tmp_path / "mine", PLACEHOLDERS)
    write_repository(tmp_path / "mine", {**PLACEHOLDERS, "max_batch_size": "3"})
    assert "max_batch_size: 3" in (tmp_path / "mine" / "ensemble" / "config.pbtxt").read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        write_repository(tmp_path / "other", PLACEHOLDERS)
