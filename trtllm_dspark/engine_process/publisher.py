"""Turn a round's outputs into one `outputs` frame a connection, and count what they say."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from trtllm_dspark.engine_process.metrics import EngineMetrics
from trtllm_dspark.engine_process.streams import Send, Stream, StreamState
from trtllm_dspark.runtime.outputs import RequestOutput
from trtllm_dspark.runtime.stats import RequestStats
from trtllm_dspark.serving.framing import Message

_RECENT = 256

# Reasons a request ends early -> (finish reason in a normal last answer, or error code).
STOPPED = "stop_request"
_ERRORS = {
    "deadline": ("deadline_exceeded", "the request did not finish before its deadline"),
    "client": ("cancelled", "the client cancelled the request"),
    "disconnected": ("cancelled", "the client is gone"),
}


class Publisher:
    """Write answers; owns the per-request clocks.

    Args:
        metrics: where everything is counted.
        token_text: text of one token, for requests that want it.
    """

    def __init__(self, metrics: EngineMetrics, token_text: Callable[[int], str]) -> None:
        self._metrics = metrics
        self._token_text = token_text
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._clock_offset_ns = time.time_ns() - time.monotonic_ns()

    def publish(self, pairs: Sequence[tuple[Stream, RequestOutput]], now: float) -> None:
        """Send one frame a connection with one item a request that has something to say."""
        frames: dict[int, list[Message]] = defaultdict(list)
        senders: dict[int, Send] = {}
        for stream, output in pairs:
            item = self._item(stream, output, now)
            if item is not None:
                frames[stream.connection_id].append(item)
                senders[stream.connection_id] = stream.send
        for connection_id, items in frames.items():
            senders[connection_id]({"type": "outputs", "items": items})
        for stream, _ in pairs:
            if stream.state is StreamState.DONE:
                stream.release()

    def end(self, stream: Stream, reason: str) -> None:
        """Answer a request that was taken out of the session, or has not come so far.

        One that was running and is stopped by its id has its last answer in its lane's last output (`publish`).
        """
        stream.state = StreamState.DONE
        self._metrics.add("dspark_requests_cancelled", reason=reason)
        if reason == STOPPED:
            item = self._item_of(stream, *_whole(stream), "cancelled", None)
            stream.send({"type": "outputs", "items": [item]})
            stream.release()
        else:
            stream.fail(*_ERRORS[reason])

    def _item(self, stream: Stream, output: RequestOutput, now: float) -> Message | None:
        request = stream.request
        if request is None or (not output.new_token_ids and not output.text_delta and not output.finished):
            return None
        self._observe_tokens(stream, len(output.new_token_ids), now)
        text, tokens = output.text_delta, list(output.new_token_ids)
        logprobs = list(output.logprobs)
        if output.finished and output.finish_reason == "error":
            self._metrics.add("dspark_requests_failed", reason="request_failure")
            stream.state = StreamState.DONE
            # What went wrong is in the log; it may name paths, which are none of the client's business.
            message = "the engine failed while running this request; retry it"
            return {"id": stream.handle, "code": "engine_failure", "message": message}
        if not request.stream:
            stream.held_text.append(text)
            stream.held_tokens.extend(tokens)
            stream.held_logprobs.extend(logprobs)
            if not output.finished:
                return None
            text, tokens, logprobs = _whole(stream)
        if output.finished:
            stream.state = StreamState.DONE
            if output.finish_reason == "cancelled":
                self._metrics.add("dspark_requests_cancelled", reason=STOPPED)
            else:
                self._observe_finished(stream, output, now)
        reason = output.finish_reason if output.finished else None
        return self._item_of(stream, text, tokens, logprobs, reason, output.stats, output.stop_reason)

    def _item_of(
        self,
        stream: Stream,
        text: str,
        tokens: list[int],
        logprobs: list[float],
        finish_reason: str | None,
        stats: RequestStats | None,
        stop_reason: str | int | None = None,
    ) -> Message:
        request = stream.request
        echoed = len(request.prompt_token_ids) if request is not None and request.echo and not request.stream else 0
        item: Message = {"id": stream.handle, "text": text, "num_tokens": max(0, len(tokens) - echoed)}
        if request is not None and request.return_tokens:
            item["tokens"] = tokens
        if request is not None and request.return_token_texts:
            item["token_texts"] = [self._token_text(token) for token in tokens]
        if logprobs:
            item["logprobs"] = logprobs
        if finish_reason is not None:
            item["finish_reason"] = finish_reason
            if stop_reason is not None:
                item["stop_reason"] = str(stop_reason)
        if finish_reason is not None or (request is not None and request.return_stats):
            item["stats"] = self._stats(stream, stats)
        return item

    def _stats(self, stream: Stream, stats: RequestStats | None) -> Message:
        request = stream.request
        out: Message = {
            "num_prompt_tokens": len(request.prompt_token_ids) if request is not None else 0,
            "times_ns": [
                0 if moment is None else int(moment * 1e9) + self._clock_offset_ns
                for moment in (stream.arrival, stream.scheduled_at, stream.first_token_at, stream.last_token_at)
            ],
        }
        if stats is not None:
            out.update(stats.acceptance.as_json())
        return out

    def _observe_tokens(self, stream: Stream, count: int, now: float) -> None:
        if not count:
            return
        if stream.first_token_at is None:
            stream.first_token_at = now
            self._metrics.observe("dspark_time_to_first_token_seconds", now - stream.arrival)
        elif stream.last_token_at is not None:
            self._metrics.observe("dspark_inter_token_seconds", (now - stream.last_token_at) / count)
        stream.last_token_at = now
        stream.num_output_tokens += count
        self._metrics.add("dspark_output_tokens", count)

    def _observe_finished(self, stream: Stream, output: RequestOutput, now: float) -> None:
        metrics, counts = self._metrics, output.stats.acceptance
        metrics.add("dspark_requests_finished", reason=str(output.finish_reason))
        metrics.observe("dspark_request_seconds", now - stream.arrival)
        metrics.observe("nv_llm_output_token_len", stream.num_output_tokens)
        metrics.add("dspark_drafted_tokens", counts.drafted)
        metrics.add("dspark_verified_tokens", counts.verified)
        metrics.add("dspark_accepted_tokens", counts.accepted)
        metrics.add("dspark_verify_rounds", counts.rounds)
        metrics.add("dspark_verify_emitted_tokens", counts.emitted)
        metrics.add_positions("dspark_verified_at_position", counts.verified_per_position)
        metrics.add_positions("dspark_accepted_at_position", counts.accepted_per_position)
        if counts.rounds:
            self._recent.append((counts.emitted, counts.rounds))
            metrics.set("dspark_accepted_len", sum(e for e, _ in self._recent) / sum(r for _, r in self._recent))


def _whole(stream: Stream) -> tuple[str, list[int], list[float]]:
    """Return text, tokens and log probabilities held for one answer at the end, behind the prompt if it is echoed."""
    text, tokens, request = "".join(stream.held_text), stream.held_tokens, stream.request
    if request is not None and request.echo and not request.stream:
        text, tokens = request.prompt_text + text, [*request.prompt_token_ids, *tokens]
    return text, tokens, stream.held_logprobs
