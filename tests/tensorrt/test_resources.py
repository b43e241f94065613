"""Registers, stack and spills of every kernel for every architecture, as cuobjdump reads them from the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_dspark.plugins.resources import format_resources, read_resources
from trtllm_dspark.plugins.toolchain import find_cuobjdump

ARCHITECTURES = {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"}
KERNELS = {
    "kvAppendKernel", "raggedAttentionKernel", "raggedAttentionMergeKernel", "markovBeginKernel", "markovLogitsKernel",
    "markovPickKernel", "selectCandidatesKernel", "candidateWalkKernel", "confidenceKernel", "scheduleKernel",
    "rowStatisticsKernel", "acceptKernel", "roundBeginKernel", "roundCapsKernel", "roundRowsKernel", "roundBanKernel",
    "roundCommitKernel",
}  # fmt: skip


def test_resources_every_kernel_and_architecture_without_spills(
    built_plugins: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump")
    rows = read_resources(built_plugins, cuobjdump)
    with capsys.disabled():
        print("\n" + format_resources(rows))
    assert {row.architecture for row in rows} == ARCHITECTURES
    for architecture in ARCHITECTURES:
        names = {row.kernel.partition("<")[0] for row in rows if row.architecture == architecture}
        assert names == KERNELS, architecture
    spilled = [row for row in rows if row.local_bytes or row.stack_bytes]
    assert not spilled, spilled
    assert max(row.registers for row in rows) <= 255
