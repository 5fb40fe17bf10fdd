"""Clients of the service: `AsyncClient`, and `Client`, which is the same for code without an event loop.

    async with AsyncClient("http://127.0.0.1:8642") as client:
        result = await client.execute("print(1)")

Invariants:
- A call gets a `Result` from the service, or a `ServiceError` is raised; no failure ever looks like a verdict.
- A request that fails is sent again, and so is a call whose result is `unavailable` for a reason that may pass
  (`RETRYABLE_ERRORS`): to another endpoint if one is not resting, else after a pause, `retries` times in a row. The
  caller of a call that has used them up gets its last failure: that result, or that exception.
- Single calls gather into batches by themselves: an idle client sends at once, a busy one as connections come free;
  with `gather_s`, one of which a request is under way waits that long for company, at most until that is over.
- Results arrive one by one, so a slow call never holds up those that were sent with it, and when a connection tears
  only what is unanswered is sent again. Calls have no effects outside their sandbox, so sending twice is safe.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import random
import re
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgpack

from sandbox import verify as verifying
from sandbox.errors import Overloaded, RequestRefused, ServiceError, Unreachable
from sandbox.types import Call, Result, Status, Verdict

log = logging.getLogger(__name__)

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
RETRYABLE_ERRORS = frozenset({"Stopped", "ExecutorLost", "NodeError", "Overloaded"})
"""Values of `Result.error.type` with which an `unavailable` call is sent again: the service stopped before the call was
done, what ran the call was lost, or there was no room for it."""

AnyCall = str | Call | Mapping[str, Any]
"""Source, a `Call`, or a mapping as in `calls` of POST /v1/batch."""
Pair = tuple[str, str] | Mapping[str, str]
"""The right answer and a given one, or a mapping as in `pairs` of POST /v1/verify."""
T = TypeVar("T")


class AsyncClient:
    """For use inside one event loop, as `async with AsyncClient(...) as client`, or between `open` and `close`.

    `endpoints`: one URL or several; calls go to the one with fewest in flight, and one that fails is left alone for a
    while. `timeout_s`: how long a request may go without a sign of life, which the service gives every 15 s; calls may
    take longer. `queue_timeout_s`: how long a call may wait for a slot before it gets `unavailable`; at most, and by
    default, as long as the service allows (`--queue-timeout-s`). `retries`: how often in a row a call is sent again;
    results of other calls, before its request breaks off, begin the row anew. `batch_size`: how many waiting calls fill
    a request; more go into one only when there are more than `max_connections` such requests. `gather_s`: how long a
    call waits for others to go with it while a request is under way; a request costs as much as some calls, and nobody
    who is alone waits.
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
        urls = _urls(endpoints)
        if not urls or batch_size < 1 or max_connections < 1 or retries < 0:
            raise ValueError(
                "expected an endpoint, batch_size and max_connections of at least 1, and retries of at least 0"
            )
        self._endpoints = [_Endpoint(url) for url in urls]
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
        self._posts: set[_Post] = set()
        self._pausing: set[tuple[_Asked, ...]] = set()
        """Calls that are sent again after a pause."""

    async def open(self) -> AsyncClient:
        """Make ready for calls, which is done in the event loop that they come from. Harmless when it is open."""
        if self._session is not None:
            return self
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._timeout_s),
            headers=self._headers,
        )
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def close(self) -> None:
        """End calls in flight with a `ServiceError`, and close all connections. Harmless when it is closed."""
        session, self._session = self._session, None
        if session is None:
            return
        for post in self._posts:
            post.task.cancel()
        for asked in chain(self._waiting, *self._pausing):
            asked.fail(ServiceError(_CLOSED))
        self._waiting.clear()
        self._pausing.clear()
        try:
            await self._tasks.__aexit__(None, None, None)  # given an exception of the caller's, it would wrap that
        finally:
            for post in list(self._posts):  # cancelled before their first step
                self._end(post, ServiceError(_CLOSED))
            await session.close()

    async def __aenter__(self) -> AsyncClient:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def execute(self, code: AnyCall, **fields: Any) -> Result:
        """Run one call: source with the fields of `Call`, or a call with some of its fields replaced.

        Raises `TypeError`, or `InvalidCall` (a `ValueError`), for what is no call, and `ServiceError` if none of the
        tries brought a result.
        """
        if not isinstance(code, Call) or fields:
            code = Call.decode({**_raw(code, "code"), **fields})
        asked = self._ask(code)
        try:
            return await asked.answer
        finally:
            self._forget([asked])

    async def run_batch(self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None) -> list[Result]:
        """Run all `calls`; their results in the same order. `defaults` are the fields that a call leaves out.

        Raises as `execute` does; the message has the index of the call.
        """
        asked = self._ask_all(_calls(calls, defaults))
        try:
            return await asyncio.gather(*(one.answer for one in asked))
        finally:
            self._forget(asked)

    def stream(
        self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Run all `calls`; index and result of each as it finishes. Leaving the loop cancels the rest."""
        return self._stream(_calls(calls, defaults))

    async def _stream(self, calls: list[Call]) -> AsyncGenerator[tuple[int, Result], None]:
        asked = self._ask_all(calls)
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

    async def verify(self, pairs: Sequence[Pair], **fields: Any) -> list[Verdict]:
        """Check each pair of the right answer and a given one; the verdicts in the same order.

        `fields` are `limits`, `priority` and `tenant`, as in a `Call`. Each pair is a call of its own. Raises as
        `run_batch` does.
        """
        shared = verifying.shared_fields(fields)
        given = [_pair(pair, f"pairs[{index}]") for index, pair in enumerate(_listed(pairs, "pairs", _A_PAIR))]
        results = await self.run_batch([verifying.check_call(gold, answer, shared) for gold, answer in given])
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

    def _ask_all(self, calls: list[Call]) -> list[_Asked]:
        return [self._ask(call, str(index)) for index, call in enumerate(calls)]

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
                self._posts.add(post)
                post.task = self._tasks.create_task(self._send(post))

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
        why = ServiceError(_CLOSED)
        try:
            await self._deliver(post)
        except ServiceError as failure:
            why = failure
        finally:
            self._end(post, why)

    def _end(self, post: _Post, why: ServiceError) -> None:
        for asked in post.unanswered():
            asked.fail(why)
        self._posts.discard(post)
        self._free += 1
        self._schedule_pump()

    async def _deliver(self, post: _Post) -> None:
        """Send `post` until no call of it is unanswered: each has its result, or the error of its last try."""
        while post.unanswered():
            endpoint = min(self._endpoints, key=lambda e: (e.is_resting(_now()), e.load, e.requests))
            results, started_at = post.results, _now()
            try:
                await self._request(endpoint, post)
            except RequestRefused:
                raise
            except ServiceError as why:
                for asked in post.unanswered():
                    asked.count_failure(started_at, is_first=post.results > results)
                    if asked.failures > self._retries:
                        asked.fail(self._used_up(why, asked))
                if left := post.unanswered():
                    await asyncio.sleep(self._rest(endpoint, left, str(why), why.retry_after_s))

    def _rest(self, endpoint: _Endpoint, left: list[_Asked], why: str, retry_after_s: float | None = None) -> float:
        """Leave `endpoint`, which failed the calls `left`, alone for a while, and log it. Returns how long they wait
        before they are sent again."""
        failures = max(asked.failures for asked in left)
        rest_s = backoff_s(failures, retry_after_s, self._rng)
        endpoint.rested_at = _now() + rest_s
        pause_s = rest_s if all(other.is_resting(_now()) for other in self._endpoints) else 0.0
        retry = f"retry {failures} of {self._retries}"
        log.info("%.300s; %s, with %d calls, in %.1f s", why, retry, len(left), pause_s)
        return pause_s

    def _used_up(self, why: ServiceError, asked: _Asked) -> ServiceError:
        """The error of a call whose last try failed with `why`."""
        urls = ", ".join(endpoint.url for endpoint in self._endpoints)
        tries = f"{asked.failures} tries in {_now() - asked.failing_since:.1f} s" if asked.failures > 1 else "1 try"
        question = f"; is `rstar-sandbox serve` running at {urls}?" if isinstance(why, Unreachable) else ""
        return type(why)(f"{why} ({tries}){question}", retry_after_s=why.retry_after_s)

    def _take_back(self, endpoint: _Endpoint, lines: dict[_Asked, dict[str, Any]], started_at: float) -> None:
        """Send calls again that came back as `unavailable`; those without retries left have that as their result."""
        again: list[_Asked] = []
        kinds: Counter[str] = Counter()
        for asked, line in lines.items():
            asked.count_failure(started_at)
            if asked.failures > self._retries:
                asked.succeed(line)
            else:
                asked.leave()
                again.append(asked)
                kinds[line["error"]["type"]] += 1
        if again:
            said = ", ".join(f"{count} calls {kind}" for kind, count in kinds.items())
            pause_s = self._rest(endpoint, again, f"{endpoint.url} answered {said}")
            self._pausing.add(group := tuple(again))
            asyncio.get_running_loop().call_later(pause_s, self._put_back, group)

    def _put_back(self, again: tuple[_Asked, ...]) -> None:
        """Their pause is over: they go before all that wait."""
        if again in self._pausing:
            self._pausing.remove(again)
            self._waiting.extendleft(reversed(again))
            self._schedule_pump()

    async def _request(self, endpoint: _Endpoint, post: _Post) -> None:
        """Send what is unanswered and take results as they come. Raises `ServiceError` if any is missing at the end."""
        numbered, started_at = post.unanswered(), _now()
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
                    returned: dict[_Asked, dict[str, Any]] = {}
                    for line in unpacker:
                        if line is None or not post.waits_for(asked := numbered[line["index"]]):
                            continue
                        if _is_retryable(line):
                            returned[asked] = line
                        else:
                            asked.succeed(line)
                    self._take_back(endpoint, returned, started_at)
                    if post.is_abandoned:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError) as why:
            raise Unreachable(f"{endpoint.url}: {_reason(why)}") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, msgpack.UnpackException) as why:
            raise Unreachable(f"{endpoint.url} answered with something that is no result: {why!r:.200}") from None
        finally:
            endpoint.load -= len(numbered)
        if left := post.unanswered():
            raise Unreachable(f"{endpoint.url} broke off with {len(left)} of {len(numbered)} results missing")


class Client:
    """`AsyncClient` for code without an event loop, as `with Client(...) as client`, or between `open` and `close`.
    Safe to use from many threads.

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

    def open(self) -> Client:
        """Start the event loop's thread and make ready for calls. Harmless when it is open."""
        if self._loop is not None:
            return self
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=[opened], name="sandbox-client", daemon=True)
        self._thread.start()
        opened.result()
        return self

    def close(self) -> None:
        """End calls in flight with a `ServiceError`, close all connections, end the thread. Harmless when closed."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(self._stop.set)
        thread.join()

    def __enter__(self) -> Client:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def execute(self, code: AnyCall, **fields: Any) -> Result:
        """Run one call: source with the fields of `Call`, or a call with some of its fields replaced."""
        return self._wait(lambda: self._inner.execute(code, **fields))

    def run_batch(self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None) -> list[Result]:
        """Run all `calls`; their results in the same order. `defaults` are the fields that a call leaves out."""
        return self._wait(lambda: self._inner.run_batch(calls, defaults))

    def stream(
        self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None
    ) -> Generator[tuple[int, Result], None, None]:
        """Run all `calls`; index and result of each as it finishes. Leaving the loop cancels the rest."""
        return self._stream(self._inner.stream(calls, defaults))

    def _stream(self, results: AsyncGenerator[tuple[int, Result], None]) -> Generator[tuple[int, Result], None, None]:
        try:
            while (one := self._wait(lambda: _next(results))) is not None:
                yield one
        finally:
            if self._loop is not None:
                self._wait(results.aclose)

    def verify(self, pairs: Sequence[Pair], **fields: Any) -> list[Verdict]:
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


_CLOSED = "the client was closed before the result was there"
_NOT_OPEN = """this {name} is not open, or closed again. Open it around its use:
    {keyword} {name}("http://127.0.0.1:8642") as client:
        result = {wait}client.execute("print(1)")
or call its open() before and its close() afterwards."""
_A_CALL = "Python source (str), a Call, or a mapping as in calls of POST /v1/batch"
_A_PAIR = "a pair (gold, answer), or a mapping as in pairs of POST /v1/verify"


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

    __slots__ = ("answer", "call", "failing_since", "failures", "id", "post")

    def __init__(self, call: Call, call_id: str, answer: asyncio.Future[Result]) -> None:
        self.call = call
        self.id = call_id
        self.answer = answer
        self.failures = 0
        """Tries in a row that failed."""
        self.failing_since = 0.0
        """When the first of them was sent."""
        self.post: _Post | None = None
        """The request that it is part of; None while it waits."""

    def count_failure(self, started_at: float, *, is_first: bool = False) -> None:
        """The try that was sent at `started_at` failed, the first one in a row or one more."""
        if is_first or not self.failures:
            self.failures, self.failing_since = 0, started_at
        self.failures += 1

    def leave(self) -> None:
        """It is part of its request no longer, and goes with another."""
        assert self.post is not None
        self.post.wanted -= 1
        self.post = None

    def succeed(self, line: dict[str, Any]) -> None:
        assert self.post is not None
        line["id"] = self.id
        self.answer.set_result(Result.decode(line))
        self.post.wanted -= 1
        self.post.results += 1

    def fail(self, why: ServiceError) -> None:
        if not self.answer.done():
            self.answer.set_exception(why)
            if self.post is not None:
                self.post.wanted -= 1


class _Post:
    """Calls that are sent together, and how many of them somebody still waits for."""

    def __init__(self, asked: list[_Asked]) -> None:
        self.asked = asked
        self.wanted = len(asked)
        self.results = 0
        self.has_forgotten = False
        self.task: asyncio.Task[None]
        for one in asked:
            one.post = self

    def unanswered(self) -> list[_Asked]:
        return [one for one in self.asked if self.waits_for(one)]

    def waits_for(self, asked: _Asked) -> bool:
        return asked.post is self and not asked.answer.done()

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for any of what is still unanswered."""
        return self.has_forgotten and not self.wanted

    def forget_one(self) -> None:
        """One that was unanswered has been cancelled."""
        self.has_forgotten = True
        self.wanted -= 1
        if not self.wanted:
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


def _urls(endpoints: str | Sequence[str]) -> list[str]:
    """The URLs without a slash at the end. Raises `TypeError` or `ValueError`."""
    if isinstance(endpoints, str):
        return [_url(endpoints, "endpoints")]
    given = _listed(endpoints, "endpoints", "a URL")
    return [_url(url, f"endpoints[{index}]") for index, url in enumerate(given)]


def _url(url: Any, where: str) -> str:
    if not isinstance(url, str):
        raise TypeError(f"{where}: expected a URL as text, got {type(url).__name__}")
    try:
        is_valid = re.fullmatch(r"https?://[^\s?#]+", url) and urlsplit(url).hostname and urlsplit(url).port != 0
    except ValueError:  # a port that is no number, or an address that is no IPv6
        is_valid = False
    if not is_valid:
        raise ValueError(f"{where}: expected a URL such as {DEFAULT_ENDPOINT}, got {url!r:.200}")
    return url.rstrip("/")


def _calls(calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None) -> list[Call]:
    """Valid calls; raises `TypeError` or `InvalidCall` here rather than at the service."""
    base = None if defaults is None else Call.decode_defaults(defaults)
    made: list[Call] = []
    for index, call in enumerate(_listed(calls, "calls", _A_CALL)):
        if isinstance(call, Call) and base is None:
            made.append(call)
        else:
            where = f"calls[{index}]"
            made.append(Call.decode(_raw(call, where), base, where))
    return made


def _raw(call: Any, where: str) -> Mapping[str, Any]:
    """`call` as a mapping. Raises `TypeError`."""
    if isinstance(call, str):
        return {"code": call}
    if isinstance(call, Call):
        return call.encode(binary=True)
    if isinstance(call, Mapping):
        return call
    raise TypeError(f"{where}: expected {_A_CALL}, got {type(call).__name__}")


def _pair(pair: Any, where: str) -> tuple[str, str]:
    """Gold and answer. Raises `TypeError` or `InvalidCall`."""
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        pair = {"gold": pair[0], "answer": pair[1]}
    elif not isinstance(pair, Mapping):
        size = f" of {len(pair)}" if isinstance(pair, (tuple, list)) else ""
        raise TypeError(f"{where}: expected {_A_PAIR}, got {type(pair).__name__}{size}")
    return verifying.decode_pair(pair, where)


def _listed(items: Any, where: str, each: str) -> list[Any]:
    """`items` as a list. Raises `TypeError` for what is none, such as a single item."""
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise TypeError(f"{where}: expected a list, each item {each}; got {type(items).__name__}")
    return list(items)


def _is_retryable(line: dict[str, Any]) -> bool:
    return line["status"] == Status.UNAVAILABLE and bool(line["error"]) and line["error"]["type"] in RETRYABLE_ERRORS


def _reason(why: Exception) -> str:
    """Why a request failed, in short."""
    if isinstance(why, aiohttp.ClientConnectorError):
        refused = isinstance(why.os_error, ConnectionRefusedError)
        return "connection refused" if refused else f"cannot connect ({why.os_error})"
    return str(why) or type(why).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _next(results: AsyncGenerator[tuple[int, Result], None]) -> tuple[int, Result] | None:
    return await anext(results, None)
