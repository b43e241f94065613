"""Every exception this package raises on purpose.

DsparkError
 ├─ UsageError               exit code 2: a flag, a file or a request is wrong
 │   ├─ ConfigError          a configuration value is out of range or contradicts another
 │   ├─ RequestError         one request is refused; others are not affected
 │   └─ ShapeError           an array has the wrong shape or dtype
 ├─ CheckpointError          exit code 3: a checkpoint cannot be read or does not fit the other one
 ├─ EngineError              exit code 3: an engine directory is missing, damaged or of another version
 │   └─ EngineMismatch       two engines, tables or libraries that do not belong together
 └─ DeviceError              exit code 4: the device or a library failed while running
     └─ NativeError          the C++ core refused its arguments or failed

Messages are one sentence: what failed, expected and got, and what to do. A client's own value stands in one as `shown`
spells it: what was sent may be megabytes, and a refusal has to fit a frame and a line of a log.
"""

from __future__ import annotations

import reprlib

_SHOWN = 80
_SHORT = reprlib.Repr()


class DsparkError(Exception):
    """Base of every error raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 4


class UsageError(DsparkError):
    """A flag, an input file or a request is wrong; the message says how to correct it."""

    exit_code = 2


class ConfigError(UsageError, ValueError):
    """A configuration value is out of range or contradicts another one."""


class RequestError(UsageError, ValueError):
    """One request is refused; other requests are not affected.

    Attributes:
        code: machine-readable reason, for example `prompt_too_long`.
    """

    def __init__(self, message: str, *, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class ShapeError(UsageError, ValueError):
    """An array has the wrong shape or dtype."""


class CheckpointError(DsparkError):
    """A checkpoint cannot be read, or target and drafter do not fit each other."""

    exit_code = 3


class EngineError(DsparkError):
    """An engine directory is missing, damaged or of another version."""

    exit_code = 3


class EngineMismatch(EngineError):
    """Two engines, tables or libraries do not belong together."""


class DeviceError(DsparkError):
    """The device, its driver or a runtime library failed."""

    exit_code = 4


class NativeError(DeviceError):
    """The C++ core refused its arguments or failed.

    Attributes:
        op: name of the core operation.
        code: the core's status code.
    """

    def __init__(self, message: str, *, op: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.op = op
        self.code = code


def shown(value: object) -> str:
    """Return a value as a message may show it: spelled as in Python, at most 80 characters of it."""
    if isinstance(value, str | bytes):
        # Before it is spelled out: an escape takes four characters and more.
        return cut(repr(value[: _SHOWN + 1]))
    try:
        return cut(_SHORT.repr(value))
    except ValueError:  # Python spells out no integers of thousands of digits
        return f"<{type(value).__name__}>"


def cut(text: str, *, length: int = _SHOWN) -> str:
    """Return the beginning of a text that holds what a client sent."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
