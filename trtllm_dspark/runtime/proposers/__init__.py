"""What proposes drafts, behind one interface: the engine's drafter, prompt lookup, another model."""

from trtllm_dspark.runtime.proposers.autoregressive import AutoregressiveProposer
from trtllm_dspark.runtime.proposers.base import AcceptanceMode, Draft, Proposer, ProposerFactory
from trtllm_dspark.runtime.proposers.block import BlockProposer
from trtllm_dspark.runtime.proposers.draft_model import DraftModelProposer
from trtllm_dspark.runtime.proposers.engine_ngram import EngineNgramProposer
from trtllm_dspark.runtime.proposers.ngram import NgramProposer
from trtllm_dspark.runtime.proposers.outside import OutsideDrafter
from trtllm_dspark.runtime.proposers.own import keeps_tables, own_proposer

__all__ = [
    "AcceptanceMode",
    "AutoregressiveProposer",
    "BlockProposer",
    "Draft",
    "DraftModelProposer",
    "EngineNgramProposer",
    "NgramProposer",
    "OutsideDrafter",
    "Proposer",
    "ProposerFactory",
    "keeps_tables",
    "own_proposer",
]
