"""Stream the demo's prompts from a running server and compare speculation with plain decoding, request by request.

Usage: stream_completions.py URL PROMPTS_FILE [MAX_TOKENS]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "ensemble"
REPETITIONS = 3


@dataclass(frozen=True)
class Completion:
    """One streamed answer and what the server said about it."""

    text: str
    num_tokens: int
    accepted_len: float
    tokens_per_s: float


def events(url: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of one `generate_stream` request."""
    request = urllib.request.Request(
        f"{url}/v2/models/{MODEL}/generate_stream",
        json.dumps(fields).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    raise SystemExit(f"the server refused the request: {event['error']}")
                yield event


def complete(url: str, prompt: str, max_tokens: int, *, speculate: bool, show: bool = False) -> Completion:
    """Stream one greedy completion; `show` prints the text as it comes."""
    fields = {
        "text_input": prompt,
        "apply_chat_template": True,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "exclude_input_in_output": True,
        "return_perf_metrics": True,
        "return_num_output_tokens": True,
    }
    if not speculate:
        fields["num_draft_tokens"] = 0
    text, num_tokens, accepted_len = "", 0, 1.0
    start = time.monotonic()
    for event in events(url, fields):
        text += event["text_output"]
        num_tokens += int(event["num_output_tokens"])
        accepted_len = float(event["accepted_len"])
        if show:
            print(event["text_output"], end="", flush=True)
    seconds = time.monotonic() - start
    return Completion(text, num_tokens, accepted_len, num_tokens / seconds)


def compare(url: str, domain: str, prompt: str, max_tokens: int) -> None:
    """Print one streamed completion, then how fast it is against plain decoding."""
    print(f"\n== {domain}: {prompt}\n")
    shown = complete(url, prompt, max_tokens, speculate=True, show=True)
    fast, plain = [], []
    for _ in range(REPETITIONS):
        for speculate, rates in ((False, plain), (True, fast)):
            again = complete(url, prompt, max_tokens, speculate=speculate)
            if again.text != shown.text:
                raise SystemExit(f"the text differs {'with' if speculate else 'without'} speculation: {again.text!r}")
            rates.append(again.tokens_per_s)
    ratio = statistics.median(a / b for a, b in zip(fast, plain, strict=True))
    print(
        f"\n\n-- {domain}: {shown.num_tokens} tokens, accepted length {shown.accepted_len:.2f}, "
        f"{statistics.median(fast):.0f} tokens/s, {ratio:.2f}x of --speculation off "
        f"({statistics.median(plain):.0f} tokens/s), medians of {REPETITIONS} pairs, same text"
    )


def main(arguments: list[str]) -> None:
    """Complete the first prompt of each domain."""
    url, path = arguments[:2]
    max_tokens = int(arguments[2]) if len(arguments) > 2 else 128
    first: dict[str, str] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            prompt = json.loads(line)
            first.setdefault(prompt["domain"], prompt["prompt"])
    for domain, text in first.items():
        compare(url, domain, text, max_tokens)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the server refused the request: {error.read().decode()}") from error
    except urllib.error.URLError as error:
        raise SystemExit(f"no answer from the server: {error}") from error
