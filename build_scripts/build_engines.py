"""Build engines from a checkout: the flags of `trtllm-dspark build`, see --help."""

from __future__ import annotations

import sys

from trtllm_dspark.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
