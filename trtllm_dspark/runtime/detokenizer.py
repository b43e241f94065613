"""Token ids to text, a few tokens at a time, never cutting a character in two."""

from __future__ import annotations

import codecs

from trtllm_dspark.checkpoint.token_bytes import TokenBytes


class Detokenizer:
    """Turn a growing list of token ids into text.

    A character whose bytes are spread over tokens appears with its last byte. Bytes that can never become a character
    appear as U+FFFD once the following byte shows it; bytes of a character that the output ends inside of are dropped.

    Args:
        token_bytes: bytes of one token; special tokens have none.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that became complete with this token."""
        return self._decoder.decode(self._token_bytes(token_id))
