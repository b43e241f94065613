"""Canonical network definitions, emitted as ONNX opset 24 with one attention lowering a target."""

from trtllm_dspark.graph.autoregressive import STEP_GRAPH, write_autoregressive
from trtllm_dspark.graph.drafter import BLOCK_GRAPH, CONTEXT_GRAPH, DrafterSource, write_drafter
from trtllm_dspark.graph.heads import HEADS_FILE, read_heads, write_heads
from trtllm_dspark.graph.lowering import CACHE_MULTIPLE
from trtllm_dspark.graph.matrices import WEIGHT_DTYPES, WeightDtype
from trtllm_dspark.graph.round_graphs import DRAFTER_GRAPH, RoundDrafter, write_draft, write_verify
from trtllm_dspark.graph.round_options import RoundOptions
from trtllm_dspark.graph.target import TARGET_GRAPH, WrittenTarget, write_target

__all__ = [
    "BLOCK_GRAPH",
    "CACHE_MULTIPLE",
    "CONTEXT_GRAPH",
    "DRAFTER_GRAPH",
    "HEADS_FILE",
    "STEP_GRAPH",
    "TARGET_GRAPH",
    "WEIGHT_DTYPES",
    "DrafterSource",
    "RoundDrafter",
    "RoundOptions",
    "WeightDtype",
    "WrittenTarget",
    "read_heads",
    "write_autoregressive",
    "write_draft",
    "write_drafter",
    "write_heads",
    "write_target",
    "write_verify",
]
