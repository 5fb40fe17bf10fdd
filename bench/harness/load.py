"""HTTP load on a service: a closed loop, an open loop, and a tally of the results.

- `closed_loop` keeps a fixed number of requests in flight: when a request is answered, the next one is sent.
- `open_loop` sends each request when it is due, whether or not earlier ones were answered, so a slow server cannot hide
  its queue.
- `CallTally` counts each answered call exactly once, as correct, mismatched or unavailable. All other calls are lost.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgpack

from bench.harness.command import BenchFailed
from bench.workloads.checked_calls import CheckedCall
from sandbox.client import AsyncClient, Call

WHOLE: dict[str, Callable[[bytes], Any]] = {"application/json": json.loads, "application/msgpack": msgpack.unpackb}
"""Content types of a whole response, and how each is decoded."""
MSGPACK_STREAM, JSON_LINES = "application/x-msgpack-stream", "application/x-ndjson"
STREAMED = (JSON_LINES, MSGPACK_STREAM)
"""Content types of a streamed response: one item per call, as calls end."""

ERRORS = ("lost", "doubled", "mismatched")
"""Counts of a `CallTally` that must be 0 on every server."""

Request = TypeVar("Request")
OnAnswer = Callable[[], object]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The times of one answered call."""

    group: str
    latency_ms: float
    """Time from the request to the answer. In an open loop, the time from the moment at which the call was due."""
    cpu_ms: float
    """CPU time of the call's own processes."""


@dataclass(slots=True)
class CallTally:
    """The results of the calls of one load, counted."""

    calls: int = 0
    """Calls to be sent. Calls without an answer are lost."""
    correct: int = 0
    mismatched: int = 0
    """Calls with another result than the expected one."""
    doubled: int = 0
    """Answers beyond a call's first one in the same response."""
    unavailable: Counter[str] = field(default_factory=Counter)
    """Calls that ended as `unavailable`, by error type. Only loads that tolerate such calls count them here; for others
    they are mismatched."""
    retried: int = 0
    """Calls that the service ran more than once."""
    resent: int = 0
    """Requests that were repeated because a connection broke."""
    statuses: Counter[str] = field(default_factory=Counter)
    times: list[CallTimes] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    """Descriptions of wrong results."""

    @property
    def answered(self) -> int:
        return self.correct + self.mismatched + self.unavailable.total()

    @property
    def lost(self) -> int:
        return self.calls - self.answered

    @property
    def errors(self) -> dict[str, int]:
        """The counts that `ERRORS` names."""
        return {name: getattr(self, name) for name in ERRORS}

    def record(
        self, call: CheckedCall, result: Mapping[str, Any], latency_s: float, *, allow_unavailable: bool = False
    ) -> None:
        """Count the first answer to a call."""
        self.statuses[result["status"]] += 1
        self.retried += result["attempts"] > 1
        self.times.append(CallTimes(call.group, latency_s * 1e3, result["usage"]["cpu_ms"]))
        if allow_unavailable and result["status"] == "unavailable" and result["id"] == call.call.get("id", ""):
            self.unavailable[(result["error"] or {}).get("type", "?")] += 1
        elif call.matches(result):
            self.correct += 1
        else:
            self.mismatched += 1
            self.examples.append(f"expected {call}, got {result}")

    def latencies_ms(self, groups: Iterable[str] | None = None) -> list[float]:
        """Latencies of the calls of some groups, or of all."""
        chosen = None if groups is None else set(groups)
        return [times.latency_ms for times in self.times if chosen is None or times.group in chosen]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Calls that go out in one request, encoded before the clock starts."""

    calls: Sequence[CheckedCall]
    body: bytes
    accept: str


def encoded_batches(calls: Sequence[CheckedCall], size: int, accepts: Sequence[str]) -> list[EncodedBatch]:
    """The calls in batches of `size`. The batches use the content types in `accepts` in turn."""
    parts = [calls[start : start + size] for start in range(0, len(calls), size)]
    return [
        EncodedBatch(part, encode_calls([call.call for call in part]), accepts[number % len(accepts)])
        for number, part in enumerate(parts)
    ]


@asynccontextmanager
async def http_session(connect_timeout_s: float | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """A client without limits on connections and on the time of a request."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        yield http


@dataclass(slots=True)
class Answers:
    """Statuses and latencies of the calls that a client has sent."""

    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    async def receive(self, client: AsyncClient, calls: Sequence[Call]) -> None:
        """Send calls in one batch, and record the status of each result and its time since the sending."""
        sent_at = time.perf_counter()
        async for _, result in client.stream(calls):
            self.latencies_ms.append((time.perf_counter() - sent_at) * 1e3)
            self.statuses[result.status.value] += 1


async def closed_loop(
    requests: Iterator[Request], send: Callable[[Request], Awaitable[object]], in_flight: int
) -> float:
    """Send all requests, `in_flight` of them at a time. Returns the seconds until the last answer."""

    async def work() -> None:
        for request in requests:
            await send(request)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(work())
    return time.perf_counter() - start


async def open_loop(
    requests: Sequence[tuple[float, Request]],
    send: Callable[[Request, float], Awaitable[object]],
    tally: CallTally,
    max_open: int,
) -> None:
    """Call `send(request, due_at)` at each request's due time (seconds after the start) and wait for all of them.

    Stops with an example in the tally if `max_open` requests are open.
    """
    num_open = 0

    async def work(request: Request, due_at: float) -> None:
        nonlocal num_open
        try:
            await send(request, due_at)
        finally:
            num_open -= 1

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for due_s, request in requests:
            await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
            if num_open >= max_open:
                tally.examples.append(f"{num_open} requests are open: expected a --rate that the server keeps up with")
                return
            num_open += 1
            group.create_task(work(request, start + due_s))


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    calls: Sequence[Mapping[str, Any]] | bytes,
    accept: str = MSGPACK_STREAM,
    *,
    single: bool = False,
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Send one request and yield (index of the call, result) as results come. `calls` may be encoded already.

    With `single`, the only call is sent to `/v1/execute`. If the call is unavailable, the answer is 503 with the
    result. Raises `Refused` for any other status than 200.
    """
    body = calls if isinstance(calls, bytes) else encode_calls(calls, single=single)
    headers = {"Content-Type": "application/msgpack", "Accept": accept}
    path = "execute" if single else "batch"
    async with http.post(f"{url}/v1/{path}", data=io.BytesIO(body), headers=headers) as response:
        if response.status != 200:
            content = await response.read()
            result = WHOLE[response.content_type](content) if single and response.content_type in WHOLE else {}
            if "status" not in result:
                raise Refused(response.status, content[:500].decode(errors="replace"))
            yield 0, result
            return
        if accept in WHOLE:
            decoded = WHOLE[accept](await response.read())
            for indexed in enumerate([decoded] if single else decoded["results"]):
                yield indexed
            return
        stream: Any = _JsonLines() if accept == JSON_LINES else msgpack.Unpacker(max_buffer_size=1 << 30)
        async for chunk in response.content.iter_any():
            stream.feed(chunk)
            for item in stream:
                if item is not None:  # nil is a heartbeat
                    yield item["index"], item


def encode_calls(calls: Sequence[Mapping[str, Any]], *, single: bool = False) -> bytes:
    """The msgpack body of a request."""
    body: bytes = msgpack.packb(calls[0] if single else {"calls": calls})
    return body


class Refused(BenchFailed):
    """The service answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the service answered {status}: {text}")
        self.status = status


async def execute(http: aiohttp.ClientSession, url: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Run one call by `/v1/execute` and return its result."""
    async for _, result in ask(http, url, [call], "application/msgpack", single=True):
        return result
    raise AssertionError("a whole response has a result")


async def send_batch(
    http: aiohttp.ClientSession,
    url: str,
    batch: EncodedBatch,
    tally: CallTally,
    on_answer: OnAnswer,
) -> None:
    """Send one batch and record its answers. If the request is refused or its connection breaks, the calls without an
    answer are lost, and the error becomes an example."""
    answered: set[int] = set()
    start = time.perf_counter()
    try:
        async for index, result in ask(http, url, batch.body, batch.accept):
            if index in answered:
                tally.doubled += 1
                tally.examples.append(f"answered again: {result}")
                continue
            answered.add(index)
            tally.record(batch.calls[index], result, time.perf_counter() - start)
            on_answer()
    except (aiohttp.ClientError, OSError, Refused) as error:
        tally.examples.append(f"a request of {len(batch.calls)} calls failed: {error!r}")


class _JsonLines:
    """Splits a stream of bytes into JSON values, one per line."""

    def __init__(self) -> None:
        self._partial_line = b""

    def feed(self, data: bytes) -> None:
        self._partial_line += data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        *lines, self._partial_line = self._partial_line.split(b"\n")
        return map(json.loads, filter(None, lines))
