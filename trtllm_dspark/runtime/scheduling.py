"""What a session needs to decide about drafts: a controller that fits the engine, and the engine's tables."""

from __future__ import annotations

import logging

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.engine.device import device_name
from trtllm_dspark.engine_dir import EngineDirectory
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.runtime.proposers import Proposer
from trtllm_dspark.speculation import (
    Calibration,
    Calibrator,
    CostTable,
    LoadSource,
    SpeculationConfig,
    SpeculationController,
    measure_cost_table,
)
from trtllm_dspark.speculation.calibration_file import CALIBRATION_FILE, read_calibration
from trtllm_dspark.speculation.cost_table import check_cost_table, make_monotone
from trtllm_dspark.speculation.cost_table_file import COST_TABLE_FILE, read_cost_table
from trtllm_dspark.speculation.measure import device_timer
from trtllm_dspark.speculation.online_calibration import OnlineCalibration

logger = logging.getLogger(__name__)

PLAIN = SpeculationConfig("off")


def make_controller(
    engine: Engine,
    proposer: Proposer | None,
    config: SpeculationConfig,
    cost_table: CostTable | None,
    *,
    calibrator: Calibrator | None = None,
    load: LoadSource | None = None,
) -> SpeculationController:
    """Return the controller of a session; measure an idle engine when its times are needed and not given.

    `adaptive` decodes plainly, and says so, where it could not decide: without a drafter, a confidence head or times.

    Raises:
        ConfigError: the engine cannot speculate as asked.
    """
    gamma = engine.limits.max_draft_len if proposer is None else proposer.draft_len
    missing = _missing(proposer, config)
    if missing and config.mode == "adaptive":
        logger.warning("speculation 'adaptive' decodes plainly: it %s", missing)
        return SpeculationController(PLAIN, max_draft_len=gamma, load=load)
    if missing or proposer is None:
        if config.mode != "off":
            raise ConfigError(f"speculation '{config}' {missing}")
        return SpeculationController(config, max_draft_len=gamma, cost_table=cost_table, load=load)
    if config.needs_cost_table and cost_table is None:
        logger.info("no cost table: measuring the engine once; trtllm-dspark profile keeps the result")
        cost_table = proposer.costs(measure_cost_table(engine, quick=True, max_draft_len=gamma))
    if config.needs_cost_table and cost_table is not None:
        try:
            check_cost_table(cost_table)
        except ConfigError as error:
            if config.mode == "adaptive":
                logger.warning("speculation 'adaptive' decodes plainly: %s", error)
                return SpeculationController(PLAIN, max_draft_len=gamma, load=load)
            logger.warning("%s; these times are used until then", error)
        cost_table = make_monotone(cost_table)
    return SpeculationController(config, max_draft_len=gamma, cost_table=cost_table, calibrator=calibrator, load=load)


def _missing(proposer: Proposer | None, config: SpeculationConfig) -> str:
    """Return what a mode lacks and what to do about it, or nothing."""
    if config.mode == "off":
        return ""
    if proposer is None:
        return (
            "needs a drafter and this engine has none; use speculation 'off', drafter 'ngram' or build with "
            "--draft_checkpoint"
        )
    if config.needs_confidence and not proposer.has_confidence:
        return "needs a confidence head and this drafter has none; use speculation 'fixed' or 'off'"
    return ""


def load_cost_table(directory: EngineDirectory, engine: Engine, *, num_threads: int) -> CostTable | None:
    """Return the engine's stored times, None where there are none or they were measured under other conditions.

    Args:
        directory: of the engine.
        engine: as loaded from it; with a kernel library its rounds are timed on the device.
        num_threads: CPU threads of a pass.

    Raises:
        EngineError: the file is damaged, of another version or of another engine.
    """
    stored = read_cost_table(directory)
    if stored is None:
        return None
    device = device_name(directory.manifest.backend, directory.manifest.gpu_architectures)
    if (stored.device, stored.num_threads) != (device, num_threads):
        logger.warning(
            "%s was measured on %s with %d threads, this is %s with %d: not used; profile again",
            COST_TABLE_FILE,
            stored.device,
            stored.num_threads,
            device,
            num_threads,
        )
        return None
    if stored.device_rounds != (device_timer(engine) is not None):
        logger.warning(
            "%s was measured %s a kernel library, this engine is loaded %s: not used; profile again",
            COST_TABLE_FILE,
            *(("with", "without one") if stored.device_rounds else ("without", "with one")),
        )
        return None
    logger.info("pass times come from %s", directory.path / COST_TABLE_FILE)
    return stored.table


def load_calibrator(directory: EngineDirectory, *, online: bool) -> Calibration | OnlineCalibration | None:
    """Return the engine's stored calibration, None where it has none; `online`: one that starts there and learns.

    Raises:
        EngineError: the file is damaged, of another version or of another engine.
    """
    stored = load_calibration(directory)
    gamma = directory.manifest.limits.max_draft_len
    return OnlineCalibration(stored or Calibration.identity(gamma)) if online and gamma else stored


def load_calibration(directory: EngineDirectory) -> Calibration | None:
    """Return the engine's stored calibration, None where it has none.

    Raises:
        EngineError: the file is damaged, of another version or of another engine.
    """
    calibration = read_calibration(directory)
    if calibration is not None:
        logger.info("confidences are calibrated by %s", directory.path / CALIBRATION_FILE)
    return calibration
