"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from trtllm_dspark.errors import RequestError

_STATUS = {
    "model_not_found": 404,
    "body_too_large": 413,
    "deadline_exceeded": 408,
    "queue_full": 429,
    "cancelled": 499,
    "engine_failure": 500,
    "engine_unavailable": 503,
    "shutting_down": 503,
}


def status_of(code: str) -> int:
    """Return the HTTP status of an error code; a code without its own is the request's fault."""
    return _STATUS.get(code, 400)


def error_body(code: str, message: str, *, param: str | None = None) -> dict[str, Any]:
    """Return what OpenAI's clients parse."""
    status = status_of(code)
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class FrontError(RequestError):
    """A request is refused, or failed, with a code and the parameter at fault."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param
