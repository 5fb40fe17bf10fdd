"""Clients of the service: `AsyncClient`, and `Client`, which is the same for code without an event loop.

    async with AsyncClient("http://127.0.0.1:8642") as client:
        result = await client.execute("print(1)")

Invariants:
- A call gets a `Result` from the service, or a `ServiceError` is raised; no failure ever looks like a verdict.
- Single calls gather into batches by themselves: an idle client sends at once, a busy one as connections come free;
  with `gather_s`, one of which a request is under way waits that long for company, at most until that is over.
- Results arrive one by one, so a slow call never holds up those that were sent with it, and when a connection tears
  only what is unanswered is sent again. Calls have no effects outside their sandbox, so sending twice is safe.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgpack

from sandbox import verify as verifying
from sandbox.errors import Overloaded, RequestRefused, ServiceError, Unreachable
from sandbox.types import Call, Limits, Result, Verdict

DEFAULT_ENDPOINT = "http://127.0.0.1:8642"
TIMEOUT_S = 120.0
"""Eight of the service's signs of life: one may be late on a machine that is swamped."""
RETRIES = 8
"""About 15 s of back-off: a service that is restarted is back by then."""
BATCH_CALLS = 64
BATCH_BYTES = 32 << 20
MAX_CONNECTIONS = 256
CONNECT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
MAX_RESULT_BYTES = 1 << 30
STREAM = "application/x-msgpack-stream"

T = TypeVar("T")


class AsyncClient:
    """For use inside one event loop, as `async with AsyncClient(...) as client`.

    `endpoints`: one URL or several; calls go to the one with fewest in flight, and one that fails is left alone for a
    while. `timeout_s`: how long a request may go without a sign of life, which the service gives every 15 s; calls may
    take longer. `queue_timeout_s`: how long a call may wait for a slot before it gets `unavailable`; at most, and by
    default, as long as the service allows (`--queue-timeout-s`). `retries`: failures in a row, without a result in
    between, that a call outlives. `batch_size`: how many waiting calls fill a request; more go into one only when
    there are more than `max_connections` such requests. `gather_s`: how long a call waits for others to go with it
    while a request is under way; a request costs as much as some calls, and nobody who is alone waits.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        queue_timeout_s: float | None = None,
        retries: int = RETRIES,
        batch_size: int = BATCH_CALLS,
        max_connections: int = MAX_CONNECTIONS,
        gather_s: float = 0.0,
    ) -> None:
        urls = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not urls or batch_size < 1 or max_connections < 1 or retries < 0:
            raise ValueError(
                "expected an endpoint, batch_size and max_connections of at least 1, and retries of at least 0"
            )
        self._endpoints = [_Endpoint(url.rstrip("/")) for url in urls]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._fields = {} if queue_timeout_s is None else {"queue_timeout_s": queue_timeout_s}
        self._retries = retries
        self._batch_size = batch_size
        self._free = max_connections
        self._waiting: deque[_Asked] = deque()
        self._gather_s = gather_s
        self._pump_due: asyncio.Handle | None = None
        self._pump_in_s = 0.0
        self._rng = random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: asyncio.TaskGroup
        self._posts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> AsyncClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._timeout_s),
            headers=self._headers,
        )
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        assert session is not None
        for task in self._posts:
            task.cancel()
        for asked in self._waiting:
            asked.fail(ServiceError("the client was closed before the call was sent"))
        self._waiting.clear()
        try:
            await self._tasks.__aexit__(None, None, None)  # given `why`, it would wrap it
        finally:
            await session.close()

    async def execute(self, code: str | Call, **fields: Any) -> Result:
        """Run one call: source with the fields of `Call`, or a `Call` with some of them replaced."""
        asked = self._ask(_call(code, fields))
        try:
            return await asked.answer
        finally:
            self._forget([asked])

    async def run_batch(self, calls: Sequence[str | Call], defaults: Mapping[str, Any] | None = None) -> list[Result]:
        """Run all `calls`; their results in the same order. `defaults` are the fields that a call leaves out."""
        asked = self._ask_all(calls, defaults)
        try:
            return await asyncio.gather(*(one.answer for one in asked))
        finally:
            self._forget(asked)

    async def stream(
        self, calls: Sequence[str | Call], defaults: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Run all `calls`; index and result of each as it finishes. Leaving the loop cancels the rest."""
        asked = self._ask_all(calls, defaults)
        finished: asyncio.Queue[int] = asyncio.Queue()

        def note(index: int, _: object) -> None:
            finished.put_nowait(index)

        for index, one in enumerate(asked):
            one.answer.add_done_callback(partial(note, index))
        try:
            for _ in asked:
                index = await finished.get()
                yield index, asked[index].answer.result()
        finally:
            self._forget(asked)

    async def verify(self, pairs: Sequence[tuple[str, str]], **fields: Any) -> list[Verdict]:
        """Check each pair of the right answer and a given one; the verdicts in the same order.

        `fields` are `limits`, `priority` and `tenant`, as in a `Call`. Each pair is a call of its own.
        """
        like = verifying.like(_plain(fields))
        results = await self.run_batch([verifying.call_of(gold, answer, like) for gold, answer in pairs])
        return [verifying.verdict_of(result) for result in results]

    async def ready(self) -> bool:
        """Whether an endpoint takes calls now. Asks each once."""
        session = self._opened()
        for endpoint in self._endpoints:
            try:
                async with session.get(f"{endpoint.url}/ready", timeout=aiohttp.ClientTimeout(CONNECT_S)) as response:
                    if response.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
        return False

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError(_NOT_OPEN.format(name="AsyncClient", keyword="async with", wait="await "))
        return self._session

    def _ask(self, call: Call, call_id: str = "") -> _Asked:
        self._opened()
        loop = asyncio.get_running_loop()
        asked = _Asked(call, call.id or call_id, loop.create_future())
        self._waiting.append(asked)
        self._schedule_pump(self._gather_s if self._posts and len(self._waiting) < self._batch_size else 0.0)
        return asked

    def _ask_all(self, calls: Sequence[str | Call], defaults: Mapping[str, Any] | None) -> list[_Asked]:
        base = Call.decode_defaults(_plain(defaults)) if defaults else None
        made = [_call(call, {}) if base is None else Call.decode(_raw(call), base) for call in calls]
        return [self._ask(call, str(index)) for index, call in enumerate(made)]

    def _forget(self, asked: list[_Asked]) -> None:
        """Nobody waits for these any more: a request of which nobody waits for anything is cancelled."""
        for one in asked:
            one.answer.cancel()
            if not one.answer.cancelled():
                one.answer.exception()  # seen
            elif one.post is not None:
                one.post.forget_one()

    def _schedule_pump(self, in_s: float = 0.0) -> None:
        """What is asked together goes together: it is sent in another turn of the loop, or after `in_s`."""
        if self._pump_due:
            if in_s >= self._pump_in_s:
                return
            self._pump_due.cancel()
        loop, self._pump_in_s = asyncio.get_running_loop(), in_s
        self._pump_due = loop.call_later(in_s, self._pump) if in_s else loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = None
        while self._waiting and self._free and self._session is not None:
            share = max(self._batch_size, math.ceil(len(self._waiting) / self._free))
            asked = self._take(share)
            if asked:
                self._free -= 1
                post = _Post(asked)
                post.task = self._tasks.create_task(self._send(post))
                self._posts.add(post.task)

    def _take(self, most: int) -> list[_Asked]:
        taken: list[_Asked] = []
        size = 0
        while self._waiting and len(taken) < most and (not taken or size + self._waiting[0].call.size <= BATCH_BYTES):
            asked = self._waiting.popleft()
            if not asked.answer.done():
                size += asked.call.size
                taken.append(asked)
        return taken

    async def _send(self, post: _Post) -> None:
        """Get every call of `post` its result, or the error that stands for it."""
        why = ServiceError("the client was closed before the result was there")
        try:
            await self._deliver(post)
        except ServiceError as failure:
            why = failure
        finally:
            for asked in post.unanswered():
                asked.fail(why)
            assert post.task is not None
            self._posts.discard(post.task)
            self._free += 1
            self._schedule_pump()

    async def _deliver(self, post: _Post) -> None:
        failures = 0
        while post.unanswered():
            endpoint = min(self._endpoints, key=lambda e: (e.is_resting(_now()), e.load, e.requests))
            before = post.wanted
            try:
                await self._request(endpoint, post)
            except RequestRefused:
                raise
            except ServiceError as why:
                failures = 1 if post.wanted < before else failures + 1
                if failures > self._retries:
                    raise
                pause_s = backoff_s(failures, why.retry_after_s, self._rng)
                endpoint.rested_at = _now() + pause_s
                if all(other.is_resting(_now()) for other in self._endpoints):
                    await asyncio.sleep(pause_s)

    async def _request(self, endpoint: _Endpoint, post: _Post) -> None:
        """Send what is unanswered and take results as they come. Raises `ServiceError` if any is missing at the end."""
        numbered = post.unanswered()
        calls = [asked.call.encode(binary=True) for asked in numbered]
        body = msgpack.packb({"calls": calls, **self._fields}, unicode_errors="surrogatepass")
        headers = {"Content-Type": "application/msgpack", "Accept": STREAM}
        endpoint.load += len(numbered)
        endpoint.requests += 1
        try:
            async with self._opened().post(
                f"{endpoint.url}/v1/batch", data=io.BytesIO(body), headers=headers
            ) as response:
                if response.status != 200 and not _is_all_invalid(response):
                    raise await _failure(endpoint.url, response)
                unpacker = msgpack.Unpacker(max_buffer_size=MAX_RESULT_BYTES)
                async for chunk in response.content.iter_any():
                    unpacker.feed(chunk)
                    for line in unpacker:
                        if line is not None:
                            numbered[line["index"]].succeed(line)
                    if post.is_abandoned:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            raise Unreachable(f"{endpoint.url}: {str(why) or type(why).__name__}") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, msgpack.UnpackException) as why:
            raise Unreachable(f"{endpoint.url} answered with something that is no result: {why!r:.200}") from None
        finally:
            endpoint.load -= len(numbered)
        if left := post.unanswered():
            raise Unreachable(f"{endpoint.url} broke off with {len(left)} of {len(numbered)} results missing")


class Client:
    """`AsyncClient` for code without an event loop, as `with Client(...) as client`; safe to use from many threads.

    Takes the same arguments and has the same methods. The event loop runs in a thread of its own.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        queue_timeout_s: float | None = None,
        retries: int = RETRIES,
        batch_size: int = BATCH_CALLS,
        max_connections: int = MAX_CONNECTIONS,
        gather_s: float = 0.0,
    ) -> None:
        self._inner = AsyncClient(
            endpoints,
            token=token,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            retries=retries,
            batch_size=batch_size,
            max_connections=max_connections,
            gather_s=gather_s,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event

    def __enter__(self) -> Client:
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=[opened], name="sandbox-client", daemon=True)
        self._thread.start()
        opened.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def execute(self, code: str | Call, **fields: Any) -> Result:
        """Run one call: source with the fields of `Call`, or a `Call` with some of them replaced."""
        return self._wait(lambda: self._inner.execute(code, **fields))

    def run_batch(self, calls: Sequence[str | Call], defaults: Mapping[str, Any] | None = None) -> list[Result]:
        """Run all `calls`; their results in the same order. `defaults` are the fields that a call leaves out."""
        return self._wait(lambda: self._inner.run_batch(calls, defaults))

    def stream(
        self, calls: Sequence[str | Call], defaults: Mapping[str, Any] | None = None
    ) -> Generator[tuple[int, Result], None, None]:
        """Run all `calls`; index and result of each as it finishes. Leaving the loop cancels the rest."""
        results = self._inner.stream(calls, defaults)
        try:
            while (one := self._wait(lambda: _next(results))) is not None:
                yield one
        finally:
            if self._loop is not None:
                self._wait(results.aclose)

    def verify(self, pairs: Sequence[tuple[str, str]], **fields: Any) -> list[Verdict]:
        """Check each pair of the right answer and a given one; the verdicts in the same order."""
        return self._wait(lambda: self._inner.verify(pairs, **fields))

    def ready(self) -> bool:
        """Whether an endpoint takes calls now. Asks each once."""
        return self._wait(self._inner.ready)

    def _run(self, opened: Future[None]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._live(opened))
        except BaseException as why:
            if opened.done():
                raise
            opened.set_exception(why)

    async def _live(self, opened: Future[None]) -> None:
        self._stop = asyncio.Event()
        async with self._inner:
            self._loop = asyncio.get_running_loop()
            opened.set_result(None)
            await self._stop.wait()
        self._loop = None

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._loop is None:
            raise RuntimeError(_NOT_OPEN.format(name="Client", keyword="with", wait=""))
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_NOT_OPEN = """this {name} is not open, or closed again. Open it around its use:
    {keyword} {name}("http://127.0.0.1:8642") as client:
        result = {wait}client.execute("print(1)")"""


def backoff_s(failures: int, retry_after_s: float | None, rng: random.Random) -> float:
    """The pause after so many failures in a row: exponential, not before the service said, spread by up to a half."""
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))
    return max(pause_s, retry_after_s or 0.0) * rng.uniform(1.0, 1.5)


class _Endpoint:
    """One URL, how many calls are there, and until when it is left alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.load = 0
        self.requests = 0
        self.rested_at = 0.0

    def is_resting(self, now: float) -> bool:
        return now < self.rested_at


class _Asked:
    """A call and the future that its result goes to."""

    __slots__ = ("answer", "call", "id", "post")

    def __init__(self, call: Call, call_id: str, answer: asyncio.Future[Result]) -> None:
        self.call = call
        self.id = call_id
        self.answer = answer
        self.post: _Post | None = None

    def succeed(self, line: dict[str, Any]) -> None:
        if not self.answer.done():
            line["id"] = self.id
            self.answer.set_result(Result.decode(line))
            assert self.post is not None
            self.post.wanted -= 1

    def fail(self, why: ServiceError) -> None:
        if not self.answer.done():
            self.answer.set_exception(why)


class _Post:
    """Calls that are sent together, and how many of them somebody still waits for."""

    def __init__(self, asked: list[_Asked]) -> None:
        self.asked = asked
        self.wanted = len(asked)
        self.has_forgotten = False
        self.task: asyncio.Task[None] | None = None
        for one in asked:
            one.post = self

    def unanswered(self) -> list[_Asked]:
        return [one for one in self.asked if not one.answer.done()]

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for any of what is still unanswered."""
        return self.has_forgotten and not self.wanted

    def forget_one(self) -> None:
        """One that was unanswered has been cancelled."""
        self.has_forgotten = True
        self.wanted -= 1
        if not self.wanted and self.task is not None:
            self.task.cancel()


def _is_all_invalid(response: aiohttp.ClientResponse) -> bool:
    """Whether it is a stream of results for calls that are all malformed: they are read as in any other stream, so that
    a call's result does not depend on which calls were sent with it."""
    return response.status == 400 and response.content_type == STREAM


async def _failure(url: str, response: aiohttp.ClientResponse) -> ServiceError:
    """What a response other than 200 means for the client."""
    text = (await response.content.read(4096)).decode("utf-8", "replace")
    message = f"{url} answered {response.status}: {text}"
    if response.status in (429, 503):
        return Overloaded(message, retry_after_s=_seconds(response.headers.get("Retry-After")))
    if 400 <= response.status < 500:
        return RequestRefused(message)
    return Unreachable(message)


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _call(code: str | Call, fields: Mapping[str, Any]) -> Call:
    """A valid call; raises `InvalidCall` here rather than at the service."""
    if isinstance(code, Call) and not fields:
        return code
    return Call.decode({**_raw(code), **_plain(fields)})


def _raw(code: str | Call) -> dict[str, Any]:
    return code.encode(binary=True) if isinstance(code, Call) else {"code": code}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` as they are on the wire, where limits are a mapping."""
    limits = fields.get("limits")
    return (
        {**fields, "limits": Call("", limits=limits).encode().get("limits")}
        if isinstance(limits, Limits)
        else {**fields}
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _next(results: AsyncGenerator[tuple[int, Result], None]) -> tuple[int, Result] | None:
    return await anext(results, None)
