"""A random pair of models, once as an engine of the CPU and once as the graphs of a plugin engine, float32 both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helpers.fake_engine import collect_outputs, token_ids
from helpers.plugin_graph import Heads
from helpers.plugin_heads import CoreHeads
from helpers.plugin_rounds import PluginRounds, RoundRequest
from helpers.tiny_engine import SMALL, TinyEngine, make_engine, small_drafter
from trtllm_dspark.checkpoint.config import DrafterConfig, ModelConfig
from trtllm_dspark.engine._heads import load_heads
from trtllm_dspark.engine.onnxruntime import OnnxRuntimeEngine
from trtllm_dspark.graph import DrafterSource, RoundDrafter, RoundOptions, write_draft, write_heads, write_verify
from trtllm_dspark.graph.lowering import TrtPluginLowering, plugin_cache_length
from trtllm_dspark.runtime import Request, SamplingParams, Session

MAX_SEQ_LEN, MAX_TOKENS = 100, 64


@dataclass
class Pair:
    """The same random pair as a CPU engine and as plugin graphs, float32 both."""

    tiny: TinyEngine
    engine: OnnxRuntimeEngine
    rounds: PluginRounds

    def session(self, speculation: str, acceptance: Any) -> Session:
        return Session(self.engine, None, speculation=speculation, acceptance=acceptance)


def make_pair(
    directory: Path,
    target: ModelConfig = SMALL,
    drafter: DrafterConfig | None = None,
    options: RoundOptions | None = None,
    kept: np.ndarray | None = None,
    max_draft_len: int = 5,
    plugins: Heads | None = None,
) -> Pair:
    drafter, options = drafter or small_drafter(target), options or RoundOptions("rejection", "threshold")
    (directory / "cpu").mkdir()
    tiny = make_engine(
        directory / "cpu", target, drafter, max_seq_len=MAX_SEQ_LEN, draft_token_ids=kept, max_draft_len=max_draft_len
    )
    own = tiny.drafter_arrays
    assert own is not None
    path = write_heads(
        directory,
        drafter,
        own,
        vocab_size=target.vocab_size,
        draft_token_ids=kept,
        weight_dtype="int8" if options.int8_heads else "float32",
    )
    assert tiny.drafter is not None
    heads = load_heads(path, tiny.drafter, target.vocab_size)
    engine = OnnxRuntimeEngine(directory / "cpu", target, tiny.drafter, tiny.engine.limits, heads, num_threads=1)
    lowering = TrtPluginLowering(plugin_cache_length(MAX_SEQ_LEN, drafter.block_size), 4, "float32")
    written = write_verify(
        directory,
        target,
        tiny.arrays,
        max_seq_len=MAX_SEQ_LEN,
        lowering=lowering,
        options=options,
        drafter=RoundDrafter(drafter, own, lowering, max_draft_len, "float32", kept),
        weight_dtype="float32",
    )
    write_draft(
        directory,
        DrafterSource(drafter, own, target, tiny.arrays, written),
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=max_draft_len,
        max_num_tokens=MAX_TOKENS,
        lowering=lowering,
        options=options,
        draft_token_ids=kept,
        weight_dtype="float32",
    )
    return Pair(tiny, engine, PluginRounds(directory, plugins or CoreHeads()))


def requests(temperature: float = 0.0) -> list[RoundRequest]:
    """Three requests of different lengths; the last comes while the others decode."""
    random = np.random.default_rng(5)
    made = []
    for index, (length, count, slot) in enumerate(((9, 17, 2), (16, 9, 0), (4, 12, 3))):
        prompt = random.integers(0, SMALL.vocab_size, length)
        late = 2 if index == 2 else 0
        made.append(RoundRequest(prompt, count, slot, temperature=temperature, seed=100 + index, first_round=late))
    return made


def session_tokens(session: Session, wanted: list[RoundRequest]) -> list[list[int]]:
    for index, r in enumerate(wanted):
        params = SamplingParams(
            temperature=r.temperature, seed=r.seed, top_k=r.top_k, top_p=r.top_p, max_tokens=r.max_tokens
        )
        session.add(Request(str(index), r.prompt.tolist(), params))
    outputs = collect_outputs(session)
    return [token_ids(outputs[str(index)]) for index in range(len(wanted))]
