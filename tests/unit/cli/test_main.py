"""The console command itself: what every command shares."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import subprocess
import sys
from typing import NoReturn

import pytest

from trtllm_dspark.cli import inspect
from trtllm_dspark.cli.main import COMMANDS, main


def test_main_error_of_the_system_is_one_sentence_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", "model.gguf")

    monkeypatch.setattr(inspect, "run", refuse)
    assert main(["inspect", "--engine_dir", "e"]) == 4
    assert capsys.readouterr().err == "trtllm-dspark inspect: Permission denied: model.gguf\n"


def test_main_out_of_memory_is_one_sentence_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhaust(args: object) -> NoReturn:
        raise MemoryError("2 TiB")

    monkeypatch.setattr(inspect, "run", exhaust)
    assert main(["inspect", "--engine_dir", "e"]) == 4
    assert capsys.readouterr().err.startswith("trtllm-dspark inspect: not enough memory (2 TiB); ")


@pytest.mark.parametrize("redirect", ["", ">&-"], ids=["ascii", "closed"])
def test_main_output_needs_neither_a_utf8_locale_nor_an_open_stdout(redirect: str) -> None:
    script = (
        "import sys; from trtllm_dspark.cli import inspect, main; inspect.run = lambda args: print('\\u20ac') or 0\n"
    )
    script += "sys.exit(main.main(['inspect', '--engine_dir', 'e']) or sys.stdout.write('\\udcff') - 1)"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {redirect}', sys.executable, script],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"" if redirect else "\u20ac\n".encode() + b"\xff")


@pytest.mark.parametrize("command", COMMANDS)
def test_main_every_option_of_every_command_says_what_it_is(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    assert [action.option_strings for action in parser._actions if not action.help] == []
    # What --help prints: a percent sign in a text, for one, would break it.
    assert parser.format_help()


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["dance"], 2)])
def test_main_without_a_known_command_returns_its_exit_code(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert "see trtllm-dspark --help" in captured.err if arguments == ["dance"] else "COMMAND --help" in captured.out
