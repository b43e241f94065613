"""The one console command, `trtllm-dspark`."""

from __future__ import annotations

import argparse
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
    "serve": ("trtllm_dspark.cli.serve", "package a Triton model repository and start the server"),
    "build_plugins": ("trtllm_dspark.cli.build_plugins", "compile the CUDA kernels and the TensorRT plugin library"),
    "inspect": ("trtllm_dspark.cli.inspect", "print what an engine directory holds"),
    "load_report": ("trtllm_dspark.cli.load_report", "print what the load of the GPU would change now"),
}


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence on stderr and exit code 2, without the usage dump."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


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


def _prepare_stdout() -> None:
    """Let stdout take any text, also a closed one: UTF-8 whatever the locale, names of files as their own bytes."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 ok, 2 usage, 3 checkpoint or engine, 4 device or runtime."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_stdout()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("trtllm-dspark"))
        return 0
    if arguments[0] not in COMMANDS:
        print(f"trtllm-dspark: unknown command '{arguments[0]}'; see trtllm-dspark --help", file=sys.stderr)
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
        return int(module.run(args))
    except DsparkError as error:
        print(f"trtllm-dspark {name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`): point stdout at nothing, so that interpreter exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 4
    except OSError as error:
        # Whatever the system refuses where no message of ours fits better: a file that may not be read, a full disk.
        where = "" if error.filename is None else f": {error.filename}"
        print(f"trtllm-dspark {name}: {error.strerror or error}{where}", file=sys.stderr)
        return 4
    except MemoryError as error:
        print(f"trtllm-dspark {name}: not enough memory ({error}); free some or lower the limits", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        print(f"trtllm-dspark {name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
