"""Check one library of changed kernels, in a process of its own: what a wrong kernel writes must not reach the tests.

    python -m helpers.kernels.mutant LIBRARY

Exit code 0 when a check fails, as it should, and 1 when nothing notices.
"""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.kernels.attention import AttentionShape
from helpers.kernels.backends import SimtBackend
from helpers.kernels.checks import check_attention, check_round
from helpers.kernels.round_cases import RoundShape
from trtllm_dspark.errors import NativeError

ORDERS = (0, 1, 7)
ROUND = RoundShape(num_requests=7, vocab=1300, filters=False)
ATTENTION = AttentionShape(tokens=(9, 3, 30), contexts=(5, 0, 130), kv_split=256)


def is_noticed(library: Path) -> bool:
    """Run the checks in several orders of threads until one fails."""
    for order in ORDERS:
        backend = SimtBackend(library, order)
        try:
            check_round(backend, ROUND)
            check_attention(backend, ATTENTION)
        except (AssertionError, NativeError) as error:
            print(f"noticed: {error}")
            return True
        finally:
            backend.close()
    return False


if __name__ == "__main__":
    sys.exit(0 if is_noticed(Path(sys.argv[1])) else 1)
