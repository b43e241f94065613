"""Processes that end with their parent, and those whose interpreter is stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from trtllm_dspark.serving.children import process_state

ORPHAN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import time; from trtllm_dspark.serving.watchdog import exit_with_parent; exit_with_parent(); "
    "print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""
# A PyDLL call keeps the interpreter's lock, as a blocked native call of an extension does.
STUCK = """
import ctypes
from trtllm_dspark.serving.watchdog import exit_with_parent
exit_with_parent(stall_limit_s=1.0)
import time; time.sleep(0.2)
ctypes.PyDLL(None).sleep(60)
"""


def test_exit_with_parent_child_ends_after_its_parent() -> None:
    parent = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=30, check=True)
    pid = int(parent.stdout)
    deadline = time.monotonic() + 20.0
    while process_state(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_exit_with_parent_stalled_interpreter_is_ended() -> None:
    stuck = subprocess.run([sys.executable, "-c", STUCK], timeout=30, check=False)
    assert stuck.returncode == -signal.SIGALRM
