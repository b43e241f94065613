"""The target in PyTorch answers as an engine does, and captures what an engine would."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import write_target
from helpers.training import small_config, write_prompts

from trtllm_dspark.checkpoint import load_target
from trtllm_dspark.cli.main import main
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.reference.models import target_forward
from trtllm_dspark.runtime import Request, SamplingParams
from trtllm_dspark.train.answer import Answer, SessionAnswerer
from trtllm_dspark.train.features import Capturer, expand
from trtllm_dspark.train.generate import GenerationConfig, UserTurn, generate
from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import Response, read_responses
from trtllm_dspark.train.torch_answer import TorchAnswerer
from trtllm_dspark.train.torch_target import Slots, TorchTarget

LAYERS = (0, 2)


def answerer_of(config: TrainConfig, **changes: Any) -> TorchAnswerer:
    answerer = Preparation(replace(config, **changes)).answerer(8)
    assert isinstance(answerer, TorchAnswerer)
    return answerer


def requests(number: int, *, temperature: float = 0.0, max_tokens: int = 20) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(
            str(index),
            rng.integers(4, 256, rng.integers(1, 40)).tolist(),
            SamplingParams(temperature=temperature, seed=index, max_tokens=max_tokens),
        )
        for index in range(number)
    ]


def answers(answerer: TorchAnswerer, asked: list[Request], batch_size: int = 5, keep: bool = True) -> list[Answer]:
    found = list(answerer.answers(asked, batch_size, stop=lambda: False, keep_features=keep))
    return sorted(found, key=lambda answer: answer.index)


@pytest.mark.parametrize(
    "shape",
    [
        {"architecture": "llama", "tie_word_embeddings": True},
        {"architecture": "qwen3", "tie_word_embeddings": False},
        {"architecture": "llama", "attention_bias": True},
        {
            "architecture": "llama",
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
)
def test_passes_equal_the_reference(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Prompts of different lengths at once, then token after token, with a slot left empty.

    float32 sums in another order: 1e-4 is a hundred times what a layer's rounding leaves.
    """
    checkpoint = load_target(write_target(tmp_path / "t", vocab_size=256, **shape))
    target = TorchTarget(checkpoint.config, checkpoint.arrays, LAYERS, 64, bfloat16=False)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 256, length).tolist() for length in (9, 30, 4)]
    places, starts = [4, 0, 2], [3, 26, 1]
    slots = Slots(target, 5, 64)
    logits, features = slots.begin(places, [ids[:start] for ids, start in zip(sequences, starts, strict=True)])
    got_logits, got_features = [[row] for row in logits], [[rows] for rows in features]
    ids, lengths = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    for step in range(3):
        for place, tokens, start in zip(places, sequences, starts, strict=True):
            ids[place], lengths[place] = tokens[start + step], start + step
        logits, rows = slots.extend(ids, lengths)
        for number, place in enumerate(places):
            got_logits[number].append(logits[place])
            got_features[number].append(rows[place : place + 1])
    for number, (tokens, start) in enumerate(zip(sequences, starts, strict=True)):
        out = target_forward(checkpoint.config, checkpoint.arrays, tokens[: start + 3], feature_layer_ids=LAYERS)
        np.testing.assert_allclose(torch.stack(got_logits[number]), out.logits[start - 1 :], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(torch.cat(got_features[number]), out.features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft_ids", [None, np.arange(1, 256, 3)])
def test_answers_and_features_are_an_engines(config: TrainConfig, draft_ids: np.ndarray | None) -> None:
    preparation = Preparation(replace(config, top_k=10))
    preparation.draft_token_ids = draft_ids
    answerer = preparation.answerer(4)
    assert isinstance(answerer, TorchAnswerer)
    found = answers(answerer, requests(11))
    session = preparation.feature_target.session(max_batch_size=4, num_threads=1)
    capturer = Capturer(
        preparation.feature_target.open(max_batch_size=2, num_threads=1), draft_ids, preparation.config.top_k
    )
    for answer in found:
        prompt = answer.request.prompt_token_ids
        session.add(answer.request)
        expected = []
        while session.has_unfinished():
            for output in session.step():
                expected += output.new_token_ids
        assert answer.token_ids == expected
        assert answer.captured is not None
        same = capturer.capture(Response("", 0.0, len(prompt), (*prompt, *expected)))
        np.testing.assert_allclose(expand(answer.captured), expand(same), rtol=2e-3, atol=1e-3)
        np.testing.assert_array_equal(answer.captured.top_ids, same.top_ids)
        np.testing.assert_allclose(answer.captured.top_probs, same.top_probs, rtol=2e-3, atol=1e-6)
    session.close()


def test_answers_end_as_a_sessions_do(config: TrainConfig) -> None:
    """At an end token, at the request's tokens, and where the slot is full."""
    answerer = answerer_of(config)
    long = [Request("0", list(range(4, 60)), SamplingParams(max_tokens=500))]
    (full,) = answers(answerer, long)
    session = SessionAnswerer(Preparation(config).feature_target.session(max_batch_size=1, num_threads=1))
    (expected,) = session.answers(long, 1, stop=lambda: False, keep_features=False)
    session.close()
    assert full.token_ids == expected.token_ids
    assert len(full.token_ids) == config.max_seq_len - 56, "it ends where the slot does"
    reasons: Counter[str] = Counter()
    for answer in answers(answerer, requests(60, temperature=1.5, max_tokens=15), keep=False):
        ended = answer.token_ids[-1] in answerer.tokenizer.eos_token_ids
        assert ended or len(answer.token_ids) == 15
        assert not set(answer.token_ids[:-1]) & set(answerer.tokenizer.eos_token_ids)
        assert answer.captured is None
        reasons["stop" if ended else "length"] += 1
    assert len(reasons) == 2


def test_tokens_are_drawn_from_the_targets_distribution(config: TrainConfig, target_dir: Path) -> None:
    answerer = answerer_of(config)
    prompt, number = [5, 6, 7], 4000
    asked = [
        Request(str(seed), prompt, SamplingParams(temperature=0.7, seed=seed, max_tokens=1)) for seed in range(number)
    ]
    counts = np.bincount([answer.token_ids[0] for answer in answers(answerer, asked, 64, keep=False)], minlength=256)
    assert counts.sum() == number
    checkpoint = load_target(target_dir)
    logits = target_forward(checkpoint.config, checkpoint.arrays, prompt).logits[-1] / 0.7
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    likely = probs > 5 / number
    rest = number * probs[~likely].sum()
    chi2 = (((counts - number * probs) ** 2) / (number * probs))[likely].sum()
    chi2 += (counts[~likely].sum() - rest) ** 2 / rest
    degrees = int(likely.sum())
    # The seeds are fixed, so it passes or fails always; five deviations leave room for other seeds.
    assert abs(chi2 - degrees) < 5 * np.sqrt(2 * degrees)


def test_draws_follow_from_seed_whatever_the_batch_and_threads(config: TrainConfig) -> None:
    asked = requests(9, temperature=1.0)
    alone = [answer.token_ids for answer in answers(answerer_of(config, num_threads=1), asked, 1)]
    together = [answer.token_ids for answer in answers(answerer_of(config, num_threads=3), asked, 9)]
    assert alone == together


def test_bfloat16_is_near_and_says_so_in_the_files(config: TrainConfig, tmp_path: Path) -> None:
    asked = requests(6, max_tokens=2)
    exact, near = (answers(answerer_of(config, weight_dtype=dtype), asked) for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, near, strict=True):
        assert one.captured is not None
        assert other.captured is not None
        rows = len(one.request.prompt_token_ids)
        first, second = expand(one.captured)[:rows], expand(other.captured)[:rows]
        # Eight bits a product, some ten products deep.
        assert 0 < np.abs(first - second).max() < 0.1 * np.abs(first).max()
    names = {Preparation(replace(config, weight_dtype=dtype)).answered_by for dtype in ("float32", "bfloat16", "int8")}
    assert len(names) == 3
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16", "the switch is back where it was"


def test_a_failing_thread_ends_the_generation(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(Slots, "extend", fails)
    with pytest.raises(MemoryError, match="no more"):
        answers(answerer_of(config, num_threads=2), requests(5))


def test_stop_drops_what_has_not_ended(config: TrainConfig) -> None:
    seen: list[Answer] = []
    asked = requests(40)
    for answer in answerer_of(config).answers(asked, 2, stop=lambda: bool(seen), keep_features=False):
        seen.append(answer)
    assert 0 < len(seen) < 40


def test_a_stop_before_the_first_pass_answers_nothing(config: TrainConfig) -> None:
    asked = requests(20, max_tokens=1)
    for _ in range(20):
        assert not list(answerer_of(config).answers(asked, 8, stop=lambda: True, keep_features=False))


def test_no_more_slots_than_the_batch(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    begin = Slots.__init__

    def counted(self: Slots, target: TorchTarget, num_slots: int, num_positions: int) -> None:
        widths.append(num_slots)
        begin(self, target, num_slots, num_positions)

    monkeypatch.setattr(Slots, "__init__", counted)
    for batch_size, number, expected in ((5, 20, [2, 3]), (1, 4, [1]), (8, 3, [1, 2]), (4, 0, [])):
        widths.clear()
        assert len(answers(answerer_of(config, num_threads=2), requests(number), batch_size, keep=False)) == number
        assert sorted(widths) == expected


def test_temperatures_near_zero_are_greedy(config: TrainConfig) -> None:
    cold = answers(answerer_of(config), requests(4, temperature=1e-38), keep=False)
    greedy = answers(answerer_of(config), requests(4), keep=False)
    assert [answer.token_ids for answer in cold] == [answer.token_ids for answer in greedy]


def test_captured_on_the_way_is_trained_on_and_the_rest_captured(config: TrainConfig, tmp_path: Path) -> None:
    """What fits the cap is kept while answering; a run captures only what does not."""
    preparation = Preparation(config)
    features, path = preparation.generated_features(), tmp_path / "responses.jsonl"
    turns = [UserTurn(f"question {number}", "d") for number in range(8)]
    generation = GenerationConfig(temperatures=(0.0,), temperature_shares=(1.0,), max_response_len=12, batch_size=4)
    generate(preparation.answerer(4), turns, generation, path, features=features)
    found = read_responses(path, 256)
    assert len(found) == 8
    assert all(response in features for response in found)
    one_each = features.num_bytes // 8
    dropped = next((config.output_dir / "generated_features").glob("*.npz"))
    dropped.unlink()
    run = Run(Preparation(config), found)
    captured = run.trainer.capture(found)
    run.close()
    assert len(list((config.output_dir / "features").glob("*.npz"))) == 1
    assert len(captured) == 8
    small = replace(config, output_dir=tmp_path / "small", feature_cache_gib=2.5 * one_each / 2**30)
    features = Preparation(small).generated_features()
    for response, one in zip(found, captured, strict=True):
        features.put(response, one)
    assert 1 <= sum(response in features for response in found) <= 3
    assert found[0] in features, "the first ones stay"


def test_a_damaged_file_is_captured_anew_and_a_lost_one_is_said(
    config: TrainConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    preparation, path = Preparation(config), tmp_path / "responses.jsonl"
    turns = [UserTurn(f"question {number}", "d") for number in range(6)]
    generation = GenerationConfig(temperatures=(0.0,), temperature_shares=(1.0,), max_response_len=12, batch_size=4)
    generate(preparation.answerer(4), turns, generation, path, features=preparation.generated_features())
    found = read_responses(path, 256)
    run = Run(Preparation(replace(config, steps=1)), found)
    run.train(stop=lambda: False, told=lambda report, steps: None)
    run.close()
    files = sorted((config.output_dir / "generated_features").glob("*.npz"))
    files[0].unlink()
    files[1].write_bytes(b"")
    run = Run(Preparation(replace(config, steps=6, resume=True)), found)
    assert "1 sequences have lost the features" in caplog.text
    run.train(stop=lambda: False, told=lambda report, steps: None)
    run.close()
    assert "is damaged; the sequence is captured anew" in caplog.text


def test_a_full_disk_ends_the_generation_in_one_sentence(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A response is written only after its features, and threads that wait for room end."""
    out, prompts = tmp_path / "o", write_prompts(tmp_path / "p.jsonl", [f"question {n}" for n in range(150)])
    command = ["train", "--target_checkpoint", str(target_dir), "--output_dir", str(out), "--responses_only"]
    flags = ["--prompts_file", str(prompts), "--max_response_len", "2", "--max_seq_len", "64", "--target_layer_ids"]
    written, savez = [], np.savez

    def full(*args: Any, **kwargs: Any) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(args)
        savez(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        assert main([*command, *flags, "0,2"]) != 0
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "Traceback" not in error
    assert len(list((out / "generated_features").glob("*"))) == 3
    responses = read_responses(out / "responses.jsonl", 256)
    assert sum(response.num_anchors > 0 for response in responses) == 3
    assert main([*command, *flags, "0,2", "--resume"]) == 0
    assert len(read_responses(out / "responses.jsonl", 256)) == 150


def test_a_generation_of_an_older_version_goes_on(target_dir: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "o", write_prompts(tmp_path / "p.jsonl", ["question"])
    command = ["train", "--target_checkpoint", str(target_dir), "--output_dir", str(out), "--responses_only"]
    flags = ["--prompts_file", str(prompts), "--max_seq_len", "64", "--target_layer_ids", "0,2"]
    assert main([*command, *flags]) == 0
    facts = json.loads((out / "generation.json").read_text("utf-8"))
    for name in ("num_continued", "max_seq_len"):
        del facts[name]
    (out / "generation.json").write_text(json.dumps(facts), "utf-8")
    assert main([*command, *flags, "--resume"]) == 0
    assert main([*command, *flags, "--resume", "--num_continued", "2"]) == 2


def test_continued_turns_begin_as_prompts_of_every_domain(target_dir: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("a", "b")]
    for path, words in zip(files, ("one two three four five six", "alpha beta gamma delta epsilon"), strict=True):
        path.write_text(json.dumps({"prompt": words, "domain": path.stem}) + "\n", "utf-8")
    out = tmp_path / "out"
    flags = [part for path in files for part in ("--prompts_file", str(path))]
    command = ["train", "--target_checkpoint", str(target_dir), "--output_dir", str(out), "--responses_only"]
    assert main([*command, *flags, "--num_continued", "24", "--max_seq_len", "128", "--target_layer_ids", "0,2"]) == 0
    rows = [json.loads(line) for line in (out / "self_made_turns.jsonl").read_text("utf-8").splitlines()]
    kept = {row["index"]: row["text"] for row in rows if row["text"]}
    assert len(rows) == 24
    assert kept
    for index, text in kept.items():
        assert text.startswith(("one", "alpha")[index % 2])
    domains = Counter(response.domain for response in read_responses(out / "responses.jsonl", 256))
    assert set(domains) == {"a", "b"}
    assert sum(domains.values()) <= len(kept) + 2


def test_continued_turns_need_prompts(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --prompts_file"):
        generate(answerer_of(config), [], GenerationConfig(num_continued=3), tmp_path / "r.jsonl")
    with pytest.raises(ConfigError, match="num_continued must be at least 0"):
        GenerationConfig(num_continued=-1)


def test_int8_is_answered_by_the_engine_that_serves_it(target_dir: Path, tmp_path: Path) -> None:
    config = replace(small_config(target_dir, tmp_path / "out"), weight_dtype="int8")
    answerer = Preparation(config).answerer(2)
    assert not isinstance(answerer, TorchAnswerer)
    (answer,) = answerer.answers(requests(1), 2, stop=lambda: False, keep_features=True)
    assert answer.captured is None
    assert 0 < len(answer.token_ids) <= 20
    answerer.close()
    prompts = write_prompts(tmp_path / "p.jsonl", ["question"])
    command = ["train", "--target_checkpoint", str(target_dir), "--output_dir", str(tmp_path / "o")]
    flags = ["--prompts_file", str(prompts), "--responses_only", "--weight_dtype", "int8", "--max_seq_len", "64"]
    assert main([*command, *flags, "--target_layer_ids", "0,2"]) == 0
    assert not list((tmp_path / "o").glob("generated_features/*.npz"))
