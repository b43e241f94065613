"""Run as a script: ask the kernel for SIGTERM when the parent ends, then become the given command.

Usage: python -I -S tie_to_parent.py PARENT_PID COMMAND [ARGUMENT...]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie and exec."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended between the fork and the call above
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
