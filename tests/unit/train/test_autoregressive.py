"""EAGLE-3-style and MTP-1 heads: the unrolled model equals the reference, trains, resumes, and runs in the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.autoregressive import KINDS, write_autoregressive_drafter
from helpers.fake_engine import collect_outputs, token_ids
from helpers.training import make_run, train, write_responses

from trtllm_dspark.build import BuildConfig, build_engine
from trtllm_dspark.checkpoint import Checkpoint, load_drafter
from trtllm_dspark.checkpoint.autoregressive import autoregressive_shapes
from trtllm_dspark.checkpoint.config import DrafterKind
from trtllm_dspark.cli.main import main
from trtllm_dspark.engine import Engine, load_engine
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.reference.autoregressive import autoregressive_drafts
from trtllm_dspark.reference.models import target_forward
from trtllm_dspark.runtime import Request, SamplingParams, Session
from trtllm_dspark.train.data import BatchConfig, Sampler, collate
from trtllm_dspark.train.features import Captured
from trtllm_dspark.train.layers import Frozen
from trtllm_dspark.train.model import predict
from trtllm_dspark.train.parameters import from_arrays
from trtllm_dspark.train.pipeline import Preparation, Run, TrainConfig
from trtllm_dspark.train.responses import Response


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> DrafterKind:
    value: DrafterKind = request.param
    return value


@pytest.fixture
def config(config: TrainConfig, kind: DrafterKind) -> TrainConfig:
    """Return the smallest run of this kind."""
    return replace(config, kind=kind, target_layer_ids=())


@pytest.mark.parametrize("sample_positions", [False, True])
def test_unrolled_blocks_equal_the_reference(
    target: Checkpoint, responses: list[Response], tmp_path: Path, kind: DrafterKind, sample_positions: bool
) -> None:
    drafter = load_drafter(write_autoregressive_drafter(tmp_path, kind, vocab_size=256), target.config)
    gamma, layers = drafter.config.block_size, drafter.config.target_layer_ids
    batch = BatchConfig(4, 6, gamma, 0, decay=4.0, sample_positions=sample_positions, seed=3)
    share = Sampler(responses, batch, 1).step(1)[0]
    features = [
        target_forward(target.config, target.arrays, responses[i].token_ids[:-1], feature_layer_ids=layers).features
        for i in share.indices
    ]
    captured = [
        Captured(one, np.ones((len(one), 1)), np.zeros((len(one), 1), np.int64), np.zeros((len(one), 1)))
        for one in features
    ]
    blocks, _ = collate(share, responses, captured, batch, None, 1.0)
    blocks = replace(blocks, features=torch.from_numpy(np.concatenate(
        [one[:length] for one, length in zip(features, share.anchors.max(1), strict=True)]
    )))  # fmt: skip
    parameters = {name: value.double() for name, value in from_arrays(drafter.config, drafter.arrays, None).items()}
    tables = (torch.from_numpy(target.arrays[name]).double() for name in ("embed.weight", "lm_head.weight"))
    got = predict(parameters, Frozen.of(*tables, drafter.config.backbone, 64), drafter.config, blocks)
    assert got.confidence is None
    expected = []
    for sequence, index in enumerate(share.indices):
        ids = np.asarray(responses[index].token_ids)
        for anchor in share.anchors[sequence]:
            # Behind the sequence's end, where nothing is trained, its last token goes on.
            tokens = ids[np.minimum(np.arange(1, anchor + gamma), len(ids) - 1)]
            out = autoregressive_drafts(
                drafter.config,
                drafter.arrays,
                features[sequence][:anchor],
                tokens.tolist(),
                target_arrays=target.arrays,
            )
            expected.append(out.base_logits)
    np.testing.assert_allclose(got.logits.numpy(), np.concatenate(expected)[share.rows], rtol=1e-6, atol=2e-6)


def test_what_is_written_is_what_was_trained(
    config: TrainConfig, responses: list[Response], target: Checkpoint, kind: DrafterKind
) -> None:
    run = make_run(config, responses, steps=2)
    run.train(stop=lambda: False, told=lambda *_: None)
    run.close()
    drafter = load_drafter(config.output_dir / "drafter", target.config)
    assert drafter.config.kind == kind
    assert drafter.config.block_size == (5 if kind == "eagle3" else 1)
    assert drafter.config.target_layer_ids == ((0, 1) if kind == "eagle3" else (3,))
    assert set(drafter.arrays) == set(autoregressive_shapes(drafter.config)) == set(run.trainer.parameters)
    for name, value in run.trainer.parameters.items():
        np.testing.assert_allclose(drafter.arrays[name], value.numpy(), rtol=1e-3, atol=1e-6)
    again = Preparation(replace(config, init_from=str(config.output_dir / "drafter")))
    assert again.drafter == drafter.config
    with pytest.raises(ConfigError, match=f"of kind {kind}, not block"):
        Preparation(replace(config, init_from=str(config.output_dir / "drafter"), kind="block"))


def test_stopped_run_goes_on_with_the_same_losses(
    config: TrainConfig, responses: list[Response], tmp_path: Path
) -> None:
    def losses(reports):  # type: ignore[no-untyped-def]
        return [(report.step, report.loss, report.accept) for report in reports]

    whole = losses(train(config, responses, output_dir=tmp_path / "whole", num_threads=3))
    run, reports = make_run(config, responses, save_every=1), []
    run.train(stop=lambda: len(reports) == 2, told=lambda report, _: reports.append(report))
    run.close()
    assert losses(reports) + losses(train(config, responses, resume=True)) == whole


def build(target_dir: Path, drafter_dir: Path, engine_dir: Path) -> Engine:
    build_engine(
        BuildConfig(
            str(target_dir),
            engine_dir,
            draft_checkpoint=str(drafter_dir),
            weight_dtype="float32",
            max_seq_len=128,
            max_num_tokens=32,
        )
    )
    return load_engine(engine_dir)


def test_walk_counts_what_the_engine_accepts(
    config: TrainConfig, target_dir: Path, tmp_path: Path, kind: DrafterKind
) -> None:
    drafter_dir = write_autoregressive_drafter(tmp_path / "drafter", kind, vocab_size=256)
    engine = build(target_dir, drafter_dir, tmp_path / "engine")
    gamma = engine.limits.max_draft_len
    prompts = [[10, 20, 30 + n] for n in range(3)]
    texts = {}
    for mode in ("off", "fixed"):
        session = Session(engine, None, speculation=mode, eos_token_ids=[])
        for index, prompt in enumerate(prompts):
            session.add(Request(str(index), prompt, SamplingParams(max_tokens=48)))
        outputs = collect_outputs(session)
        texts[mode] = {name: token_ids(rows) for name, rows in outputs.items()}
    engine.close()
    assert texts["off"] == texts["fixed"]
    emitted, rounds = 0, 0
    for index in range(len(prompts)):
        steps = [len(output.new_token_ids) for output in outputs[str(index)]]
        ends = np.cumsum(steps[1:])
        # The walk leaves out blocks that the end of the sequence cuts.
        whole = [end for start, end in zip([0, *ends[:-1]], ends, strict=True) if start + gamma < 48]
        emitted, rounds = emitted + whole[-1], rounds + len(whole)
    answers = [
        Response("x", 0.0, len(prompt), (*prompt, *texts["off"][str(index)])) for index, prompt in enumerate(prompts)
    ]
    run = Run(Preparation(replace(config, init_from=str(drafter_dir))), answers)
    assert run.validate(answers)["x"] == (emitted, rounds)
    run.close()


def test_training_raises_what_the_target_accepts(config: TrainConfig, tmp_path: Path) -> None:
    """On greedy answers of the target; what is trained decodes losslessly and is accepted."""
    changes = {"steps": 24, "block_size": 4, "lr_scale": 10.0, "anchors_per_sequence": 12, "top_k": 32}
    preparation = Preparation(replace(config, **changes))  # type: ignore[arg-type]
    session = Session(preparation.feature_target.open(max_batch_size=8, num_threads=2), None, eos_token_ids=[])
    prompts = np.random.default_rng(0).integers(4, 256, (8, 2)).tolist()
    for index, prompt in enumerate(prompts):
        session.add(Request(str(index), prompt, SamplingParams(max_tokens=40)))
    outputs = {name: token_ids(rows) for name, rows in collect_outputs(session).items()}
    session.close()
    answers = [Response("x", 0.0, 2, (*prompt, *outputs[str(index)])) for index, prompt in enumerate(prompts)]
    run = Run(preparation, answers)
    before = run.validate(answers)["x"]
    run.train(stop=lambda: False, told=lambda *_: None)
    after = run.validate(answers)["x"]
    run.close()
    assert after[0] / after[1] > before[0] / before[1] + 0.25
    engine = build(Path(config.target_checkpoint), config.output_dir / "drafter", tmp_path / "engine")
    session = Session(engine, None, speculation="fixed", eos_token_ids=[])
    for index, prompt in enumerate(prompts):
        session.add(Request(str(index), prompt, SamplingParams(max_tokens=40)))
    assert {name: token_ids(rows) for name, rows in collect_outputs(session).items()} == outputs
    # Prefill emits the first token of each.
    assert session.stats.acceptance.emitted / session.stats.acceptance.rounds > before[0] / before[1] + 0.15
    engine.close()


COMMAND = "--steps 2 --num_sequences 4 --anchors_per_sequence 4 --max_seq_len 64".split()


def test_command_trains_an_engine_that_names_its_drafter(
    target_dir: Path,
    tmp_path: Path,
    responses: list[Response],
    kind: DrafterKind,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_responses(tmp_path / "r.jsonl", responses)
    out = tmp_path / "out"
    common = ["--target_checkpoint", str(target_dir), "--output_dir", str(out), "--responses_file", str(path)]
    assert main(["train", *common, *COMMAND, "--drafter", kind]) == 0
    build(target_dir, out / "drafter", tmp_path / "engine").close()
    capsys.readouterr()
    texts = []
    run = ["run", "--engine_dir", str(tmp_path / "engine"), "--prompt", "abc", "--max_tokens", "12", "--ignore_eos"]
    for flags in (["--speculation", "off"], ["--speculation", "fixed:1"], ["--speculation", "threshold:0.01"]):
        for name in ("engine", kind):
            assert main([*run, "--json", "--log_level", "error", *flags, "--drafter", name]) == 0
            texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert all(text == texts[0] for text in texts)
    assert main([*run, "--drafter", "dspark"]) == 2
    assert f"is {kind}, not dspark; leave out --drafter" in capsys.readouterr().err
    assert main(["inspect", "--engine_dir", str(tmp_path / "engine")]) == 0
    assert f"{kind}, a layer of 64" in capsys.readouterr().out
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "abc"}), "utf-8")
    eval_flags = ["--prompts_file", str(tmp_path / "p.jsonl"), "--max_tokens", "24", "--ignore_eos", "--json"]
    assert main(["eval", "--engine_dir", str(tmp_path / "engine"), *eval_flags, "--drafter", kind]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["drafter"] == kind
    assert all(result["accepted_len"] >= 1 for result in report["results"])
    assert main(["profile", "--engine_dir", str(tmp_path / "engine"), "--quick"]) in (0, 2)


@pytest.mark.parametrize(
    ("drafter", "flags", "message"),
    [
        ("dflash", ("--markov_rank", "8"), "--markov_rank means nothing to --drafter dflash"),
        ("eagle3", ("--num_layers", "2"), "--num_layers means nothing to --drafter eagle3"),
        ("eagle3", ("--include_shared",), "--include_shared means nothing to --drafter eagle3"),
        ("eagle3", ("--confidence_alpha", "0.5"), "--confidence_alpha means nothing to --drafter eagle3"),
        ("mtp", ("--block_size", "3"), "--block_size means nothing to --drafter mtp"),
        ("mtp", ("--target_layer_ids", "1,2"), "an mtp drafter reads one layer"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    target_dir: Path, tmp_path: Path, drafter: str, flags: tuple[str, ...], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "r.jsonl").write_text("")
    common = ["--target_checkpoint", str(target_dir), "--output_dir", str(tmp_path / "out"), "--steps", "1"]
    common += ["--responses_file", str(tmp_path / "r.jsonl")]
    assert main(["train", *common, "--max_seq_len", "64", "--drafter", drafter, *flags]) == 2
    assert message in capsys.readouterr().err
