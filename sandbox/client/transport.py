"""The client's transport: it sends calls and programs in batch requests and gives each its result or its error.

A program differs from a call only in its route (`BatchRoute`). What this module says about calls holds for both.

    submit --> waiting --> request --> result or error
                  ^           |
                  +-- pause --+  failed, or `unavailable` for a retryable reason

- A call gets a `Result` of the server, or a `ServiceError` is raised. A failure of the service never looks like a
  result.
- If a request fails, its unfinished calls are sent again. If an endpoint is not backing off, they are sent there at
  once; otherwise they are sent after a pause.
- If a request is refused as too large (HTTP 413), its calls are sent again in requests with at most half the number of
  calls. A call gets the error only if it was the only call of its request.
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
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, count
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgpack
from yarl import URL

from sandbox.client.endpoints import Endpoint, Endpoints, failure_of, short_reason
from sandbox.client.pending_results import BatchRequest, PendingResult, Submission
from sandbox.client.sessions import AsyncSession
from sandbox.errors import RequestRefused, ServiceError, TooLarge, Unreachable
from sandbox.types import Call, Result, Status, UnavailableReason, unavailable_reason, unavailable_result

log = logging.getLogger("sandbox.client")  # the name in the documentation of the client

MAX_BATCH_BYTES = 32 << 20
"""Maximum bytes of calls in one request. A larger call is sent alone."""
MAX_BATCH_CALLS = 1024
"""Maximum number of calls in one request, unless `batch_size` is larger. A request keeps its connection until its
slowest call ends, and a server refuses a request with more calls than fit into its queue."""
CONNECT_TIMEOUT_S = 10.0
MAX_RESULT_BYTES = 1 << 30
"""Maximum bytes of one encoded result. A longer result is treated as a malformed response."""
STREAM = "application/x-msgpack-stream"
"""Content type of a streamed response."""
CLOSED = "the client was closed before the result was there"
T = TypeVar("T")


class CallRoute:
    """`/v1/batch`, whose items are calls."""

    path = "/v1/batch"
    content_type = "application/msgpack"
    noun = "calls"
    max_weight: int | None = None

    def encode(self, items: Sequence[Call], fields: Mapping[str, float]) -> bytes:
        batch = {"calls": [call.encode(binary=True) for call in items], **fields}
        body: bytes = msgpack.packb(batch, unicode_errors="surrogatepass")
        return body

    def decode(self, encoded: dict[str, Any]) -> Result:
        return Result.decode(encoded)

    def retryable_reason(self, encoded: dict[str, Any]) -> UnavailableReason | None:
        error = encoded["error"] if encoded["status"] == Status.UNAVAILABLE else None
        reason = unavailable_reason(error["type"]) if error else None
        return reason if reason is not None and reason.is_retryable else None

    def unavailable(self, item_id: str, reason: UnavailableReason, message: str) -> Result:
        return unavailable_result(item_id, reason, message)


CALL_ROUTE = CallRoute()


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
        self._batch_fields = {} if queue_timeout_s is None else {"queue_timeout_s": queue_timeout_s}
        self._retries = retries
        self._batch_size = batch_size
        self._free_connections = max_connections
        self._gather_s = gather_s
        self._waiting: deque[PendingResult[Any]] = deque()
        self._send_handle: asyncio.Handle | None = None
        self._send_delay_s = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._tasks: asyncio.TaskGroup
        self._running: set[asyncio.Task[None]] = set()
        """The unfinished tasks of `_tasks`."""
        self._requests: set[BatchRequest] = set()
        self._pausing: set[tuple[PendingResult[Any], ...]] = set()
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

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
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

    @asynccontextmanager
    async def _streamed(
        self, endpoint: Endpoint, path: str, body: bytes, content_type: str
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, msgpack.Unpacker]]:
        """Send a request, and yield its streamed response and an unpacker for the results. Raises `ServiceError` if the
        request fails. If the `with` block raises an error for a malformed result, `ServiceError` replaces it."""
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

    def submit(self, submission: Submission[T]) -> PendingResult[T]:
        """Send a call or a program with the next request."""
        self._opened()
        pending = PendingResult(submission, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        must_gather = self._requests and len(self._waiting) < self._batch_size
        self._schedule_send(self._gather_s if must_gather else 0.0)
        return pending

    async def stream(
        self, submissions: Sequence[Submission[T]], max_weight_at_once: float = math.inf
    ) -> AsyncGenerator[tuple[int, T], None]:
        """Send calls or programs, and yield the index and result of each as it ends. Ending the generator abandons the
        rest.

        The items that are submitted at once weigh at most `max_weight_at_once` together (`Submission.weight`). Further
        items are submitted when half of this weight has ended, so that requests have many items. An item that weighs
        more is submitted alone.
        """
        submitted: list[PendingResult[T]] = []
        ended_indexes: asyncio.Queue[int] = asyncio.Queue()
        weight = 0

        def on_end(index: int, _: object) -> None:
            ended_indexes.put_nowait(index)

        try:
            for _ in submissions:
                if weight <= max_weight_at_once / 2:
                    for index in range(len(submitted), len(submissions)):
                        submission = submissions[index]
                        if weight and weight + submission.weight > max_weight_at_once:
                            break
                        submitted.append(self.submit(submission))
                        submitted[index].future.add_done_callback(partial(on_end, index))
                        weight += submission.weight
                index = await ended_indexes.get()
                weight -= submissions[index].weight
                yield index, submitted[index].future.result()
        finally:
            self.abandon(submitted)

    def abandon(self, calls: Sequence[PendingResult[Any]]) -> None:
        """Cancel the calls that have not ended. A request without any other awaited call is cancelled too."""
        for pending in calls:
            pending.future.cancel()
            if not pending.future.cancelled():
                pending.future.exception()  # marks the exception as retrieved
            elif pending.request is not None:
                pending.request.abandon_one()

    async def cancel(self, call_id: str) -> int:
        """Cancel all unfinished calls and programs with this id, at every endpoint and in this transport, and return
        their number. At an endpoint, each unfinished test of a program counts as one. In this transport, a program
        counts as one. Raises `ServiceError` if no endpoint answers.

        A cancel request may arrive before the calls that this transport has sent. So it is repeated until these calls
        have ended.
        """
        submitted = [*chain(self._waiting, *self._pausing, *(request.items for request in self._requests))]
        own = [pending for pending in submitted if pending.submission.id == call_id]
        cancelled = 0
        sent_at = _now()
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
                error = errors[0]
                raise self._final_error(error, attempt, sent_at) if isinstance(error, ServiceError) else error
            unfinished = [pending.future for pending in own if not pending.future.done()]
            if not unfinished:
                break
            await asyncio.wait(unfinished, timeout=self.endpoints.random_backoff_s(attempt))
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

    def session(self, fields: Mapping[str, Any]) -> AsyncSession:
        """Return a session at the endpoint for the next request."""
        return AsyncSession(self._opened(), self.endpoints.next(), fields)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ServiceError(CLOSED)
        return self._session

    def _schedule_send(self, delay_s: float = 0.0) -> None:
        """Send after `delay_s`, and not before the next iteration of the event loop. So calls that are submitted in one
        iteration share a request."""
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
            if items := self._next_batch(max(self._batch_size, min(share, MAX_BATCH_CALLS))):
                self._free_connections -= 1
                request = BatchRequest(items)
                self._requests.add(request)
                request.task = self._start(partial(self._run, request))

    def _next_batch(self, batch_size: int) -> list[PendingResult[Any]]:
        """Remove and return the first items that wait and may share a request."""
        items: list[PendingResult[Any]] = []
        size = weight = 0
        max_items = sys.maxsize
        while self._waiting:
            pending = self._waiting[0]
            submission = pending.submission
            max_items = min(max_items, pending.max_items)
            if items:
                route = items[0].submission.route
                is_full = len(items) >= max_items or size + submission.size > MAX_BATCH_BYTES
                is_too_heavy = weight + submission.weight > (route.max_weight or batch_size)
                if submission.route is not route or is_full or is_too_heavy:
                    break
            self._waiting.popleft()
            if not pending.future.done():
                size, weight = size + submission.size, weight + submission.weight
                items.append(pending)
        return items

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
                log.info("%.300s; its %d %s are sent in smaller requests", error, len(unfinished), request.route.noun)
                self._split(unfinished)
            except RequestRefused:
                raise
            except ServiceError as error:
                has_results = request.num_results > previous_results
                # The calls have lost the time from sending to failure, so the endpoint is avoided for this time.
                waited_s = 0.0 if has_results else _now() - sent_at
                self.endpoints.count_failure(endpoint, sent_at, error.retry_after_s, waited_s)
                for pending in request.unfinished():
                    pending.count_failure(sent_at, is_first=has_results)
                    if pending.failures > self._retries:
                        pending.set_error(self._final_error(error, pending.failures, pending.failing_since))
                if retried := request.unfinished():
                    failures = max(pending.failures for pending in retried)
                    what = f"{len(retried)} {request.route.noun}"
                    await asyncio.sleep(self._retry_delay_s(failures, what, str(error), error.retry_after_s))

    def _split(self, calls: list[PendingResult[Any]]) -> None:
        """Put the calls of a request in front of the waiting calls. Each next request with any of them has at most half
        their number of calls."""
        for pending in calls:
            pending.detach()
            pending.max_items = math.ceil(len(calls) / 2)
        self._waiting.extendleft(reversed(calls))

    async def _send(self, endpoint: Endpoint, request: BatchRequest) -> None:
        """Send the unfinished calls and set results as they arrive. Raises `ServiceError` if a result is missing."""
        calls, sent_at, route = request.unfinished(), _now(), request.route
        body = route.encode([pending.submission.item for pending in calls], self._batch_fields)
        weight = sum(pending.submission.weight for pending in calls)
        endpoint.num_calls += weight
        request.is_sent = True
        try:
            async with self._streamed(endpoint, route.path, body, route.content_type) as (response, unpacker):
                async for chunk in response.content.iter_any():
                    unpacker.feed(chunk)
                    self._set_results(endpoint, request, calls, unpacker, sent_at)
                    if request.is_abandoned:
                        return
        finally:
            endpoint.num_calls -= weight
            request.is_sent = False
        if missing := len(request.unfinished()):
            raise Unreachable(f"{endpoint.url} closed the connection with {missing} of {len(calls)} results missing")

    def _set_results(
        self,
        endpoint: Endpoint,
        request: BatchRequest,
        calls: list[PendingResult[Any]],
        unpacker: msgpack.Unpacker,
        sent_at: float,
    ) -> None:
        """Set the results that have arrived completely; queue retryable calls again."""
        retryable: dict[PendingResult[Any], dict[str, Any]] = {}
        for encoded in unpacker:
            if encoded is None or not request.is_waiting_for(pending := calls[encoded["index"]]):
                continue  # None is a heartbeat
            if request.route.retryable_reason(encoded):
                retryable[pending] = encoded
            else:
                pending.set_result(encoded)
                endpoint.failures = 0
        if retryable:
            self._retry(endpoint, retryable, sent_at)

    def _retry(self, endpoint: Endpoint, results: dict[PendingResult[Any], dict[str, Any]], sent_at: float) -> None:
        """Send calls with retryable results again after a pause. A call without retries left keeps its result."""
        self.endpoints.count_failure(endpoint, sent_at)
        retried: list[PendingResult[Any]] = []
        reasons: Counter[UnavailableReason | None] = Counter()
        for pending, encoded in results.items():
            pending.count_failure(sent_at)
            if pending.failures > self._retries:
                pending.set_result(encoded)
            else:
                pending.detach()
                retried.append(pending)
                reasons[pending.submission.route.retryable_reason(encoded)] += 1
        if retried:
            noun = retried[0].submission.route.noun
            counts = ", ".join(f"{reason} for {count} {noun}" for reason, count in reasons.items())
            failures = max(pending.failures for pending in retried)
            delay_s = self._retry_delay_s(failures, f"{len(retried)} {noun}", f"{endpoint.url} returned {counts}")
            group = tuple(retried)
            self._pausing.add(group)
            asyncio.get_running_loop().call_later(delay_s, self._requeue, group)

    def _requeue(self, calls: tuple[PendingResult[Any], ...]) -> None:
        """Put calls in front of the waiting calls, unless the transport was closed meanwhile."""
        if calls in self._pausing:
            self._pausing.discard(calls)
            self._waiting.extendleft(reversed(calls))
            self._schedule_send()

    def _retry_delay_s(self, failures: int, what: str, reason: str, retry_after_s: float | None = None) -> float:
        """Return the seconds until calls with this number of failures in a row are sent again, and log it."""
        delay_s = self.endpoints.retry_delay_s(failures, retry_after_s)
        log.info("%.300s; retry %d of %d, with %s, in %.1f s", reason, failures, self._retries, what, delay_s)
        return delay_s

    def _final_error(self, error: ServiceError, failures: int, failing_since: float) -> ServiceError:
        """Return `error`, the last of a number of failures in a row, with this number and the seconds they took."""
        urls = ", ".join(endpoint.url for endpoint in self.endpoints.all)
        tries = f"{failures} tries in {_now() - failing_since:.1f} s" if failures > 1 else "1 try"
        question = f"; is `rstar-sandbox serve` running at {urls}?" if isinstance(error, Unreachable) else ""
        return type(error)(f"{error} ({tries}){question}", retry_after_s=error.retry_after_s)


def _is_stream_of_invalid(response: aiohttp.ClientResponse) -> bool:
    """Return whether the server found all calls of the request malformed. It then streams their results with status
    400. They are read like any other stream, so that the result of a call does not depend on the other calls."""
    return response.status == 400 and response.content_type == STREAM


def _now() -> float:
    return asyncio.get_running_loop().time()
