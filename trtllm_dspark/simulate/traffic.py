"""Traffic: when requests arrive, how long they are, and of which domain."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtllm_dspark.errors import ConfigError, UsageError

Ints = NDArray[np.int64]
_MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Attributes:
        time_s: seconds from the start; in a closed loop 0, since it is sent when another one ends.
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens it emits before it ends by itself.
        domain: whose acceptance it has.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    domain: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts.

    Attributes:
        kind: `fixed` (first), `uniform` (first to second) or `lognormal` (median first, sigma second); of the first two
            all numbers are whole.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    first: float
    second: float = 0.0

    @staticmethod
    def parse(text: str) -> Lengths:
        """Read `256`, `uniform:64:512` or `lognormal:256:0.6`.

        Raises:
            ConfigError: another form.
        """
        kind, *rest = text.strip().split(":")
        try:
            if not rest:
                return Lengths("fixed", _tokens(kind))
            if kind == "uniform" and len(rest) == 2 and _tokens(rest[0]) <= _tokens(rest[1]):
                return Lengths("uniform", _tokens(rest[0]), _tokens(rest[1]))
            if kind == "lognormal" and len(rest) == 2:
                return Lengths("lognormal", _positive(rest[0], least=1.0), _positive(rest[1], least=0.0))
        except ValueError:
            pass
        raise ConfigError(
            f"lengths '{text}' are not known; use N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, with tokens of at "
            "least 1 and N, LOW and HIGH whole"
        )

    def draw(self, count: int, generator: np.random.Generator) -> Ints:
        """Return [count] token counts of at least 1."""
        if self.kind == "fixed":
            return np.full(count, int(self.first), np.int64)
        if self.kind == "uniform":
            drawn: Ints = generator.integers(int(self.first), int(self.second) + 1, count)
            return drawn
        values = self.first * np.exp(self.second * generator.standard_normal(count))
        counts: Ints = np.clip(np.rint(values), 1, _MOST_TOKENS).astype(np.int64)
        return counts


@dataclass(frozen=True, slots=True)
class Process:
    """How requests arrive.

    Attributes:
        kind: `closed` (so many users, each sends its next request when its last one ends), `poisson` (requests a
            second), `bursty` (the same mean rate, in bursts) or `trace` (times of a file).
        rate: users, or requests a second.
        factor: `bursty` only: the rate inside a burst over the mean rate.
        period_s: `bursty` only: mean seconds from one burst to the next.
    """

    kind: Literal["closed", "poisson", "bursty", "trace"]
    rate: float = 0.0
    factor: float = 4.0
    period_s: float = 20.0

    @staticmethod
    def parse(text: str) -> Process:
        """Read `closed:USERS`, `poisson:RATE` or `bursty:RATE[:FACTOR[:PERIOD_S]]`.

        Raises:
            ConfigError: another form.
        """
        kind, *rest = text.strip().split(":")
        try:
            numbers = [_positive(part) for part in rest]
        except ValueError:
            numbers = []
        if kind == "closed" and len(numbers) == 1 and numbers[0] == int(numbers[0]):
            return Process("closed", numbers[0])
        if kind == "poisson" and len(numbers) == 1:
            return Process("poisson", numbers[0])
        if kind == "bursty" and 1 <= len(numbers) <= 3 and (len(numbers) == 1 or numbers[1] > 1):
            return Process("bursty", *numbers)
        raise ConfigError(
            f"traffic '{text}' is not known; use closed:USERS, poisson:RATE, bursty:RATE[:FACTOR[:PERIOD_S]] "
            "with a factor above 1, or a JSONL file"
        )

    def times(self, count: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return [count] ascending arrival times in seconds; all 0 in a closed loop."""
        if self.kind == "poisson":
            return np.cumsum(generator.exponential(1 / self.rate, count))
        if self.kind == "bursty":
            return self._bursts(count, generator)
        return np.zeros(count)

    def _bursts(self, count: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return arrivals of a Poisson process whose rate is high in bursts and low between them."""
        share = 1 / (2 * self.factor)  # of the time that is burst; half of all requests arrive in bursts
        high, low = self.rate * self.factor, self.rate * 0.5 / (1 - share)
        times: list[float] = []
        now, bursting = 0.0, False
        while len(times) < count:
            length = generator.exponential(self.period_s * (share if bursting else 1 - share))
            rate = high if bursting else low
            inside = np.sort(generator.random(generator.poisson(rate * length))) * length + now
            times += inside.tolist()
            now, bursting = now + length, not bursting
        return np.array(times[:count])


@dataclass(frozen=True)
class Traffic:
    """A whole load.

    Attributes:
        name: as given, for reports.
        process: how requests arrive.
        arrivals: the requests in order.
    """

    name: str
    process: Process
    arrivals: tuple[Arrival, ...]

    @property
    def users(self) -> int | None:
        """Users of a closed loop, or None."""
        return int(self.process.rate) if self.process.kind == "closed" else None


def make_traffic(
    process: Process,
    *,
    count: int,
    prompt: Lengths,
    output: Lengths,
    domains: Mapping[str, float],
    seed: int,
) -> Traffic:
    """Draw a load; the same arguments give the same one.

    Args:
        process: how requests arrive; not `trace`.
        count: requests.
        prompt: prompt lengths.
        output: output lengths.
        domains: domain -> weight.
        seed: of everything drawn.
    """
    generator = np.random.default_rng([seed, 7])
    times = process.times(count, generator).tolist()
    prompts, outputs = prompt.draw(count, generator).tolist(), output.draw(count, generator).tolist()
    names, weights = list(domains), np.array(list(domains.values()), np.float64)
    drawn = generator.choice(len(names), count, p=weights / weights.sum()).tolist()
    rows = zip(times, prompts, outputs, drawn, strict=True)
    arrivals = tuple(Arrival(t, p, o, names[d]) for t, p, o, d in rows)
    shape = {"closed": "{:g} users", "poisson": "{:g} requests/s", "bursty": "{:g} requests/s in bursts"}
    return Traffic(shape[process.kind].format(process.rate), process, arrivals)


def read_trace(path: Path, domains: Sequence[str]) -> Traffic:
    """Read a JSONL trace: `arrival_s`, `prompt_tokens`, `output_tokens` and, where it matters, `domain` a line.

    Raises:
        UsageError: the file cannot be read, or a line is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"trace {path} cannot be read ({error}); give a JSONL file") from error
    arrivals = sorted(_arrivals(lines, path, domains), key=lambda arrival: arrival.time_s)
    if not arrivals:
        raise UsageError(f"trace {path} holds no requests; give one JSON object a line")
    return Traffic(path.name, Process("trace"), tuple(arrivals))


def _arrivals(lines: Sequence[str], path: Path, domains: Sequence[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"trace {path} line {number}"
        try:
            row = json.loads(line)
            arrival = Arrival(
                float(row["arrival_s"]),
                _count(row["prompt_tokens"]),
                _count(row["output_tokens"]),
                str(row.get("domain", domains[0])),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"{where} needs the numbers arrival_s, prompt_tokens and output_tokens ({error})"
            ) from error
        if not (math.isfinite(arrival.time_s) and arrival.time_s >= 0):
            raise UsageError(f"{where}: arrival_s must be a number of at least 0")
        if arrival.domain not in domains:
            raise UsageError(f"{where} has the domain '{arrival.domain}'; the profile knows {', '.join(domains)}")
        yield arrival


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
        raise ValueError(f"{value!r} is no whole number from 1 to {_MOST_TOKENS}")
    return value


def _tokens(text: str) -> float:
    value = _positive(text, least=1.0)
    if not value.is_integer():
        raise ValueError(text)
    return value


def _positive(text: str, *, least: float = 1e-9) -> float:
    value = float(text)
    if not (math.isfinite(value) and least <= value <= _MOST_TOKENS):
        raise ValueError(text)
    return value
