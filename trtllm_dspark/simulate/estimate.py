"""Cost tables of GPUs that are not at hand: a roofline of public figures, a staircase at graph sizes.

A pass takes the longer of reading (weights once, the cache of every request once) and computing, plus a latency a
layer. What the figures cannot tell (kernels, overlap, clocks) is in two efficiencies and that latency, which are
assumptions; every table made here says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation import CostTable
from trtllm_dspark.speculation.cost_table import DraftShape, VerifyShape


@dataclass(frozen=True, slots=True)
class Gpu:
    """Public figures of a GPU.

    Attributes:
        name: shown in reports.
        bytes_per_s: memory bandwidth.
        flops_16: dense 16-bit operations a second with 32-bit sums.
        flops_8: dense 8-bit floating-point ones.
        memory_bytes: of the device.
    """

    name: str
    bytes_per_s: float
    flops_16: float
    flops_8: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how long a target's and its drafter's passes take.

    Attributes:
        name: shown in reports.
        layers: decoder layers.
        active_params: weights a token multiplies with, output head included.
        kv_bytes_per_token: cache of a token over all layers.
        attention_flops: operations a token and cached token over all layers.
        hidden: model width.
        vocab: vocabulary.
        draft_layers: layers of the drafter, counted as dense ones of 12 hidden^2 weights.
        gamma: drafts of a block.
        markov_rank: rank of the sequential head.
        bytes_per_weight: 2 or 1; with 1 the 8-bit operations count.
        expert_params: of the active weights those that are experts chosen per token; 0 = a dense model.
        num_experts: experts a token is routed among, in a layer.
        top_experts: experts it takes.
        expert_ranks: GPUs the experts are spread over, all of them as busy as this one; the rest is on every GPU.
    """

    name: str
    layers: int
    active_params: float
    kv_bytes_per_token: float
    attention_flops: float
    hidden: int
    vocab: int
    draft_layers: int = 5
    gamma: int = 7
    markov_rank: int = 256
    bytes_per_weight: float = 2.0
    expert_params: float = 0.0
    num_experts: int = 1
    top_experts: int = 1
    expert_ranks: int = 1


GPUS: dict[str, Gpu] = {
    # SXM parts; dense figures of the data sheets.
    "h100": Gpu("H100 SXM", 3.35e12, 989e12, 1979e12, 80e9),
    "h200": Gpu("H200 SXM", 4.8e12, 989e12, 1979e12, 141e9),
    "b200": Gpu("B200", 8.0e12, 2250e12, 4500e12, 180e9),
    "l40s": Gpu("L40S", 0.864e12, 362e12, 733e12, 48e9),
    "rtx4090": Gpu("RTX 4090", 1.008e12, 165e12, 330e12, 24e9),
    "rtx5090": Gpu("RTX 5090", 1.792e12, 209e12, 419e12, 32e9),
}


def _qwen3(name: str, layers: int, hidden: int, inner: int, heads: int) -> ModelShape:
    head_dim, kv_heads, vocab = 128, 8, 151936
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    return ModelShape(
        name,
        layers,
        float(layers * layer + vocab * hidden),
        kv_bytes_per_token=layers * 2 * kv_heads * head_dim * 2.0,
        attention_flops=layers * 4.0 * heads * head_dim,
        hidden=hidden,
        vocab=vocab,
    )


MODELS: dict[str, ModelShape] = {
    "qwen3-4b": _qwen3("Qwen3-4B", 36, 2560, 9728, 32),
    "qwen3-8b": _qwen3("Qwen3-8B", 36, 4096, 12288, 32),
    "qwen3-14b": _qwen3("Qwen3-14B", 40, 5120, 17408, 40),
    # Not the published model: a sparse one of its public width and vocabulary, with a small latent cache, served with
    # attention on every GPU and experts over four.
    "v4-flash-like": ModelShape(
        "V4-Flash-like",
        43,
        13e9,
        kv_bytes_per_token=43 * 576.0,
        attention_flops=43 * 4.0 * 64 * 576,
        hidden=4096,
        vocab=129280,
        draft_layers=3,
        gamma=5,
        bytes_per_weight=1.0,
        expert_params=7e9,
        num_experts=256,
        top_experts=6,
        expert_ranks=4,
    ),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What public figures do not tell.

    Attributes:
        memory_efficiency: share of the bandwidth that a pass reaches.
        compute_efficiency: share of the operations a second that a pass reaches.
        layer_us: microseconds a layer takes beside reading and computing: launches, reductions, dependencies.
        pass_us: microseconds a pass takes beside its layers.
        num_gpus: GPUs that share every layer.
        collective_us: microseconds a layer spends between them, when there is more than one.
    """

    memory_efficiency: float = 0.75
    compute_efficiency: float = 0.55
    layer_us: float = 4.0
    pass_us: float = 100.0
    num_gpus: int = 1
    collective_us: float = 12.0


MAX_GAMMA = 15
REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)
DEPTHS = (128, 4096)


def graph_sizes(most: int) -> list[int]:
    """Return token counts graphs are captured for: 1, 2, 4, then every 8 to 256, every 16 to 512, every 64 beyond."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, most + 64, 64)]
    return [size for size in sizes if size < most + 64]


class Roofline:
    """Times of one model on one GPU.

    Args:
        gpu: public figures.
        model: shape.
        assumptions: the rest.
    """

    def __init__(self, gpu: Gpu, model: ModelShape, assumptions: Assumptions | None = None) -> None:
        self.gpu, self.model, self.assumptions = gpu, model, assumptions or Assumptions()
        a = self.assumptions
        flops = gpu.flops_16 if model.bytes_per_weight > 1 else gpu.flops_8
        self._bytes_per_us = gpu.bytes_per_s * a.memory_efficiency * a.num_gpus / 1e6
        self._flops_per_us = flops * a.compute_efficiency * a.num_gpus / 1e6
        self._layer_us = a.layer_us + (a.collective_us if max(a.num_gpus, model.expert_ranks) > 1 else 0.0)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of target and drafter that lie here, all experts included."""
        model = self.model
        experts = model.expert_params / model.top_experts * model.num_experts / model.expert_ranks
        drafter = model.draft_layers * 12.0 * model.hidden**2 + 5 * model.hidden**2
        return (model.active_params - model.expert_params + experts + drafter) * model.bytes_per_weight

    def verify_us(self, num_requests: int, num_tokens: int, depth: int) -> float:
        """Return microseconds of a target pass; tokens are padded to a graph size."""
        model = self.model
        padded = next(size for size in graph_sizes(num_tokens) if size >= num_tokens)
        dense = model.active_params - model.expert_params
        weights = (dense + self._experts_touched(padded)) * model.bytes_per_weight
        cache = num_requests * depth * model.kv_bytes_per_token
        operations = 2.0 * model.active_params * padded + model.attention_flops * num_tokens * depth
        return self._pass(weights + cache, operations, model.layers)

    def block_us(self, num_requests: int, depth: int) -> float:
        """Return microseconds of a DSpark block: context of the last tokens, backbone, output head, sequential head."""
        model = self.model
        layer = 12.0 * model.hidden**2
        backbone = model.draft_layers * layer + 5 * model.hidden**2
        head = float(model.vocab * model.hidden)
        rows = num_requests * model.gamma
        cache = num_requests * depth * model.draft_layers * model.kv_bytes_per_token / model.layers
        weights = (backbone + head) * model.bytes_per_weight
        block = self._pass(weights + cache, 2.0 * (backbone + head) * rows, model.draft_layers)
        chain_bytes = 2.0 * model.vocab * model.markov_rank
        chain_flops = 2.0 * model.vocab * model.markov_rank * num_requests
        step = max(chain_bytes / self._bytes_per_us, chain_flops / self._flops_per_us) + self._layer_us
        return block + model.gamma * step

    def mtp_us(self, num_requests: int, depth: int, draft_len: int) -> float:
        """Return microseconds of `draft_len` passes of a one-layer MTP module with the target's output head."""
        model = self.model
        layer = 12.0 * model.hidden**2 + 2 * model.hidden**2
        head = float(model.vocab * model.hidden)
        cache = num_requests * depth * model.kv_bytes_per_token / model.layers
        one = self._pass((layer + head) * model.bytes_per_weight + cache, 2.0 * (layer + head) * num_requests, layers=1)
        return draft_len * one

    def _experts_touched(self, num_tokens: int) -> float:
        """Return expert weights that a pass reads here: of E experts, those that some token of any GPU chose."""
        model = self.model
        if not model.expert_params:
            return 0.0
        share = model.top_experts / model.num_experts
        touched = model.num_experts * (1 - (1 - share) ** (num_tokens * model.expert_ranks))
        return model.expert_params / model.top_experts * touched / model.expert_ranks

    def _pass(self, num_bytes: float, operations: float, layers: int) -> float:
        work = max(num_bytes / self._bytes_per_us, operations / self._flops_per_us)
        return work + layers * self._layer_us + self.assumptions.pass_us


def estimated_table(roofline: Roofline, *, max_requests: int, gamma: int, mtp: int | None = None) -> CostTable:
    """Return a cost table over requests, tokens and depths.

    Args:
        roofline: model and GPU.
        max_requests: most requests.
        gamma: drafts of a request at most.
        mtp: drafts by an MTP module instead of the block.
    """
    roofline = Roofline(roofline.gpu, replace(roofline.model, gamma=gamma), roofline.assumptions)
    verify: dict[VerifyShape, float] = {}
    draft: dict[DraftShape, float] = {}
    width = gamma + 1
    counts = sorted({*(count for count in REQUESTS if count < max_requests), max_requests})
    for depth in DEPTHS:
        for count in counts:
            most = count * width
            sizes = graph_sizes(most)
            edges = {count, most, *sizes, *(size + 1 for size in sizes)}
            for tokens in sorted(edge for edge in edges if count <= edge <= most):
                micros = roofline.verify_us(count, tokens, depth)
                # Both ways to spread tokens over rows cost the same: packed rows, no padding.
                verify[VerifyShape(count, tokens, -(-tokens // count), depth)] = micros
                verify[VerifyShape(count, tokens, min(width, tokens - count + 1), depth)] = micros
            draft[DraftShape(count, depth)] = (
                roofline.block_us(count, depth) if mtp is None else roofline.mtp_us(count, depth, mtp)
            )
    return CostTable(verify, draft)


def parse_estimate(text: str) -> tuple[Gpu, ModelShape, int]:
    """Read `GPU:MODEL` or `NxGPU:MODEL`; return both and the number of GPUs.

    Raises:
        ConfigError: a name is not known.
    """
    device, _, model = text.partition(":")
    number, times, name = device.partition("x") if device[:1].isdigit() else ("", "", device)
    if name not in GPUS or model not in MODELS or (times and not (number.isdigit() and int(number))):
        raise ConfigError(
            f"estimate '{text}' is not known; use GPU:MODEL or NxGPU:MODEL with {', '.join(GPUS)} and "
            f"{', '.join(MODELS)}"
        )
    return GPUS[name], MODELS[model], int(number) if times else 1
