"""`bench --acceptance_output`: record how an engine's drafts fare, for `simulate --acceptance`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trtllm_dspark.cli._generation import make_requests
from trtllm_dspark.cli._prompts import Prompt
from trtllm_dspark.engine import load_engine
from trtllm_dspark.engine.device import device_name
from trtllm_dspark.engine_dir import open_engine_dir
from trtllm_dspark.errors import ConfigError, DeviceError
from trtllm_dspark.runtime import Session, Tokenizer
from trtllm_dspark.runtime.closed_loop import run_closed_loop
from trtllm_dspark.runtime.scheduling import load_calibration
from trtllm_dspark.simulate.acceptance import AcceptanceProfile, from_recorded, write_acceptance
from trtllm_dspark.simulate.blocks import Blocks
from trtllm_dspark.speculation import ConfidenceRecorder

DEFAULT_DOMAIN = "all"


def record_acceptance(args: argparse.Namespace, prompts: Sequence[Prompt], path: Path) -> AcceptanceProfile:
    """Generate with every block verified in full, one request at a time, and write the profile.

    Blocks are kept in the order in which a request met them, so that runs of easy and of hard text stay together.

    Raises:
        ConfigError: the engine's drafter has no confidence head, or the prompts give no whole block.
        DeviceError: the engine failed, or the file cannot be written.
    """
    engine = load_engine(args.engine_dir, num_threads=args.num_threads, kernel_library=args.kernel_library)
    try:
        if not engine.limits.has_drafter or not engine.heads.has_confidence:
            raise ConfigError("this engine's drafter has no confidence head; there is no acceptance to record")
        directory = open_engine_dir(args.engine_dir, verify_hashes=False)
        tokenizer = Tokenizer.open(directory)
        recorded: dict[str, Blocks] = {}
        for domain in dict.fromkeys(prompt.domain or DEFAULT_DOMAIN for prompt in prompts):
            recorder = ConfidenceRecorder(engine.limits.max_draft_len)
            session = Session(engine, tokenizer, speculation="fixed", acceptance=args.acceptance, recorder=recorder)
            mine = [prompt for prompt in prompts if (prompt.domain or DEFAULT_DOMAIN) == domain]
            for output in run_closed_loop(session, make_requests(mine, args, session), batch_size=1):
                if output.error is not None:
                    raise DeviceError(f"prompt {output.request_id} failed: {output.error}")
            observed = recorder.observations()
            if not len(observed):
                raise ConfigError(f"the prompts of domain '{domain}' give no whole block; raise --max_tokens")
            confidence = (0.5 * (1 + np.tanh(0.5 * observed.logits))).astype(np.float32)
            recorded[domain] = Blocks(confidence, observed.accepted)
        calibration = load_calibration(directory)
    finally:
        engine.close()
    count = sum(map(len, recorded.values()))
    device = device_name(directory.manifest.backend, directory.manifest.gpu_architectures)
    source = f"measured: {count} blocks of {args.engine_dir.name} on {device}, temperature {args.temperature:g}"
    profile = from_recorded(args.engine_dir.name, source, recorded, calibration)
    write_acceptance(path, profile)
    return profile
