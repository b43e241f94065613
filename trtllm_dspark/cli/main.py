"""The one console command, `trtllm-dspark`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from trtllm_dspark.errors import DsparkError

# name -> (module, one-line help). A module offers add_arguments(parser) and run(args) -> exit code; it is imported only
# when its command is named, so that `--help` stays instant and optional dependencies stay optional.
COMMANDS: dict[str, tuple[str, str]] = {
    "build": ("trtllm_dspark.cli.build", "compile a target and its drafter into an engine directory"),
    "run": ("trtllm_dspark.cli.run", "generate text from prompts"),
    "bench": ("trtllm_dspark.cli.bench", "compare speculation modes on the same prompts"),
    "profile": ("trtllm_dspark.cli.profile", "measure what the engine's passes cost"),
    "eval": ("trtllm_dspark.cli.eval", "measure the drafter's acceptance and confidence on prompts"),
    "train": ("trtllm_dspark.cli.train", "make a drafter for a target from the target alone"),
    "calibrate": ("trtllm_dspark.cli.calibrate", "fit the confidence head's calibration on prompts"),
    "simulate": ("trtllm_dspark.cli.simulate", "foretell what a server does under a load, from its table of times"),
    "serve": ("trtllm_dspark.cli.serve", "package a Triton model repository and start the server"),
    "swap": ("trtllm_dspark.cli.swap", "try another drafter in a running server; the better one stays"),
    "collect": ("trtllm_dspark.cli.collect", "report, check or delete what serve --collect_dir recorded"),
    "build_plugins": ("trtllm_dspark.cli.build_plugins", "compile the CUDA kernels and the TensorRT plugin library"),
    "inspect": ("trtllm_dspark.cli.inspect", "print what an engine directory holds"),
    "load_report": ("trtllm_dspark.cli.load_report", "print what the load of the GPU would change now"),
}


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence on stderr and exit code 2, without the usage dump."""

    def error(self, message: str) -> NoReturn:
        # Not by `exit`: that of Python 3.11.2 fails where stderr cannot be written.
        _complain(f"{self.prog}: {message}; see {self.prog} --help")
        sys.exit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows a default only where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def _help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: trtllm-dspark COMMAND [flags]\n\n" + "\n".join(lines) + "\n\nCOMMAND --help explains its flags.\n"


def _prepare_streams() -> None:
    """Let stdout take any text (UTF-8 in any locale, names of files as their own bytes) and closed streams anything."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")


def _complain(sentence: str) -> None:
    """Write one line to stderr; a log that cannot be written changes nothing else."""
    with contextlib.suppress(OSError):
        print(sentence, file=sys.stderr)


def _drop_unwritable_streams() -> None:
    """Point streams that cannot be written (full disk, closed pipe) at nothing: exit would turn any code into 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 ok; 1 `swap`: not promoted, `train`: stopped before all prompts were answered; 2 usage; 3 checkpoint or engine;
    4 device or runtime; 130 interrupted.
    """
    try:
        return _run(argv)
    finally:
        _drop_unwritable_streams()


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("trtllm-dspark"))
        return 0
    if arguments[0] not in COMMANDS:
        _complain(f"trtllm-dspark: unknown command '{arguments[0]}'; see trtllm-dspark --help")
        return 2
    name = arguments[0]
    parser = _Parser(
        prog=f"trtllm-dspark {name}",
        description=COMMANDS[name][1],
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "--log_level", default="info", choices=("debug", "info", "warning", "error"), help="verbosity of the log"
    )
    try:
        module = importlib.import_module(COMMANDS[name][0])
        module.add_arguments(parser)
        args = parser.parse_args(arguments[1:])
        log_format = "%(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=args.log_level.upper(), stream=sys.stderr, format=log_format)
        code = int(module.run(args))
        sys.stdout.flush()
        return code
    except DsparkError as error:
        _complain(f"trtllm-dspark {name}: {error}")
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`).
        return 4
    except OSError as error:
        # Whatever the system refuses where no message of ours fits better: a file that may not be read, a full disk.
        where = "" if error.filename is None else f": {error.filename}"
        _complain(f"trtllm-dspark {name}: {error.strerror or error}{where}")
        return 4
    except MemoryError as error:
        _complain(f"trtllm-dspark {name}: not enough memory ({error}); free some or lower the limits")
        return 4
    except KeyboardInterrupt:
        _complain(f"trtllm-dspark {name}: interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
