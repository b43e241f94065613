"""Messages of the engine process as frames: whatever an answer holds, its client hears something."""

from __future__ import annotations

import logging

from trtllm_dspark.errors import cut
from trtllm_dspark.serving.framing import Message, UnsendableMessage, pack

logger = logging.getLogger(__name__)


def frames_of(message: Message) -> list[bytes]:
    """Serialise one message; never raises for what is in it.

    Items that do not fit one frame together go in several. An item that fits no frame alone becomes an error of its own
    request, and so does a refusal; a message of no request is dropped.
    """
    try:
        return [pack(message)]
    except UnsendableMessage as error:
        reason = error
    items = message.get("items", ())
    if len(items) > 1:
        half = len(items) // 2
        return [frame for part in (items[:half], items[half:]) for frame in frames_of({**message, "items": part})]
    handle = items[0].get("id") if items else message.get("id")
    if not isinstance(handle, int):
        logger.error("a message of type %s is not sent: %s", cut(str(message["type"])), reason)
        return []
    logger.warning("the answer to a request is not sent: %s", reason)
    if "code" in message:
        code, text = cut(str(message["code"])), "the request is refused, and the reason is too long to be sent"
    else:
        code, text = "answer_too_large", "the answer fits no frame of the socket; stream it, or leave the prompt out"
    try:
        return [pack({"type": "error", "id": handle, "code": code, "message": text})]
    except UnsendableMessage:  # an integer beyond 64 bits came from no frame
        return []
