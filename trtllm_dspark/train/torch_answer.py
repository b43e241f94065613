"""Answer prompts with the target in PyTorch and capture on the way what training needs of it.

The features of a token and the target's distribution behind it are there when the token is generated; running the
sequence again to capture them would cost as much as generating it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from trtllm_dspark.engine.base import EngineLimits
from trtllm_dspark.runtime import Request, Tokenizer
from trtllm_dspark.train.answer import Answer, Stop
from trtllm_dspark.train.features import Captured, compress, likeliest
from trtllm_dspark.train.torch_target import Slots, TorchTarget

_REFILL_SHARE = 16
"""A pass over prompts waits until one slot in this many is free, so that its products are large."""
_REFILL_TOKENS = 4096
"""Tokens of prompts in one pass, the last one's excepted: what bounds its memory."""
_MAX_ENDED = 64
"""Answers that wait to be written: a slow disk holds the threads up and not more and more answers."""
Ended = Queue["Answer | BaseException | None"]

_CELL = 256
"""Tokens whose probabilities are summed before one is drawn."""


@dataclass(slots=True)
class _Job:
    """A request in a slot."""

    request: Request
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    features: list[NDArray[np.float16]] = field(default_factory=list)
    scales: list[NDArray[np.float32]] = field(default_factory=list)
    top_ids: list[NDArray[np.int32]] = field(default_factory=list)
    top_probs: list[NDArray[np.float16]] = field(default_factory=list)

    def captured(self) -> Captured:
        return Captured(
            np.concatenate(self.features),
            np.concatenate(self.scales),
            np.stack(self.top_ids),
            np.stack(self.top_probs),
        )


class TorchAnswerer:
    """Threads that answer in batches of their own, single-threaded inside.

    A request's draws follow from its seed. The products of a batch round as its size has it, so where two tokens are
    all but equally likely the answer may depend on what shares the batch: fine for training data, not for serving.

    Args:
        load: loads the target, when there is something to answer.
        tokenizer: of it.
        limits: what a request must fit; slots hold `limits.max_seq_len` tokens.
        num_threads: threads.
        draft_token_ids: [Vd] target ids whose probabilities are captured, or None for all.
        top_k: probabilities captured a token.
    """

    def __init__(
        self,
        load: Callable[[], TorchTarget],
        tokenizer: Tokenizer,
        limits: EngineLimits,
        *,
        num_threads: int,
        draft_token_ids: NDArray[np.int64] | None,
        top_k: int,
    ) -> None:
        self._load, self._tokenizer, self._limits = load, tokenizer, limits
        self._target: TorchTarget | None = None
        self._num_threads, self._top_k = num_threads, top_k
        self._draft_ids = None if draft_token_ids is None else torch.from_numpy(np.asarray(draft_token_ids))

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the target."""
        return self._tokenizer

    @property
    def limits(self) -> EngineLimits:
        """What a request must fit."""
        return self._limits

    def close(self) -> None:
        """Drop the weights."""
        self._target = None

    def answers(
        self, requests: Iterable[Request], batch_size: int, *, stop: Stop, keep_features: bool
    ) -> Iterator[Answer]:
        """Yield each request's answer as it ends."""
        waiting = deque(requests)
        if not waiting or stop():
            return
        num_slots = min(batch_size, len(waiting))
        num_threads = min(self._num_threads, num_slots)
        widths = [(num_slots + place) // num_threads for place in range(num_threads)]
        ended: Ended = Queue(_MAX_ENDED)
        quit_ = threading.Event()
        target = self._target = self._target or self._load()

        def work(width: int) -> None:
            try:
                torch.set_num_threads(1)
                _Worker(self, target, width, keep_features).run(waiting, ended, quit_)
            except BaseException as error:  # handed to the caller's thread
                ended.put(_named(error))
            finally:
                ended.put(None)

        threads = [threading.Thread(target=work, args=(width,), daemon=True) for width in widths]
        with _half_products(target.dtype == torch.bfloat16):
            try:
                for thread in threads:
                    thread.start()
                yield from _until(ended, num_threads, stop, quit_)
            finally:
                quit_.set()
                while any(thread.is_alive() for thread in threads):
                    # Nobody reads any more, and a thread may wait for room.
                    with contextlib.suppress(Empty):
                        ended.get(timeout=0.05)

    def tops(self, logits: torch.Tensor) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return ids and probabilities that are kept of logits [n, V]."""
        return likeliest(logits, self._draft_ids, self._top_k)

    def over(self, job: _Job) -> bool:
        """Whether a request has its last token."""
        length = len(job.request.prompt_token_ids) + len(job.tokens)
        return (
            job.tokens[-1] in self._tokenizer.eos_token_ids
            or len(job.tokens) >= job.request.params.max_tokens
            or length >= self._limits.max_seq_len
        )


class _Worker:
    """One thread's batch."""

    def __init__(self, owner: TorchAnswerer, target: TorchTarget, num_slots: int, keep: bool) -> None:
        self._owner, self._keep = owner, keep
        self._slots = Slots(target, num_slots, owner.limits.max_seq_len)
        self._jobs: list[_Job | None] = [None] * num_slots
        self._ids = torch.zeros(num_slots, dtype=torch.int64)
        self._lengths = torch.zeros(num_slots, dtype=torch.int64)

    def run(self, waiting: deque[Request], ended: Ended, quit_: threading.Event) -> None:
        """Answer until nothing waits."""
        count = len(self._jobs)
        while not quit_.is_set():
            free = [slot for slot, job in enumerate(self._jobs) if job is None]
            if len(free) == count or len(free) * _REFILL_SHARE >= count:
                self._refill(free, waiting, ended)
            if not any(self._jobs):
                if not waiting:
                    return
                continue  # all had one token to go
            logits, features = self._slots.extend(self._ids, self._lengths)
            busy = [slot for slot, job in enumerate(self._jobs) if job is not None]
            self._lengths[busy] += 1
            if self._keep:
                rows, scales = compress(features.numpy())
                for slot in busy:
                    self._record(slot, rows[slot : slot + 1], scales[slot : slot + 1])
            self._advance(busy, logits[busy], ended)

    def _refill(self, free: list[int], waiting: deque[Request], ended: Ended) -> None:
        slots: list[int] = []
        prompts: list[Sequence[int]] = []
        for slot in free:
            if sum(map(len, prompts)) >= _REFILL_TOKENS:
                break
            try:
                request = waiting.popleft()  # one deque serves all threads
            except IndexError:
                break
            self._jobs[slot] = _Job(request, np.random.default_rng(request.params.seed))
            slots.append(slot)
            prompts.append(request.prompt_token_ids)
            self._lengths[slot] = len(request.prompt_token_ids)
        if not slots:
            return
        logits, features = self._slots.begin(slots, prompts)
        if self._keep:
            for slot, rows in zip(slots, features, strict=True):
                self._record(slot, *compress(rows.numpy()))
        self._advance(slots, logits, ended)

    def _record(self, slot: int, features: NDArray[np.float16], scales: NDArray[np.float32]) -> None:
        job = self._jobs[slot]
        assert job is not None
        job.features.append(features)
        job.scales.append(scales)

    def _advance(self, slots: list[int], logits: torch.Tensor, ended: Ended) -> None:
        """Draw the next token of each slot from its row of logits; hand over what has ended."""
        drawn = _draw(logits, [self._jobs[slot] for slot in slots])
        tops = self._owner.tops(logits) if self._keep else None
        for row, slot in enumerate(slots):
            job = self._jobs[slot]
            assert job is not None
            job.tokens.append(drawn[row])
            self._ids[slot] = job.tokens[-1]
            if tops is not None:
                job.top_ids.append(tops[0][row])
                job.top_probs.append(tops[1][row])
            if self._owner.over(job):
                ended.put(Answer(job.request, job.tokens, job.captured() if self._keep else None))
                self._jobs[slot], self._lengths[slot], self._ids[slot] = None, 0, 0


def _draw(logits: torch.Tensor, jobs: Sequence[_Job | None]) -> list[int]:
    """Return a token for each row of logits [n, V]: the likeliest, or one drawn at the request's temperature."""
    tokens: list[int] = logits.numpy().argmax(-1).tolist()
    sampled = [(row, job) for row, job in enumerate(jobs) if job is not None and not job.request.params.greedy]
    if not sampled:
        return tokens
    rows = [row for row, _ in sampled]
    temperatures = torch.tensor([job.request.params.temperature for _, job in sampled])
    scaled = logits[rows] / temperatures[:, None]
    scaled = F.pad(scaled, (0, -scaled.shape[1] % _CELL), value=float("-inf"))
    cells = torch.softmax(scaled, -1).view(len(rows), -1, _CELL).numpy()
    # First the cell, then the token in it: a running sum over the vocabulary costs more than a layer.
    sums = cells.sum(-1, dtype=np.float64).cumsum(-1)
    for place, (row, job) in enumerate(sampled):
        point = job.rng.random() * sums[place, -1]
        cell = int(np.searchsorted(sums[place], point, side="right"))
        inside = cells[place, cell].cumsum(dtype=np.float64)
        rest = point - (sums[place, cell - 1] if cell else 0.0)
        # Never past the last token that has a probability, whatever the two sums round to.
        last = int(np.flatnonzero(cells[place, cell])[-1])
        tokens[row] = cell * _CELL + min(int(np.searchsorted(inside, rest, side="right")), last)
    return tokens


def _until(ended: Ended, num_threads: int, stop: Stop, quit_: threading.Event) -> Iterator[Answer]:
    """Yield what the threads hand over until all have ended or `stop`."""
    while num_threads:
        if stop():
            quit_.set()
        try:
            item = ended.get(timeout=0.2)
        except Empty:
            continue
        if item is None:
            num_threads -= 1
        elif isinstance(item, BaseException):
            raise item
        else:
            yield item


def _named(error: BaseException) -> BaseException:
    """Return the error that says what PyTorch means."""
    if isinstance(error, RuntimeError) and "not enough memory" in str(error):
        return MemoryError("the target's answers do not fit the memory; lower --batch_size")
    return error


@contextlib.contextmanager
def _half_products(enabled: bool) -> Iterator[None]:
    """Let products of float32 round their factors to bfloat16, as the layers do; sums and results stay float32."""
    # PyTorch has no bfloat16 product with a float32 result on the CPU: this switch is the way to it.
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    try:
        if enabled:
            switch.fp32_precision = "bf16"
        yield
    finally:
        switch.fp32_precision = before
