"""Talk to the engine process of a running `trtllm-dspark serve`: find its socket, ask, wait for the answer."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trtllm_dspark.errors import DeviceError, UsageError
from trtllm_dspark.serving.framing import PROTOCOL_VERSION, BlockingConnection, Message, ProtocolError, check_hello
from trtllm_dspark.serving.leftovers import PREFIX

SOCKET_NAME = "engine.sock"
_ANSWER_S = 10.0


def find_socket(launcher_pid: int | None) -> str:
    """Return the socket of the running launcher, or of the one with that pid.

    Raises:
        UsageError: there is none, or there are several.
    """
    pattern = f"{PREFIX}_{'*' if launcher_pid is None else launcher_pid}_*/{SOCKET_NAME}"
    found = [path for path in sorted(Path(tempfile.gettempdir()).glob(pattern)) if _answers(str(path))]
    if len(found) == 1:
        return str(found[0])
    if not found:
        raise UsageError("no trtllm-dspark serve of this user is running here; start one, or name its --socket")
    pids = ", ".join(path.parent.name.removeprefix(f"{PREFIX}_").split("_")[0] for path in found)
    raise UsageError(f"several servers are running; choose one with --launcher_pid ({pids})")


class EngineControl:
    """One connection for questions that have one answer each.

    Args:
        socket_path: where the engine process listens.

    Raises:
        UsageError: nobody answers there.
    """

    def __init__(self, socket_path: str) -> None:
        try:
            self._connection = BlockingConnection(socket_path)
            self._connection.send(
                {
                    "type": "hello",
                    "protocol": PROTOCOL_VERSION,
                    "role": "control",
                    "name": "control",
                    "pid": os.getpid(),
                }
            )
            check_hello(self._connection.receive_one(timeout_s=_ANSWER_S), peer="the engine process")
        except (OSError, EOFError, ProtocolError) as error:
            raise UsageError(
                f"the engine process at {socket_path} does not answer ({error}); is it running?"
            ) from error

    def ask(self, message: Message) -> Message:
        """Send a message and return its answer.

        Raises:
            UsageError: the engine process refuses it.
            DeviceError: it has gone.
        """
        try:
            self._connection.send(message)
            answer = self._connection.receive_one(timeout_s=_ANSWER_S)
        except (OSError, EOFError, ProtocolError) as error:
            raise DeviceError(f"the engine process ended ({error}); the server's log says why") from error
        if "error" in answer:
            raise UsageError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def _answers(path: str) -> bool:
    try:
        BlockingConnection(path, timeout_s=1.0).close()
    except OSError:
        return False
    return True
