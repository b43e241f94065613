"""Process of the OpenAI-compatible front; `trtllm-dspark serve --openai_port` starts it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trtllm_dspark.serving.client import EngineClient
from trtllm_dspark.serving.watchdog import exit_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; open streams finish first."""
    parser = argparse.ArgumentParser(prog="trtllm_dspark.serving.openai_front", allow_abbrev=False)
    parser.add_argument("--socket", required=True, help="Unix socket of the engine process")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drain_timeout", type=int, default=30)
    parser.add_argument("--parent_pid", type=int, help="end when this parent is gone")
    args = parser.parse_args(argv)
    if args.parent_pid is not None:
        exit_with_parent(args.parent_pid)
    import uvicorn

    from trtllm_dspark.serving.openai_front.app import OpenAIFront

    client = EngineClient(args.socket, name="openai", role="front")
    client.start()
    uvicorn.run(
        OpenAIFront(client).application(),
        host=args.host,
        port=args.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=args.drain_timeout,
    )
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
