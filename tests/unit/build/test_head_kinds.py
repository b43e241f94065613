"""Every kind of sequential head, with and without its half of the confidence, goes through a build and drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from helpers import tiny_models

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.engine import load_engine
from trtllm_dspark.runtime import Request, SamplingParams, Session


@pytest.mark.parametrize("markov_head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [False, True], ids=["confidence_alone", "confidence_with_markov"])
def test_build_any_head_drafts_and_keeps_greedy_text(
    tiny_config: BuildConfig,
    tmp_path: Path,
    markov_head: Literal["none", "vanilla", "gated", "rnn"],
    with_markov: bool,
) -> None:
    drafter = tiny_models.write_drafter(
        tmp_path / "drafter", markov_head=markov_head, confidence_with_markov=with_markov
    )
    build_engine(replace(tiny_config, draft_checkpoint=str(drafter)))
    engine = load_engine(tiny_config.output_dir, num_threads=1)
    texts = []
    for mode in ("off", "threshold:0"):
        session = Session(engine, None, speculation=mode)
        session.add(Request("a", [5, 6, 7], SamplingParams(max_tokens=20)))
        tokens: list[int] = []
        while session.has_unfinished():
            for output in session.step():
                tokens += output.new_token_ids
        texts.append(tokens)
    assert session.stats.acceptance.drafted > 0
    assert texts[0] == texts[1]
    assert len(texts[0]) == 20
    engine.close()
