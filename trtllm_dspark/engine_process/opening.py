"""From an engine directory to a lane, and whether two engines may serve the same requests."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtllm_dspark.engine_dir import Manifest, open_engine_dir
from trtllm_dspark.engine_process.lanes import Lane
from trtllm_dspark.engine_process.session_request import make_session_request
from trtllm_dspark.errors import EngineMismatch
from trtllm_dspark.runtime.load_control import LoadControl
from trtllm_dspark.runtime.proposers import OutsideDrafter
from trtllm_dspark.runtime.session import Session
from trtllm_dspark.speculation.config import SpeculationConfig
from trtllm_dspark.speculation.cost_table_file import read_cost_table
from trtllm_dspark.traffic.recorder import TrafficRecorder

_SPECIAL_TOKENS = "special_tokens.json"
_TEXT_FILES = ("tokenizer.json", "chat_template.jinja", _SPECIAL_TOKENS, "generation_config.json")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How sessions of this process are opened.

    Attributes:
        num_threads: of the CPU engine.
        speculation: which drafts a round verifies.
        acceptance: how sampled drafts are accepted.
        recorder: sees the sessions whose records fit its directory.
        load: limits that the load of the GPU sets, or None.
        calibration: `online` follows what is observed, `stored` does not, `auto` is online where a seed does not fix
            the text anyway and the engine's own drafter drafts alone.
        kernel_library: keeps whole rounds of TensorRT engines on the GPU.
        drafter: what drafts in place of the engine's own drafter, or None.
    """

    num_threads: int
    speculation: str
    acceptance: Literal["rejection", "coupled"]
    recorder: TrafficRecorder | None = None
    load: LoadControl | None = None
    calibration: Literal["auto", "online", "stored"] = "auto"
    kernel_library: Path | None = None
    drafter: OutsideDrafter | None = None

    @property
    def online_calibration(self) -> bool:
        """Whether the calibration follows what is observed."""
        compared = SpeculationConfig.parse(self.speculation).compares_requests
        return self.calibration == "online" or (self.calibration == "auto" and compared and self.drafter is None)


def open_session(engine_dir: str | Path, options: SessionOptions) -> Session:
    """Load an engine directory.

    Raises:
        DsparkError: it cannot be used.
    """
    listener = None
    if options.recorder is not None:
        listener = options.recorder.listener(open_engine_dir(engine_dir, verify_hashes=False).manifest)
    return Session.open(
        engine_dir,
        num_threads=options.num_threads,
        speculation=options.speculation,
        acceptance=options.acceptance,
        drafter=None if options.drafter is None else options.drafter.make(num_threads=options.num_threads),
        listener=listener,
        load=options.load,
        online_calibration=options.online_calibration,
        kernel_library=options.kernel_library,
    )


def make_lane(session: Session, engine_dir: str | Path, load: LoadControl | None = None) -> Lane:
    """Return the lane of a session that was opened from `engine_dir`."""
    # That of what drafts: not always the engine's block.
    limits, max_draft_len = session.limits, session.stats.max_draft_len
    return Lane(
        session,
        functools.partial(make_session_request, max_draft_len=max_draft_len),
        limits.max_batch_size,
        engine_dir=str(Path(engine_dir).resolve()),
        max_draft_len=max_draft_len,
        request_limit=None if load is None else load.request_limit,
    )


def open_load_control(
    engine_dir: str | Path, wanted: Literal["auto", "on", "off"], device: int | str
) -> LoadControl | None:
    """Return the control over the load of the GPU, not started; `auto`: where the engine runs on one.

    Raises:
        EngineError: the directory cannot be used.
    """
    directory = open_engine_dir(engine_dir, verify_hashes=False)
    manifest = directory.manifest
    if wanted == "off" or (wanted == "auto" and manifest.backend == "onnxruntime"):
        return None
    # Clocks are judged against those the passes were timed at.
    stored = read_cost_table(directory)
    clock = None if stored is None else stored.sm_clock_mhz
    return LoadControl.for_engine(manifest.limits, device=device, reference_sm_clock_mhz=clock)


def open_candidate(serving_dir: str, engine_dir: str, options: SessionOptions) -> Lane:
    """Load an engine that is to take requests of another one.

    Raises:
        DsparkError: it cannot be used, or it could answer differently.
    """
    if options.drafter is not None:
        raise EngineMismatch(
            f"this server drafts by --drafter {options.drafter.kind}, not by an engine alone; there is nothing to "
            "swap: start it without --drafter"
        )
    check_interchangeable(
        open_engine_dir(serving_dir, verify_hashes=False).manifest, open_engine_dir(engine_dir).manifest, engine_dir
    )
    return make_lane(open_session(engine_dir, options), engine_dir, options.load)


def check_interchangeable(serving: Manifest, candidate: Manifest, where: str) -> None:
    """Refuse a candidate whose outputs may differ from the serving engine's: only its drafter may be another one.

    Raises:
        EngineMismatch: naming what differs.
    """
    if candidate.drafter is None:
        raise EngineMismatch(f"the engine {where} has no drafter; build it with --draft_checkpoint")
    parts: dict[str, tuple[Any, Any]] = {
        "backend": (serving.backend, candidate.backend),
        "target checkpoint": (_checkpoint(serving), _checkpoint(candidate)),
        "storage of the target's weights": (serving.target.weight_dtype, candidate.target.weight_dtype),
        "target's type": (serving.target.dtype, candidate.target.dtype),
        "target's configuration": (serving.target_config, candidate.target_config),
        **{name: (_sha256(serving, name), _sha256(candidate, name)) for name in _TEXT_FILES},
    }
    for name, (now, then) in parts.items():
        if now != then:
            if name == _SPECIAL_TOKENS and not now:
                # Its template would see other tokens: engines of earlier versions took them from the ids.
                raise EngineMismatch(
                    f"the engine {where} has a {name} and the serving one, of an earlier version, has none; build the "
                    "serving engine again too and restart the server with it"
                )
            raise EngineMismatch(
                f"the {name} of {where} is not that of the serving engine; build the candidate from the same target"
            )
    if candidate.limits.max_seq_len < serving.limits.max_seq_len:
        raise EngineMismatch(
            f"the engine {where} holds sequences of {candidate.limits.max_seq_len} tokens and the serving one "
            f"{serving.limits.max_seq_len}; build it with --max_seq_len {serving.limits.max_seq_len} or more"
        )
    # Rounds of plugins refuse requests that others take; no client may see which of the two engines it met.
    if _has_plugins(serving) != _has_plugins(candidate):
        flag = "enable" if _has_plugins(serving) else "disable"
        raise EngineMismatch(
            f"of the engine {where} and the serving one only one runs rounds of plugins, which give no "
            f"log-probabilities and take no min_tokens; build it with --dspark_plugin {flag}"
        )
    accepts, wanted = _acceptance(candidate), _acceptance(serving)
    if accepts != wanted:
        raise EngineMismatch(
            f"the plugins of {where} accept by {accepts} and those of the serving engine by {wanted}, so they serve "
            f"other requests; build it with --acceptance {wanted}"
        )


def _has_plugins(manifest: Manifest) -> bool:
    return manifest.gpu is not None and manifest.gpu.lowering == "trt_plugin"


def _acceptance(manifest: Manifest) -> str | None:
    return None if manifest.gpu is None else manifest.gpu.acceptance


def _checkpoint(manifest: Manifest) -> list[str]:
    return sorted(entry.sha256 for entry in manifest.target.checkpoint_files)


def _sha256(manifest: Manifest, name: str) -> str:
    return next((entry.sha256 for entry in manifest.files if entry.name == name), "")
