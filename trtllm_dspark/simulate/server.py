"""What a simulated server is made of: limits, times, and how a policy drafts on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtllm_dspark.errors import ConfigError
from trtllm_dspark.speculation import CostTable, SpeculationConfig


@dataclass(frozen=True)
class Server:
    """One replica: an engine, its limits and its times.

    Attributes:
        name: shown in reports.
        table: times of its passes with its own drafter.
        estimated: whether the times come from public figures and not from a measurement.
        max_batch_size: slots; a request holds one from admission to its end.
        max_seq_len: prompt and output tokens of a request at most; the memory of a slot.
        max_num_tokens: tokens of a round at most.
        max_draft_len: gamma of its drafter.
        max_queue_size: requests that may wait; further ones are refused.
        shared_prefill: whether prompt chunks share the target pass with decoding rows; else they run as their own.
        host_us: microseconds a round takes beside the passes.
        host_request_us: microseconds more for every decoding request.
        host_token_us: microseconds more for every token of the round's decoding rows (choosing tokens among logits).
        prefill_us: microseconds of a pass over prompt chunks alone, and more for every token of them, where these were
            measured; None = what the table says of so many tokens.
        ragged_us: microseconds a target pass takes more when not every request verifies its whole block, where whole
            blocks have a faster path of their own.
        absorb_us: microseconds for every token that the drafter's context absorbs beyond the one a drafting request
            that the table's draft times have in them: prompts, further tokens of a round, what a bypass has put off.
        drafters: policies that draft by other means than the server's own drafter, by name: their times.
    """

    name: str
    table: CostTable
    estimated: bool
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int
    max_queue_size: int = 100_000
    shared_prefill: bool = False
    host_us: float = 0.0
    host_request_us: float = 0.0
    host_token_us: float = 0.0
    prefill_us: tuple[float, float] | None = None
    ragged_us: float = 0.0
    absorb_us: float = 0.0
    drafters: Mapping[str, CostTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seq_len", "max_num_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"server '{self.name}': {name} must be at least 1")
        if self.max_num_tokens <= self.max_batch_size:
            raise ConfigError(
                f"server '{self.name}': max_num_tokens {self.max_num_tokens} must exceed max_batch_size "
                f"{self.max_batch_size}, or prompts never advance"
            )

    def table_of(self, policy: Policy) -> CostTable:
        """Return the times under a policy.

        Raises:
            ConfigError: it drafts by means this server has no times for.
        """
        if not policy.drafter:
            return self.table
        if policy.drafter not in self.drafters:
            raise ConfigError(
                f"policy '{policy.name}' needs times of its own drafter and {self.name} has none; "
                "use an estimated cost table, or a policy without mtp"
            )
        return self.drafters[policy.drafter]


@dataclass(frozen=True)
class Policy:
    """How drafts are made and verified.

    Attributes:
        name: as given and shown: `off`, `fixed:5`, `mtp1`, `adaptive`.
        speculation: what the serving code is configured with.
        drafter: "" for the server's own drafter, or a name in `Server.drafters`.
        full_below: while at most so many requests decode, whole blocks are verified whatever the confidences say; it
            depends on their number only, so it changes no token's law.
    """

    name: str
    speculation: SpeculationConfig
    drafter: str = ""
    full_below: int = 0

    @staticmethod
    def parse(text: str) -> Policy:
        """Read a `--speculation` form, with `/full:N` behind it for whole blocks while at most N requests decode.

        `mtpK` stands for K drafts by a one-layer MTP module applied K times.

        Raises:
            ConfigError: another form.
        """
        name = text.strip()
        if name.startswith("mtp"):
            if not name[3:].isdigit() or int(name[3:]) < 1:
                raise ConfigError(f"policy '{text}' is not known; mtp takes the number of drafts, as in mtp1")
            return Policy(name, SpeculationConfig("fixed", draft_len=int(name[3:])), drafter=name)
        form, slash, rest = name.partition("/")
        word, _, number = rest.partition(":")
        if slash and not (word == "full" and number.isdigit()):
            raise ConfigError(f"policy '{text}' is not known; what follows the slash must be full:N")
        return Policy(name, SpeculationConfig.parse(form), full_below=int(number) if slash else 0)


def parse_policies(text: str) -> list[Policy]:
    """Read policies separated by commas, each once."""
    return [Policy.parse(part) for part in dict.fromkeys(part.strip() for part in text.split(","))]
