"""`bench --acceptance_output`: record how an engine's drafts fare, for `simulate --acceptance`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trtllm_dspark.cli._generation import make_measured_requests
from trtllm_dspark.cli._prompts import Prompt
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.base import Engine, FloatArray
from trtllm_dspark.engine.device import device_name
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.evaluation import drafter_traits
from trtllm_dspark.runtime import Request, RequestOutput, Session, Tokenizer
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.runtime.round import Choice, DecodePass
from trtllm_dspark.runtime.scheduling import load_calibration
from trtllm_dspark.simulate.acceptance import AcceptanceProfile, from_recorded, write_acceptance
from trtllm_dspark.simulate.blocks import Blocks
from trtllm_dspark.speculation import ConfidenceRecorder

DEFAULT_DOMAIN = "all"


def record_acceptance(args: argparse.Namespace, prompts: Sequence[Prompt], path: Path) -> AcceptanceProfile:
    """Generate one request at a time and write the profile.

    Greedy text and the drafts at every token of it are the same whatever is verified: a block is drafted at each token
    and compared with the text. Of sampled text every block is verified in full, and blocks are kept in the order in
    which a request met them, so that runs of easy and of hard text stay together.

    Raises:
        ConfigError: the engine's drafter has no confidence head, or the prompts give no whole block.
        DeviceError: the engine failed, or the file cannot be written.
    """
    engine = load_engine(args.engine_dir, num_threads=args.num_threads, kernel_library=args.kernel_library)
    try:
        if not engine.limits.has_drafter or not drafter_traits(engine, None).has_confidence:
            raise ConfigError("this engine's drafter has no confidence head; there is no acceptance to record")
        directory = open_engine_dir(args.engine_dir, verify_hashes=False)
        tokenizer = Tokenizer.open(directory)
        greedy = args.temperature == 0 and not any(prompt.sampling.get("temperature") for prompt in prompts)
        record = _every_token if greedy else _whole_blocks
        recorded: dict[str, Blocks] = {}
        for domain in dict.fromkeys(prompt.domain or DEFAULT_DOMAIN for prompt in prompts):
            mine = [prompt for prompt in prompts if (prompt.domain or DEFAULT_DOMAIN) == domain]
            blocks = record(engine, tokenizer, mine, args)
            if not len(blocks):
                raise ConfigError(f"the prompts of domain '{domain}' give no whole block; raise --max_tokens")
            recorded[domain] = blocks
        calibration = load_calibration(directory)
    finally:
        engine.close()
    count = sum(map(len, recorded.values()))
    device = device_name(directory.manifest.backend, directory.manifest.gpu_architectures)
    source = f"measured: {count} blocks of {args.engine_dir.name} on {device}, temperature {args.temperature:g}"
    profile = from_recorded(args.engine_dir.name, source, recorded, calibration)
    write_acceptance(path, profile)
    return profile


def _whole_blocks(engine: Engine, tokenizer: Tokenizer, prompts: list[Prompt], args: argparse.Namespace) -> Blocks:
    recorder = ConfidenceRecorder(engine.limits.max_draft_len)
    session = Session(engine, tokenizer, speculation="fixed", acceptance=args.acceptance, recorder=recorder)
    for _ in _outputs(session, make_measured_requests(prompts, args, session)):
        pass
    observed = recorder.observations()
    confidence = (0.5 * (1 + np.tanh(0.5 * observed.logits))).astype(np.float32)
    return Blocks(confidence, observed.accepted)


class _DraftsByPosition:
    """A `RoundListener` that keeps what was drafted behind every position of the one request that runs."""

    def __init__(self) -> None:
        self.drafts: dict[int, tuple[list[int], FloatArray]] = {}

    def round(self, decode: DecodePass, chosen: Sequence[tuple[ActiveRequest, Choice]]) -> None:
        draft = decode.draft
        if draft is not None and draft.confidence is not None and int(draft.rows[0]) >= 0:
            self.drafts[int(decode.positions[0])] = draft.tokens[0].tolist(), draft.confidence[0].copy()

    def committed(self, request: ActiveRequest, output: RequestOutput) -> None:
        pass


def _every_token(engine: Engine, tokenizer: Tokenizer, prompts: list[Prompt], args: argparse.Namespace) -> Blocks:
    gamma = engine.limits.max_draft_len
    listener = _DraftsByPosition()
    # No confidence is that high: every round drafts, and emits one token.
    session = Session(engine, tokenizer, speculation="threshold:1", acceptance=args.acceptance, listener=listener)
    confidences: list[FloatArray] = []
    accepted: list[int] = []
    starts: list[int] = []
    for request in make_measured_requests(prompts, args, session):
        # Of the last drafts the text must be known too.
        room = engine.limits.max_seq_len - len(request.prompt_token_ids)
        tokens = min(room, request.params.max_tokens + gamma)
        longer = replace(request, params=replace(request.params, max_tokens=tokens))
        listener.drafts.clear()
        text = list(request.prompt_token_ids)
        for output in _outputs(session, [longer]):
            text += output.new_token_ids
        first = len(accepted)
        # A position without drafts, if a confidence is 1 for once, ends the text.
        for position in range(len(request.prompt_token_ids), len(text) - gamma):
            if position not in listener.drafts:
                break
            drafts, confidence = listener.drafts[position]
            right = [draft == token for draft, token in zip(drafts, text[position + 1 :], strict=False)]
            accepted.append([*right, False].index(False))
            confidences.append(confidence)
        if len(accepted) > first:
            starts.append(first)
    if not accepted:
        return Blocks(np.zeros((0, gamma), np.float32), np.zeros(0, np.int64))
    return Blocks(np.stack(confidences).astype(np.float32), np.array(accepted, np.int64), tuple(starts))


def _outputs(session: Session, requests: Sequence[Request]) -> Iterator[RequestOutput]:
    for output in run_closed_loop(session, requests, batch_size=1):
        if output.error is not None:
            raise DeviceError(f"prompt {output.request_id} failed: {output.error}")
        yield output
