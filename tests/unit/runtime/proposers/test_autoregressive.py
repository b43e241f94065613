"""Sessions whose drafter drafts token after token: same tokens as plain decoding, pairs without a slip."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.fake_draft_head import AutoregressiveFake
from helpers.fake_engine import VOCAB, collect_outputs, greedy, next_token, token_ids

from trtllm_dspark import _core
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.runtime.proposers import AutoregressiveProposer
from trtllm_dspark.speculation import Calibration
from trtllm_dspark.speculation.cost_table import CostTable, VerifyShape

MODES = ["fixed", "fixed:2", "threshold:0.3", "stale_topk:3", "adaptive"]


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 17 + index * 5) % VOCAB for index in range(length)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_num_tokens", [32, 21])
def test_mixed_traffic_every_request_equals_itself_alone(mode: str, max_num_tokens: int) -> None:
    session = Session(AutoregressiveFake(max_num_tokens=max_num_tokens), None, speculation=mode)
    wanted = {}
    for index in range(16):
        length, count = 1 + index * 7 % 40, 1 + index * 5 % 33
        params = SamplingParams(
            max_tokens=count, speculation=index % 3 != 0, max_draft_len=None if index % 2 else index % 5
        )
        wanted[str(index)] = greedy(prompt(index, length), count)
        session.add(Request(str(index), prompt(index, length), params))
    outputs = collect_outputs(session)
    assert {name: token_ids(rows) for name, rows in outputs.items()} == wanted


@pytest.mark.parametrize("batch", [1, 3])
def test_drafter_equal_to_the_target_has_every_draft_accepted(batch: int) -> None:
    engine = AutoregressiveFake(mistake_every=0)
    session = Session(engine, None, speculation="fixed")
    for index in range(batch):
        session.add(Request(str(index), prompt(index, 7 + index), SamplingParams(max_tokens=31)))
    outputs = collect_outputs(session)
    assert all(token_ids(outputs[str(i)]) == greedy(prompt(i, 7 + i), 31) for i in range(batch))
    stats = session.stats.acceptance
    assert stats.accepted == stats.verified > 0
    assert stats.rounds == batch * 30 / 5


def test_requests_that_move_and_end_keep_their_pairs() -> None:
    engine = AutoregressiveFake(mistake_every=0)
    session = Session(engine, None, speculation="fixed:3")
    for index, count in enumerate((3, 40, 9, 25, 30, 12)):
        session.add(Request(str(index), prompt(index, 4), SamplingParams(max_tokens=count)))
    collect_outputs(session)
    assert "copy" in engine.passes
    assert session.stats.acceptance.accepted == session.stats.acceptance.verified


def test_drafts_run_to_the_end_of_the_slot() -> None:
    session = Session(AutoregressiveFake(max_seq_len=24), None, speculation="fixed")
    session.add(Request("a", prompt(1, 3), SamplingParams(max_tokens=21)))
    assert token_ids(collect_outputs(session)["a"]) == greedy(prompt(1, 3), 21)


def test_draft_logits_that_are_no_numbers_are_not_verified() -> None:
    session = Session(AutoregressiveFake(nan_draft=5), None, speculation="fixed")
    session.add(Request("bad", [5, 1], SamplingParams(max_tokens=9)))
    session.add(Request("good", [6, 1], SamplingParams(max_tokens=9)))
    outputs = collect_outputs(session)
    assert token_ids(outputs["bad"]) == greedy([5, 1], 9)
    assert token_ids(outputs["good"]) == greedy([6, 1], 9)
    assert outputs["bad"][-1].stats.acceptance.verified == 0 < outputs["good"][-1].stats.acceptance.verified


def test_fewer_steps_than_the_block_are_run_where_fewer_can_be_verified() -> None:
    engine = AutoregressiveFake(mistake_every=0)
    session = Session(engine, None, speculation="fixed")
    session.add(Request("a", prompt(1, 3), SamplingParams(max_tokens=4)))
    collect_outputs(session)
    # The first token comes with the prompt; the round behind it emits three, two of them drafts.
    assert engine.passes.count("step") == 2


def test_calibration_is_applied_and_taken_back() -> None:
    seen = []

    class Recorder:
        def arrays(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
            return np.full(num_positions, 2.0, np.float32), np.full(num_positions, -0.5, np.float32)

        def observe(self, confidence: np.ndarray, verify_len: np.ndarray, accepted: np.ndarray) -> None:
            seen.append(confidence)

    engine = AutoregressiveFake(draft_logit=4.0)
    session = Session(engine, None, speculation="threshold:0.05", calibration=Recorder())
    session.add(Request("a", prompt(1, 3), SamplingParams(max_tokens=20)))
    assert token_ids(collect_outputs(session)["a"]) == greedy(prompt(1, 3), 20)
    probability = np.exp(4.0) / (np.exp(4.0) + VOCAB - 1)
    np.testing.assert_allclose(seen[0][:, :2], probability, rtol=1e-4)


def test_stored_calibration_is_taken() -> None:
    session = Session(AutoregressiveFake(), None, speculation="threshold:0.3", calibration=Calibration.identity(4))
    session.add(Request("a", prompt(2, 5), SamplingParams(max_tokens=20)))
    assert token_ids(collect_outputs(session)["a"]) == greedy(prompt(2, 5), 20)


def test_costs_are_those_of_the_steps() -> None:
    engine = AutoregressiveFake()
    session = Session(engine, None, speculation="fixed")
    assert isinstance(session._proposer, AutoregressiveProposer)
    table = CostTable({VerifyShape(1, 1, 1, depth): 9.0 for depth in (8, 64)}, {})
    timed = session._proposer.costs(table)
    assert timed.verify_us == table.verify_us
    assert {shape.depth for shape in timed.draft_us} == {8, 64}
    assert min(timed.draft_us.values()) > 0


@pytest.mark.parametrize(
    ("acceptance", "mode"), [("rejection", "fixed:2"), ("rejection", "threshold:0.15"), ("coupled", "fixed:2")]
)
def test_sampled_output_follows_the_target(acceptance: str, mode: str) -> None:
    """Chi-square of the second and third token against the target's law: its favourite, the drafter's, any other."""
    logit = 4.0
    # Every second draft is of another token than the target's favourite, and both laws are spread.
    engine = AutoregressiveFake(max_batch_size=8, max_num_tokens=96, logit=logit, draft_logit=3.0, mistake_every=2)
    session = Session(engine, None, speculation=mode, acceptance=acceptance)  # type: ignore[arg-type]
    start = prompt(3, 4)
    for seed in range(2000):
        session.add(Request(str(seed), start, SamplingParams(max_tokens=4, temperature=1.0, seed=seed)))
    counts = np.zeros((2, 3))
    for outputs in collect_outputs(session, max_rounds=10_000).values():
        tokens = token_ids(outputs)
        for place in (1, 2):
            favourite = next_token([*start, *tokens[:place]])
            kind = 0 if tokens[place] == favourite else 1 if tokens[place] == (favourite + 1) % VOCAB else 2
            counts[place - 1, kind] += 1
    stats = session.stats.acceptance
    assert 0.1 < stats.accepted / stats.verified < 0.9
    weights = np.array([np.exp(logit), 1.0, VOCAB - 2.0])
    expected = 2000 * weights / weights.sum()
    # 0.9995 quantile of two degrees of freedom, for each of the two tokens.
    assert (((counts - expected) ** 2 / expected).sum(1) < 15.2).all()


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_tokens_drawn_one_by_one_are_those_drawn_together(acceptance: str) -> None:
    """What the proposer relies on: drawing one more leaves those before as they were."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 4, VOCAB)).astype(np.float32) * 2
    heads = _core.DraftHeads(vocab_size=VOCAB, draft_vocab_size=VOCAB, kind="none")
    sampling = _core.Sampling(np.full(5, 0.8, np.float32), np.arange(5, dtype=np.uint64))
    anchors, positions = np.zeros(5, np.int64), np.arange(5, dtype=np.int64) + 3
    together = _core.draft_chain(heads, logits, anchors, positions, sampling, acceptance=acceptance).tokens
    for count in range(1, 5):
        part = np.ascontiguousarray(logits[:, :count])
        alone = _core.draft_chain(heads, part, anchors, positions, sampling, acceptance=acceptance)
        np.testing.assert_array_equal(alone.tokens, together[:, :count])
