"""The client's transport: it sends calls as batch requests and gives each call its result or its error.

    submit --> waiting --> request --> result or error
                  ^           |
                  +-- pause --+  failed, or `unavailable` for a reason in RETRYABLE_ERRORS

- A call gets a `Result` of the server, or a `ServiceError` is raised. A failure of the service never looks like a
  result.
- A failed request is sent again with its unfinished calls, to another endpoint if one is not backing off, else after a
  pause.
- The calls of a request that is refused as too large (HTTP 413) are sent in requests of half as many calls. Only a call
  that is refused alone gets the error.
- Each call has up to `retries` further attempts in a row. After the last one it gets the failure of that attempt.
- Calls have no effects outside their sandbox, so sending a call twice is safe.
- An idle transport sends a call at once. A busy transport sends it when a connection is free. With `gather_s`, a call
  that is submitted while a request is running waits up to `gather_s` for more calls, at most until that request ends.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, count
from typing import Any
from urllib.parse import quote

import aiohttp
import msgpack
from yarl import URL

from sandbox.endpoints import Endpoint, Endpoints
from sandbox.errors import RequestRefused, ServiceError, TooLarge, Unreachable
from sandbox.http_failures import failure_of, short_reason
from sandbox.pending_results import BatchRequest, PendingResult
from sandbox.types import RETRYABLE_ERRORS, Call, Status

log = logging.getLogger("sandbox.client")  # the name in the documentation of the client

MAX_BATCH_BYTES = 32 << 20
"""Bytes of calls in one request. A larger call is sent alone."""
MAX_BATCH_CALLS = 1024
"""Calls in one request, unless `batch_size` is larger. A request keeps its connection until its slowest call ends, and
a server refuses one with more calls than its queue takes."""
CONNECT_TIMEOUT_S = 10.0
MAX_RESULT_BYTES = 1 << 30
"""Bytes of one encoded result. A longer result is treated as a malformed response."""
STREAM = "application/x-msgpack-stream"
"""Content type of a streamed response."""
CLOSED = "the client was closed before the result was there"


class Transport:
    """Sends calls to one or several endpoints. All methods belong to one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        queue_timeout_s: float | None,
        retries: int,
        batch_size: int,
        max_connections: int,
        gather_s: float,
    ) -> None:
        self.endpoints = Endpoints(urls)
        self._headers = headers
        self._timeout_s = timeout_s
        self.batch_fields = {} if queue_timeout_s is None else {"queue_timeout_s": queue_timeout_s}
        self.retries = retries
        self._batch_size = batch_size
        self._free_connections = max_connections
        self._gather_s = gather_s
        self._waiting: deque[PendingResult] = deque()
        self._send_handle: asyncio.Handle | None = None
        self._send_delay_s = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._tasks: asyncio.TaskGroup
        self._running: set[asyncio.Task[None]] = set()
        """The unfinished tasks of `_tasks`."""
        self._requests: set[BatchRequest] = set()
        self._pausing: set[tuple[PendingResult, ...]] = set()
        """Calls that are sent again after a pause."""

    @property
    def is_open(self) -> bool:
        return self._session is not None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._timeout_s),
            headers=self._headers,
        )
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()

    async def close(self) -> None:
        """End unfinished calls with a `ServiceError` and close all connections."""
        session, self._session = self._session, None
        if session is None:
            return
        for task in self._running:
            task.cancel()
        for pending in chain(self._waiting, *self._pausing):
            pending.set_error(ServiceError(CLOSED))
        self._waiting.clear()
        self._pausing.clear()
        try:
            await self._tasks.__aexit__(None, None, None)  # `None`: an exception would be wrapped
        finally:
            for request in list(self._requests):  # tasks that were cancelled before their first step, so never ran
                self._finish(request, ServiceError(CLOSED))
            await session.close()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start a task, which is cancelled if the transport is closed. Raises `ServiceError` if it is closed."""
        self._opened()
        task = self._tasks.create_task(work())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def is_ready(self) -> bool:
        """Return whether an endpoint accepts calls now. Sends one request to each."""
        session = self._opened()
        timeout = aiohttp.ClientTimeout(CONNECT_TIMEOUT_S)
        for endpoint in self.endpoints.all:
            try:
                async with session.get(f"{endpoint.url}/ready", timeout=timeout) as response:
                    if response.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
        return False

    async def stream_lines(self, endpoint: Endpoint, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Send one request with a JSON body and yield the items of the streamed response. Raises `ServiceError`."""
        endpoint.num_calls += 1
        try:
            async with self._streamed(endpoint, path, body, "application/json") as (response, unpacker):
                async for chunk in response.content.iter_any():
                    unpacker.feed(chunk)
                    for item in unpacker:
                        if item is not None:  # None is a heartbeat
                            yield item
        finally:
            endpoint.num_calls -= 1

    @asynccontextmanager
    async def _streamed(
        self, endpoint: Endpoint, path: str, body: bytes, content_type: str
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, msgpack.Unpacker]]:
        """Send a request, and yield its streamed response and an unpacker for the results. Raises `ServiceError` if the
        request fails, and in place of what the block raises for a malformed result."""
        headers = {"Content-Type": content_type, "Accept": STREAM}
        endpoint.num_requests += 1
        try:
            async with self._opened().post(f"{endpoint.url}{path}", data=io.BytesIO(body), headers=headers) as response:
                if response.status != 200 and not _is_stream_of_invalid(response):
                    raise await failure_of(endpoint.url, response)
                yield response, msgpack.Unpacker(max_buffer_size=MAX_RESULT_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{endpoint.url}: {short_reason(error)}") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise Unreachable(f"{endpoint.url} sent something that is no result: {error!r:.200}") from None

    def submit(self, call: Call, default_id: str = "") -> PendingResult:
        """Send a call with the next request. `default_id` is the id of its result if the call has none."""
        self._opened()
        pending = PendingResult(call, call.id or default_id, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        must_gather = self._requests and len(self._waiting) < self._batch_size
        self._schedule_send(self._gather_s if must_gather else 0.0)
        return pending

    def abandon(self, calls: Sequence[PendingResult]) -> None:
        """Cancel calls, unless they have ended, and each request without another awaited call."""
        for pending in calls:
            pending.future.cancel()
            if not pending.future.cancelled():
                pending.future.exception()  # marks the exception as retrieved
            elif pending.request is not None:
                pending.request.abandon_one()

    async def cancel(self, call_id: str) -> int:
        """Cancel all unfinished calls with this id, at every endpoint and in this transport, and return their number.
        The request may arrive before this transport's own calls, so it is sent until they have ended. Raises
        `ServiceError` if no endpoint answers."""
        submitted = [*chain(self._waiting, *self._pausing, *(request.calls for request in self._requests))]
        own = [pending for pending in submitted if pending.call.id == call_id]
        cancelled = 0
        for attempt in count(1):
            for pending in own:
                if not pending.future.done() and not (pending.request is not None and pending.request.is_sent):
                    pending.set_cancelled()
                    cancelled += 1
            answers = [self._send_cancel(endpoint, call_id) for endpoint in self.endpoints.all]
            counts = await asyncio.gather(*answers, return_exceptions=True)
            cancelled += sum(number for number in counts if isinstance(number, int))
            errors = [error for error in counts if isinstance(error, BaseException)]
            if len(errors) == len(counts):
                raise errors[0]
            unfinished = [pending.future for pending in own if not pending.future.done()]
            if not unfinished:
                break
            await asyncio.wait(unfinished, timeout=self.endpoints.pause_s(attempt))
        return cancelled

    async def _send_cancel(self, endpoint: Endpoint, call_id: str) -> int:
        """Return how many calls an endpoint has cancelled. Raises `ServiceError`."""
        name = quote(call_id, safe="").replace(".", "%2E")  # "." and ".." would change the path
        url = URL(f"{endpoint.url}/v1/calls/{name}", encoded=True)
        try:
            async with self._opened().delete(url) as response:
                if response.status == 404:
                    return 0
                if response.status != 200:
                    raise await failure_of(endpoint.url, response)
                return int((await response.json())["cancelled"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{endpoint.url}: {short_reason(error)}") from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ServiceError(CLOSED)
        return self._session

    def _schedule_send(self, delay_s: float = 0.0) -> None:
        """Send after `delay_s`, and not before the next iteration of the event loop, so that calls which are submitted
        in one iteration share a request."""
        if self._send_handle:
            if delay_s >= self._send_delay_s:
                return
            self._send_handle.cancel()
        loop, self._send_delay_s = asyncio.get_running_loop(), delay_s
        self._send_handle = (
            loop.call_later(delay_s, self._send_waiting) if delay_s else loop.call_soon(self._send_waiting)
        )

    def _send_waiting(self) -> None:
        self._send_handle = None
        while self._waiting and self._free_connections and self.is_open:
            share = math.ceil(len(self._waiting) / self._free_connections)
            if calls := self._next_batch(max(self._batch_size, min(share, MAX_BATCH_CALLS))):
                self._free_connections -= 1
                request = BatchRequest(calls)
                self._requests.add(request)
                request.task = self.start(partial(self._run, request))

    def _next_batch(self, max_calls: int) -> list[PendingResult]:
        calls: list[PendingResult] = []
        size = 0
        while self._waiting and len(calls) < (max_calls := min(max_calls, self._waiting[0].max_calls)):
            if calls and size + self._waiting[0].call.size > MAX_BATCH_BYTES:
                break
            pending = self._waiting.popleft()
            if not pending.future.done():
                size += pending.call.size
                calls.append(pending)
        return calls

    async def _run(self, request: BatchRequest) -> None:
        """Give every call of `request` its result or its error."""
        final_error = ServiceError(CLOSED)
        try:
            await self._send_with_retries(request)
        except ServiceError as error:
            final_error = error
        finally:
            self._finish(request, final_error)

    def _finish(self, request: BatchRequest, error: ServiceError) -> None:
        for pending in request.unfinished():
            pending.set_error(error)
        self._requests.discard(request)
        self._free_connections += 1
        self._schedule_send()

    async def _send_with_retries(self, request: BatchRequest) -> None:
        """Send `request` until each call has its result or the error of its last attempt."""
        while request.unfinished():
            endpoint = self.endpoints.next()
            previous_results, sent_at = request.num_results, _now()
            try:
                await self._send(endpoint, request)
            except TooLarge as error:
                if len(unfinished := request.unfinished()) == 1:
                    raise
                log.info("%.300s; its %d calls are sent in smaller requests", error, len(unfinished))
                self._split(unfinished)
            except RequestRefused:
                raise
            except ServiceError as error:
                has_results = request.num_results > previous_results
                # Its calls have lost the time until the request failed, so the endpoint is avoided for as long.
                waited_s = 0.0 if has_results else _now() - sent_at
                self.endpoints.count_failure(endpoint, sent_at, error.retry_after_s, waited_s)
                for pending in request.unfinished():
                    pending.count_failure(sent_at, is_first=has_results)
                    if pending.failures > self.retries:
                        pending.set_error(self._final_error(error, pending))
                if retried := request.unfinished():
                    failures = max(pending.failures for pending in retried)
                    what = f"{len(retried)} calls"
                    await asyncio.sleep(self.retry_in_s(failures, what, str(error), error.retry_after_s))

    def _split(self, calls: list[PendingResult]) -> None:
        """Put the calls of a request in front of the waiting calls, for requests of at most half as many calls."""
        for pending in calls:
            pending.detach()
            pending.max_calls = math.ceil(len(calls) / 2)
        self._waiting.extendleft(reversed(calls))

    async def _send(self, endpoint: Endpoint, request: BatchRequest) -> None:
        """Send the unfinished calls and set results as they arrive. Raises `ServiceError` if a result is missing."""
        calls, sent_at = request.unfinished(), _now()
        batch = {"calls": [pending.call.encode(binary=True) for pending in calls], **self.batch_fields}
        body = msgpack.packb(batch, unicode_errors="surrogatepass")
        endpoint.num_calls += len(calls)
        request.is_sent = True
        try:
            async with self._streamed(endpoint, "/v1/batch", body, "application/msgpack") as (response, unpacker):
                async for chunk in response.content.iter_any():
                    unpacker.feed(chunk)
                    self._set_results(endpoint, request, calls, unpacker, sent_at)
                    if request.is_abandoned:
                        return
        finally:
            endpoint.num_calls -= len(calls)
            request.is_sent = False
        if missing := len(request.unfinished()):
            raise Unreachable(f"{endpoint.url} closed the connection with {missing} of {len(calls)} results missing")

    def _set_results(
        self,
        endpoint: Endpoint,
        request: BatchRequest,
        calls: list[PendingResult],
        unpacker: msgpack.Unpacker,
        sent_at: float,
    ) -> None:
        """Set the results that have arrived completely; queue retryable calls again."""
        retryable: dict[PendingResult, dict[str, Any]] = {}
        for encoded in unpacker:
            if encoded is None or not request.is_waiting_for(pending := calls[encoded["index"]]):
                continue  # None is a heartbeat
            if _is_retryable(encoded):
                retryable[pending] = encoded
            else:
                pending.set_result(encoded)
                endpoint.failures = 0
        if retryable:
            self._retry(endpoint, retryable, sent_at)

    def _retry(self, endpoint: Endpoint, results: dict[PendingResult, dict[str, Any]], sent_at: float) -> None:
        """Send calls with retryable results again after a pause. A call without retries left keeps its result."""
        self.endpoints.count_failure(endpoint, sent_at)
        retried: list[PendingResult] = []
        types: Counter[str] = Counter()
        for pending, encoded in results.items():
            pending.count_failure(sent_at)
            if pending.failures > self.retries:
                pending.set_result(encoded)
            else:
                pending.detach()
                retried.append(pending)
                types[encoded["error"]["type"]] += 1
        if retried:
            counts = ", ".join(f"{error_type} for {count} calls" for error_type, count in types.items())
            failures = max(pending.failures for pending in retried)
            delay_s = self.retry_in_s(failures, f"{len(retried)} calls", f"{endpoint.url} returned {counts}")
            group = tuple(retried)
            self._pausing.add(group)
            asyncio.get_running_loop().call_later(delay_s, self._requeue, group)

    def _requeue(self, calls: tuple[PendingResult, ...]) -> None:
        """Put calls in front of the waiting calls, unless the transport was closed meanwhile."""
        if calls in self._pausing:
            self._pausing.discard(calls)
            self._waiting.extendleft(reversed(calls))
            self._schedule_send()

    def retry_in_s(self, failures: int, what: str, reason: str, retry_after_s: float | None = None) -> float:
        """Return the seconds until calls with this number of failures in a row are sent again, and log it."""
        delay_s = self.endpoints.retry_in_s(failures, retry_after_s)
        log.info("%.300s; retry %d of %d, with %s, in %.1f s", reason, failures, self.retries, what, delay_s)
        return delay_s

    def _final_error(self, error: ServiceError, pending: PendingResult) -> ServiceError:
        """Return the error of a call whose last attempt failed with `error`."""
        urls = ", ".join(endpoint.url for endpoint in self.endpoints.all)
        seconds = _now() - pending.failing_since
        tries = f"{pending.failures} tries in {seconds:.1f} s" if pending.failures > 1 else "1 try"
        question = f"; is `rstar-sandbox serve` running at {urls}?" if isinstance(error, Unreachable) else ""
        return type(error)(f"{error} ({tries}){question}", retry_after_s=error.retry_after_s)


def _is_stream_of_invalid(response: aiohttp.ClientResponse) -> bool:
    """Return whether the server found all calls of the request malformed. It then streams their results with status
    400. They are read like any other stream, so that the result of a call does not depend on the other calls."""
    return response.status == 400 and response.content_type == STREAM


def _is_retryable(encoded: dict[str, Any]) -> bool:
    error = encoded["error"]
    return encoded["status"] == Status.UNAVAILABLE and bool(error) and error["type"] in RETRYABLE_ERRORS


def _now() -> float:
    return asyncio.get_running_loop().time()
