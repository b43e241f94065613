"""What a running engine needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_RSS_MB = 700
SCRIPT = """
import resource, sys
from trtllm_dspark.runtime import Request, SamplingParams, Session

session = Session.open(sys.argv[1], num_threads=2, speculation="fixed:3")
for index in range(4):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    session.add(Request(str(index), [(index * 7 + position) % 4000 + 100 for position in range(1000)], params))
tokens = 0
while session.has_unfinished():
    tokens += sum(len(output.new_token_ids) for output in session.step())
print(tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_run_batch_of_four_with_a_thousand_tokens_stays_small(smollm2_engine_dir: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(smollm2_engine_dir)]
    tokens, rss_mb = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(tokens) == 4 * 24
    assert int(rss_mb) < MAX_RSS_MB
