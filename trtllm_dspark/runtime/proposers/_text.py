"""What proposers that read tokens only have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from trtllm_dspark.engine.base import Engine
from trtllm_dspark.runtime.active import ActiveRequest
from trtllm_dspark.runtime.proposers.draft_len import checked_draft_len
from trtllm_dspark.runtime.timing import PassTimer

Text = TypeVar("Text")


class TextProposer(ABC, Generic[Text]):
    """Keep a text for each request, made from its prompt when it is first looked at.

    Args:
        engine: the target.
        timer: counts what drafting takes.
        max_draft_len: drafts a round; None = the engine's block, or 7 without one.

    Raises:
        ConfigError: so many drafts do not fit a pass.
    """

    def __init__(self, engine: Engine, timer: PassTimer, max_draft_len: int | None) -> None:
        self._draft_len = checked_draft_len(engine, max_draft_len)
        self._timer = timer
        self._texts: dict[ActiveRequest, Text] = {}

    @property
    def draft_len(self) -> int:
        """Drafts of one request proposed in a round at most."""
        return self._draft_len

    @property
    def has_confidence(self) -> bool:
        """Each of them says how likely its drafts are."""
        return True

    @property
    def needs_features(self) -> bool:
        """It reads tokens only."""
        return False

    def forget(self, request: ActiveRequest) -> None:
        """Drop the request's text."""
        self._texts.pop(request, None)

    def close(self) -> None:
        """Drop all texts."""
        self._texts.clear()

    @abstractmethod
    def _new_text(self, prompt: list[int]) -> Text:
        """Return what is kept for a request of this prompt."""

    def _text(self, request: ActiveRequest) -> Text:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = self._new_text(request.prompt.tolist())
        return text
