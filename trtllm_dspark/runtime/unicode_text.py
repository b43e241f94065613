"""Text that a tokenizer and an output can hold."""

from __future__ import annotations

from trtllm_dspark.errors import RequestError


def check_unicode(name: str, text: str, *, code: str) -> None:
    """Refuse half a surrogate pair: JSON escapes and bytes of a command line can make one, UTF-8 cannot hold it.

    Args:
        name: what the text is, for the message.
        text: any text.
        code: of the error.

    Raises:
        RequestError: the text is not valid Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: character {error.start} is half a surrogate pair; remove it", code=code
        ) from error
