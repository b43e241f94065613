"""Load a running `trtllm-dspark serve` over HTTP with many streams that join, end and leave at random.

Usage: load_serving.py --url 127.0.0.1:8000 --launcher_pid PID [--seconds 120] [--streams 64] [--cancel 0.1]
    [--sampled 0.3] [--metrics_port 8002] [--no_compare]

New requests begin for `--seconds`; then the open ones run to their ends, every finished request is sent once more,
alone, and must give the same text. `--sampled` draws seeds and a temperature for a part of the requests; for those the
server must run with `--acceptance coupled`. Prints one JSON line: tokens a second of the first `--seconds`, CPU time a
token of the engine process, of the rest of the server and of this client over the whole run, time to the first event,
outputs that differ, slots in use at the end, and the resident memory and /dev/shm of all server processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_dspark.serving.children import children_of, command_line

MODELS = ("ensemble", "tensorrt_llm_bls")


@dataclass
class Load:
    """Counters of one run; `tokens_in_time` leaves out what came after the last request could begin."""

    tokens: int = 0
    tokens_in_time: int = 0
    finished: int = 0
    cancelled: int = 0
    texts: list[tuple[Job, str]] = field(default_factory=list)
    first_event_s: list[float] = field(default_factory=list)
    cpu_s: CpuSeconds | None = None
    memory_kb: list[int] = field(default_factory=list)
    shm_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: str
    max_tokens: int
    model: str
    leave_after: int | None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """Return the JSON fields of a streaming request."""
        sampling = {"temperature": self.temperature, "seed": self.seed} if self.temperature else {}
        ends = {"end_id": -1} if self.ignore_eos else {}
        return {
            "text_input": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": True,
            "return_num_output_tokens": True,
            **sampling,
            **ends,
        }


class _Events(asyncio.Protocol):
    """One request on its own connection; it cuts events out of whole reads, since it shares the server's cores."""

    def __init__(self, request: bytes, job: Job, load: Load) -> None:
        self._request, self._job, self._load = request, job, load
        self._rest = b""
        self._texts: list[str] = []
        self._events = 0
        self._started = time.monotonic()
        self._transport: asyncio.Transport | None = None
        self.text: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take in every complete event; each arrives in an HTTP chunk of its own."""
        if not self._events and not self._rest and not data.startswith(b"HTTP/1.1 200 "):
            self._end(f"error: {data.decode(errors='replace')}")
            return
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            begin = event.find(b"data: ")
            if begin >= 0 and not self._event(json.loads(event[begin + 6 :])):
                return
        if self._rest.endswith(b"\r\n0\r\n\r\n"):
            self._end("".join(self._texts))

    def connection_lost(self, error: Exception | None) -> None:
        """Return what came so far, as a client that reads to the end does."""
        self._end("".join(self._texts))

    def _event(self, event: dict[str, Any]) -> bool:
        if "error" in event:
            self._end(f"error: {event['error']}")
            return False
        if not self._events:
            self._load.first_event_s.append(time.monotonic() - self._started)
        self._events += 1
        self._load.tokens += event["num_output_tokens"]
        self._texts.append(event["text_output"])
        if self._job.leave_after is not None and self._events >= self._job.leave_after:
            self._end(None)
            return False
        return True

    def _end(self, text: str | None) -> None:
        if not self.text.done():
            self.text.set_result(text)
            if self._transport is not None:
                self._transport.close()


async def stream(address: tuple[str, int], job: Job, load: Load) -> str | None:
    """Run one request; return its text, or None when it left early."""
    body = json.dumps(job.fields).encode()
    head = f"POST /v2/models/{job.model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    _, events = await asyncio.get_running_loop().create_connection(
        lambda: _Events(head.encode() + body, job, load), *address
    )
    return await events.text


def random_job(generator: random.Random, max_tokens: int, cancel: float, sampled: float) -> Job:
    """Draw a request."""
    prompt = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=generator.randrange(1, 40)))
    leave = generator.randrange(1, 20) if generator.random() < cancel else None
    temperature = generator.choice((0.7, 3.0, 6.0)) if generator.random() < sampled else 0.0
    return Job(
        prompt, generator.randrange(1, max_tokens), generator.choice(MODELS), leave, temperature,
        generator.randrange(1 << 40),
    )  # fmt: skip


async def client(
    address: tuple[str, int], generator: random.Random, until: float, load: Load, draw: Callable[[random.Random], Job]
) -> None:
    """Send one request after another."""
    while time.monotonic() < until:
        job = draw(generator)
        text = await stream(address, job, load)
        if text is None:
            load.cancelled += 1
            continue
        load.finished += 1
        load.texts.append((job, text))
        if generator.random() < 0.1:
            await asyncio.sleep(generator.random() * 0.2)


async def differences(address: tuple[str, int], texts: Sequence[tuple[Job, str]]) -> list[str]:
    """Send requests again, one at a time, and describe those whose text is another one."""
    found = []
    for job, text in texts:
        alone = await stream(address, job, Load())
        if alone != text:
            found.append(f"{job}: {text[:200]!r} became {(alone or '')[:200]!r}")
    return found


def gauges(host: str, port: int) -> dict[str, float]:
    """Return what runs and waits now."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10.0) as response:
        text = response.read().decode()
    found = re.findall(r"^dspark_requests_(running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)
    return {f"{name}_at_the_end": float(value) for name, value in found}


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    return [pid, *(below for child in children_of(pid) for below in tree(child))]


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU time spent so far, user and system."""

    engine: float
    rest: float
    client: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        """Return what was spent after `before`."""
        return CpuSeconds(self.engine - before.engine, self.rest - before.rest, self.client - before.client)


def cpu_seconds(launcher_pid: int) -> CpuSeconds:
    """Return the CPU time of the engine process, of the launcher's other processes, and of this process."""
    engine = rest = 0.0
    for pid in tree(launcher_pid):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if "trtllm_dspark.engine_process" in command_line(pid):
            engine += spent
        else:
            rest += spent
    return CpuSeconds(engine, rest, time.process_time())


def memory_kb(pid: int) -> int:
    """Return the resident memory of a process tree without what it shares through /dev/shm."""
    total = 0
    for process in tree(pid):
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith(("RssAnon", "RssFile")):
                total += int(line.split()[1])
    return total


async def sample(pid: int, until: float, load: Load) -> None:
    """Note memory once a second."""
    while time.monotonic() < until:
        await asyncio.sleep(1.0)
        load.memory_kb.append(memory_kb(pid))
        # Only this launcher's regions: other servers of the machine come and go.
        regions = Path("/dev/shm").glob(f"trtllm_dspark_{pid}_*")
        load.shm_bytes.append(sum(path.stat().st_size for path in regions))


async def run(
    address: tuple[str, int],
    launcher_pid: int,
    *,
    seconds: float,
    streams: int,
    cancel: float = 0.1,
    max_tokens: int = 400,
    sampled: float = 0.0,
    seed: int = 1,
) -> Load:
    """Load the server and return what happened.

    Args:
        address: host and HTTP port.
        launcher_pid: root of the server's processes.
        seconds: new requests are sent for this long.
        streams: concurrent clients.
        cancel: fraction of requests whose client leaves early.
        max_tokens: largest max_tokens drawn.
        sampled: fraction of requests with a seed and a temperature.
        seed: of the traffic.
    """
    load = Load()
    before = cpu_seconds(launcher_pid)
    until = time.monotonic() + seconds

    def draw(generator: random.Random) -> Job:
        return random_job(generator, max_tokens, cancel, sampled)

    async def count() -> None:
        await asyncio.sleep(until - time.monotonic())
        load.tokens_in_time = load.tokens

    clients = [client(address, random.Random(f"{seed} {index}"), until, load, draw) for index in range(streams)]
    await asyncio.gather(sample(launcher_pid, until, load), count(), *clients)
    load.cpu_s = cpu_seconds(launcher_pid).since(before)
    return load


def summary(load: Load, seconds: float) -> dict[str, Any]:
    """Return the figures of a run."""
    spent = load.cpu_s or CpuSeconds(0.0, 0.0, 0.0)
    quarter = max(1, len(load.memory_kb) // 4)
    early, late = load.memory_kb[quarter : 2 * quarter], load.memory_kb[-quarter:]
    return {
        "tokens_per_s": round(load.tokens_in_time / seconds),
        "cpu_us_per_token": {
            part: round(1e6 * value / load.tokens, 1)
            for part, value in (("engine", spent.engine), ("rest", spent.rest), ("client", spent.client))
        },
        "finished": load.finished,
        "cancelled": load.cancelled,
        "first_event_ms_p50": round(1e3 * statistics.median(load.first_event_s), 1),
        "memory_drift": round(statistics.mean(late) / statistics.mean(early) - 1, 4) if early and late else None,
        "memory_mb": round(statistics.mean(late) / 1024, 1) if late else None,
        "shm_mb": [load.shm_bytes[0] >> 20, load.shm_bytes[-1] >> 20] if load.shm_bytes else None,
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="127.0.0.1:8000")
    parser.add_argument("--launcher_pid", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--cancel", type=float, default=0.1)
    parser.add_argument("--max_tokens", type=int, default=400)
    parser.add_argument("--sampled", type=float, default=0.0)
    parser.add_argument("--metrics_port", type=int, help="also report the slots in use and the queue at the end")
    parser.add_argument("--no_compare", action="store_true", help="do not send every request again")
    args = parser.parse_args()
    host, _, port = args.url.partition(":")
    address = (host, int(port))
    load = asyncio.run(
        run(address, args.launcher_pid, seconds=args.seconds, streams=args.streams, cancel=args.cancel,
            max_tokens=args.max_tokens, sampled=args.sampled)
    )  # fmt: skip
    figures = summary(load, args.seconds)
    if not args.no_compare:
        found = asyncio.run(differences(address, load.texts))
        figures |= {"compared": len(load.texts), "different": len(found)}
        print("\n".join(found[:10]), file=sys.stderr)
    if args.metrics_port is not None:
        time.sleep(2.0)  # the gauges lag by half a second, a client that left by a round
        figures |= gauges(host, args.metrics_port)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
