"""Policies on recorded blocks in virtual time: what they are worth without a machine's noise.

Usage: replay_policies.py --engine_dir E --prompts_file F.jsonl [F.jsonl ...] [--blocks B.json] [--max_prompts 24]
       [--policies off,fixed:1,fixed:2,fixed:3,fixed:5,adaptive] [--concurrency 1,2,4,8]

1. Generates from the prompts with every block verified in full and keeps each block's confidences and how many of its
drafts were right, by request; --blocks keeps them in a file, or takes them from there. 2. Replays random requests of a
domain, and of all domains mixed, under the serving controller in a closed loop: a round takes what the cost table says,
times a random factor of 10%; its drafts survive as recorded. A rate counts the rounds in which so many requests run.
A block of which less was verified than was right goes on where it was left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_dspark.cli._prompts import encode_prompt, read_prompts
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import FloatArray
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.runtime import Request, SamplingParams, Session, Tokenizer
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.config import SpeculationConfig
from trtllm_dspark.speculation.controller import RoundOutcome, SpeculationController
from trtllm_dspark.speculation.cost_table_file import read_cost_table

DEPTH = 128
NOISE = 0.1
FULL = "threshold:0.001"
Block = tuple[list[float], int]
"""Confidences of a block's drafts, and how many of them were right."""


@dataclass(slots=True)
class Replayed:
    """A request that runs along recorded blocks."""

    name: tuple[int, int]
    blocks: list[Block]
    limit: int
    tokens: int = 1
    place: int = 0
    taken: int = 0

    def block(self) -> tuple[FloatArray, int]:
        """Return confidences [gamma] and right drafts of the coming block, from where the last one was left."""
        confidences, right = self.blocks[self.place]
        row = np.array(confidences, np.float32)
        return np.concatenate([row[self.taken :], np.repeat(row[-1:], self.taken)]), right - self.taken

    def advance(self, verified: int) -> int:
        """Commit what a round gives and return its tokens."""
        right = self.blocks[self.place][1] - self.taken
        gained = min(verified, right) + 1
        if right > gained:
            self.taken += gained
        else:
            self.place, self.taken = (self.place + 1) % len(self.blocks), 0
        before, self.tokens = self.tokens, min(self.tokens + gained, self.limit)
        return self.tokens - before


def collect(engine_dir: Path, files: Sequence[Path], max_prompts: int, max_tokens: int) -> dict[str, list[list[Block]]]:
    """Return recorded blocks by domain and request."""
    directory = open_engine_dir(engine_dir, verify_hashes=False)
    engine, tokenizer = load_engine(engine_dir, verify_hashes=False), Tokenizer.open(directory)
    session = Session(engine, tokenizer, speculation=FULL)
    observe = session.controller.observe
    found: dict[str, dict[Hashable, list[Block]]] = {}

    def record(outcome: RoundOutcome) -> None:
        for row, request in enumerate(outcome.requests):
            if outcome.confidence is not None and outcome.verify_len[row] == session.controller.draft_len:
                block = outcome.confidence[row].tolist(), int(outcome.accepted[row])
                found[domain].setdefault(request, []).append(block)
        observe(outcome)

    session.controller.observe = record  # type: ignore[method-assign]
    prompts = [prompt for path in files for prompt in read_prompts(path)]
    for domain in dict.fromkeys(prompt.domain or "all" for prompt in prompts):
        found[domain] = {}
        mine = [encode_prompt(p, tokenizer, raw=False) for p in prompts if (p.domain or "all") == domain]
        mine = [ids for ids in mine if len(ids) + max_tokens < 1024]
        chosen = [mine[turn * len(mine) // max_prompts] for turn in range(min(max_prompts, len(mine)))]
        params = SamplingParams(max_tokens=max_tokens)
        requests = [Request(f"{domain}{index}", ids, params) for index, ids in enumerate(chosen)]
        for _ in run_closed_loop(session, requests, batch_size=engine.limits.max_batch_size):
            pass
    # Answers that ended at once teach nothing.
    return {name: [blocks for blocks in by.values() if len(blocks) >= 8] for name, by in found.items()}


def replay(controller: SpeculationController, queue: list[Replayed], users: int, table: CostTable, seed: int) -> float:
    """Return tokens a second of the rounds in which `users` requests run."""
    rng = np.random.default_rng(seed)
    running: list[Replayed] = []
    tokens, microseconds = 0, 0.0
    while True:
        while queue and len(running) < users:
            running.append(queue.pop(0))
        if len(running) < users:
            break
        names = [request.name for request in running]
        gamma = len(running[0].blocks[0][0])
        caps = np.array([max(0, min(gamma, r.limit - r.tokens - 1)) for r in running], np.int64)
        controller.limits()
        plan = controller.plan(names, caps=caps, token_budget=users * gamma, depth=DEPTH)
        blocks = [request.block() for request in running]
        lengths, confidence, draft_us = np.zeros(users, np.int64), None, None
        if plan.drafts:
            confidence = np.stack([row for row, _ in blocks]) if controller.needs_confidence else None
            lengths = controller.verify_lens(plan, names, caps=plan.caps, confidence=confidence, depth=DEPTH)
            rows = np.flatnonzero(plan.caps)
            draft_us = table.draft_time_us(int(rows[-1] - rows[0] + 1), depth=DEPTH)
        accepted = np.minimum(lengths, [right for _, right in blocks])
        factor = float(np.exp(NOISE * rng.normal()))
        verify_us = factor * float(table.step_time_us(users, users * (gamma + 1), depth=DEPTH)[users + lengths.sum()])
        draft_us = None if draft_us is None else factor * draft_us
        controller.observe(
            RoundOutcome(plan, names, DEPTH, lengths, accepted, confidence, plan.caps > 0, draft_us, verify_us)
        )
        microseconds += verify_us + (draft_us or 0.0)
        tokens += sum(request.advance(int(count)) for request, count in zip(running, lengths, strict=True))
        for request in [request for request in running if request.tokens >= request.limit]:
            running.remove(request)
            controller.forget(request.name)
    for request in running:
        controller.forget(request.name)
    return tokens / microseconds * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    parser.add_argument("--prompts_file", type=Path, nargs="+", required=True, help="prompts with a 'domain' each")
    parser.add_argument("--blocks", type=Path, help="recorded blocks; written where it does not exist")
    parser.add_argument("--max_prompts", type=int, default=24, help="of each domain")
    parser.add_argument("--max_tokens", type=int, default=100, help="of a recorded answer")
    parser.add_argument("--policies", default="off,fixed:1,fixed:2,fixed:3,fixed:5,adaptive")
    parser.add_argument("--concurrency", default="1,2,4,8")
    parser.add_argument("--output_tokens", type=int, default=60, help="of a replayed request")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.blocks and args.blocks.exists():
        recorded = json.loads(args.blocks.read_text(encoding="utf-8"))
    else:
        recorded = collect(args.engine_dir, args.prompts_file, args.max_prompts, args.max_tokens)
        if args.blocks:
            args.blocks.write_text(json.dumps(recorded), encoding="utf-8")
    stored = read_cost_table(open_engine_dir(args.engine_dir, verify_hashes=False))
    if stored is None:
        raise SystemExit(f"{args.engine_dir} has no cost table; run trtllm-dspark profile")
    table = stored.table
    gamma = len(next(iter(recorded.values()))[0][0][0])
    policies = args.policies.split(",")
    print(f"| domain, requests at once | {' | '.join(policies)} |\n|{'---|' * (len(policies) + 1)}")
    for domain in [*recorded, "mixed"]:
        pool = [blocks for name, all_blocks in recorded.items() if domain in (name, "mixed") for blocks in all_blocks]
        for users in map(int, args.concurrency.split(",")):
            rng = np.random.default_rng(users)
            turns = [rng.integers(len(pool), size=max(6, 3 * users)).tolist() for _ in range(args.repeats)]
            rates = {}
            for name in policies:
                mode = SpeculationConfig.parse(name)
                controller = SpeculationController(mode, max_draft_len=gamma, cost_table=table)
                found = []
                for turn, picked in enumerate(turns):
                    queue = [Replayed((turn, index), pool[i], args.output_tokens) for index, i in enumerate(picked)]
                    found.append(replay(controller, queue, users, table, turn))
                rates[name] = np.mean(found)
            shown = [f"{rates[name] / rates[policies[0]]:.3f}" for name in policies]
            print(f"| {domain}, {users} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
