"""The console command itself: what every command shares."""

from __future__ import annotations

import errno
from typing import NoReturn

import pytest

from trtllm_dspark.cli import inspect
from trtllm_dspark.cli.main import main


def test_main_error_of_the_system_is_one_sentence_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", "model.gguf")

    monkeypatch.setattr(inspect, "run", refuse)
    assert main(["inspect", "--engine_dir", "e"]) == 4
    assert capsys.readouterr().err == "trtllm-dspark inspect: Permission denied: model.gguf\n"


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["dance"], 2)])
def test_main_without_a_known_command_returns_its_exit_code(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert "see trtllm-dspark --help" in captured.err if arguments == ["dance"] else "COMMAND --help" in captured.out
