"""The engine directory: the format that `build/` writes and `engine/` reads (docs/file_formats.md)."""

from trtllm_dspark.engine_dir.directory import EngineDirectory, open_engine_dir
from trtllm_dspark.engine_dir.manifest import (
    SCHEMA_VERSION,
    BuildLimits,
    FileEntry,
    GpuBuild,
    Manifest,
    ModelEntry,
    describe_file,
    file_sha256,
)
from trtllm_dspark.engine_dir.plan_report import (
    Binding,
    Layer,
    PlanReport,
    ShapeRange,
    read_plan_reports,
    write_plan_report,
)
from trtllm_dspark.engine_dir.side_table import read_side_table, write_json, write_side_table
from trtllm_dspark.engine_dir.staging import StagedDirectory, stage_directory

__all__ = [
    "SCHEMA_VERSION",
    "Binding",
    "BuildLimits",
    "EngineDirectory",
    "FileEntry",
    "GpuBuild",
    "Layer",
    "Manifest",
    "ModelEntry",
    "PlanReport",
    "ShapeRange",
    "StagedDirectory",
    "describe_file",
    "file_sha256",
    "open_engine_dir",
    "read_plan_reports",
    "read_side_table",
    "stage_directory",
    "write_json",
    "write_plan_report",
    "write_side_table",
]
