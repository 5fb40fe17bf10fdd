"""The exchange of one HTTP request, shared by all routes that run calls: read and admit the body, wait, respond.

`AdmittedBatch` owns the calls of a request. They are cancelled if the client disconnects. A client that does not read
is disconnected by the `Listener`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from aiohttp import web

from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http import codec, validation
from sandbox.gateway.http.auth import TENANT, tenant_name
from sandbox.gateway.http.body_parser import BodyParser
from sandbox.gateway.http.body_reader import BodyReader, Reservation
from sandbox.gateway.http.codec import JSON, MSGPACK, MSGPACK_STREAM, NDJSON
from sandbox.gateway.http.request_record import RECORD
from sandbox.gateway.http.validation import CallsForm, Form
from sandbox.types import EncodedResult, Status

DISPATCHER = web.AppKey("dispatcher", Dispatcher)
BODY_READER = web.AppKey("body_reader", BodyReader)
PARSER = web.AppKey("parser", BodyParser)

BODY_TYPES = (JSON, MSGPACK)
BATCH_TYPES = (NDJSON, MSGPACK_STREAM, JSON, MSGPACK)
CALLS_FREED_PER_STEP = 64
"""Calls whose memory is freed before the task yields to the event loop."""
CALL_ERROR_STATUSES = (400, 401, 403, 408, 413, 415, 429, 503)
"""HTTP statuses of errors of a route that runs calls."""


class AdmittedBatch:
    """The calls of a request, for the time of an `async with` block: read, parsed and admitted before the block, and
    cancelled at its end if they are unfinished, also if the client disconnects.

    The block gets the batch, the body's content type, and the HTTP status of the response: 400 if every call is
    malformed. The bytes of the body are reserved (`body_reader.py`) until the calls are admitted. From then on the call
    table counts the bytes of the calls. This is a class and no `asynccontextmanager`, which would add 1 % to the CPU
    time of a request with one call.
    """

    __slots__ = ("_form", "_prepare", "_request")

    def __init__(self, request: web.Request, form: CallsForm, prepare: Callable[[Batch], None] | None = None) -> None:
        """`prepare` is called with the batch before its admission."""
        self._request = request
        self._form = form
        self._prepare = prepare

    async def __aenter__(self) -> tuple[Batch, str, int]:
        try:
            return await self._admit()
        except BaseException:
            await self._cancel()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._cancel()

    async def _admit(self) -> tuple[Batch, str, int]:
        request, app = self._request, self._request.app
        with app[BODY_READER].reservation(request) as reservation:
            content_type = await parse_body(request, reservation, self._form)
            batch, malformed = self._form.parsed
            if self._prepare is not None:
                self._prepare(batch)
            await submit(request, batch)
        status = 400 if malformed == len(batch.results) else 200
        if malformed:
            counters = app[DISPATCHER].counters
            counters.count_calls(Status.INVALID.value, tenant_name(request[TENANT]), malformed)
            if status == 400:
                counters.refused[status] += 1
        return batch, content_type, status

    async def _cancel(self) -> None:
        """Cancel the unfinished calls. Then free the calls in steps. Together they can hold millions of texts (code,
        names of files, arguments), and the event loop would be blocked while all of them are freed."""
        if (batch := self._form.batch) is None:
            return
        calls = [pending.call for pending in batch.calls]
        self._request.app[DISPATCHER].cancel(batch)  # the batch drops its calls, so `calls` has the last references
        while len(calls) > CALLS_FREED_PER_STEP:
            del calls[-CALLS_FREED_PER_STEP:]
            await asyncio.sleep(0)


async def parse_body(request: web.Request, reservation: Reservation, form: Form) -> str:
    """Read the body of a request that runs calls, and add its items to the form. Returns its content type. Raises
    `HttpError`, what `Form.check` raises, and `Overloaded` while the server drains."""
    app = request.app
    app[DISPATCHER].check_accepting()
    content_type = codec.body_type(request)
    body = await app[BODY_READER].read(request, reservation)
    app[DISPATCHER].counters.bytes_in += len(body)
    await app[PARSER].parse(body, content_type, form)
    return content_type


async def submit(request: web.Request, batch: Batch) -> None:
    """Admit a parsed batch for the tenant of the request's token. Raises `Overloaded` or `RequestRefused`, and
    `InvalidCall` if a call names another tenant. The caller must cancel the batch."""
    tenant = request[TENANT]
    if tenant is not None:
        await validation.set_tenant(batch, tenant)
    admit(request, batch)


def admit(request: web.Request, batch: Batch) -> None:
    """Admit a batch whose calls have their tenant, and record that the request has them. Every batch of a request
    passes through here. Raises `Overloaded` or `RequestRefused`."""
    request.app[DISPATCHER].submit(batch)
    request[RECORD].add_batch(batch)


async def wait_with_heartbeats(
    request: web.Request, batch: Batch, status: int, content_type: str
) -> web.StreamResponse | None:
    """Wait until the batch has all results. If this takes longer than `HEARTBEAT_S`, a JSON response begins before the
    results exist. It has `status`, which cannot change afterwards, and gets a heartbeat after each `HEARTBEAT_S`.
    Returns this response for `respond`, or None if no response has begun."""
    if not batch.unfinished:
        return None
    if content_type not in codec.HEARTBEAT:
        await wait_for_results(batch)
        return None
    done = _Signal()
    batch.on_done = done.set
    response: web.StreamResponse | None = None
    while not await done.wait(codec.HEARTBEAT_S):
        if response is None:
            headers = {"Content-Type": content_type, "X-Accel-Buffering": "no"}
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(request)
        await send(request, response, codec.HEARTBEAT[content_type])
    return response


async def wait_for_results(batch: Batch) -> None:
    """Wait until the batch has all results."""
    if batch.unfinished:
        done = asyncio.Event()
        batch.on_done = done.set
        await done.wait()


def pop_results(batch: Batch) -> Iterator[EncodedResult]:
    """Return the results in order. Each is dropped from the batch when it is read."""
    return map(batch.pop_result, range(len(batch.results)))


async def respond_with_results(
    request: web.Request, batch: Batch, status: int, content_type: str
) -> web.StreamResponse:
    """Send the results of a batch: streamed as they come, or all in order, as `content_type` says."""
    if content_type in (NDJSON, MSGPACK_STREAM):
        return await stream(request, status, batch, content_type)
    begun = await wait_with_heartbeats(request, batch, status, content_type)
    body = await codec.encode_results(pop_results(batch), len(batch.results), content_type)
    return await respond(request, status, body, content_type, begun)


async def respond(
    request: web.Request,
    status: int,
    parts: Sequence[bytes],
    content_type: str,
    begun: web.StreamResponse | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Send a whole body. A response that has `begun` keeps its own status and headers."""
    size = sum(map(len, parts))
    response = begun
    if response is None:
        fields = {"Content-Type": content_type, "Content-Length": str(size), **(headers or {})}
        response = _WholeResponse(status=status, headers=fields)
        await response.prepare(request)
    if size <= codec.CHUNK_BYTES:
        await response.write_eof(b"".join(parts))
        request.app[DISPATCHER].counters.bytes_out += size
        return response
    for part in parts:
        await send(request, response, part)
        await asyncio.sleep(0)
    await response.write_eof()
    return response


class _WholeResponse(web.StreamResponse):
    """A response whose head is sent together with the first part of its body. `web.Response` does this too, but it
    also handles forms of bodies that no route has, which would add 2 % to the CPU time of a request with one call."""

    _send_headers_immediately = False


async def stream(request: web.Request, status: int, batch: Batch, content_type: str) -> web.StreamResponse:
    """Send results as they finish. Results that finish while an earlier chunk is being sent form the next chunk."""
    dispatcher = request.app[DISPATCHER]
    finished = deque(index for index, result in enumerate(batch.results) if result is not None)
    has_finished = _Signal()

    def on_result(index: int) -> None:
        finished.append(index)
        has_finished.set()

    batch.on_result = on_result
    response = web.StreamResponse(status=status, headers={"Content-Type": content_type, "X-Accel-Buffering": "no"})
    await response.prepare(request)
    num_unsent = len(batch.results)
    while num_unsent:
        has_finished.clear()
        if not finished and not await has_finished.wait(codec.HEARTBEAT_S):
            await send(request, response, codec.HEARTBEAT[content_type])
            continue
        parts: list[bytes] = []
        num_lines = result_size = encoded_size = 0
        while finished and num_lines < codec.RESULTS_PER_YIELD and encoded_size < codec.CHUNK_BYTES:
            index = finished.popleft()
            result = batch.pop_result(index)
            size = codec.encoded_bytes(result)
            result_size += size
            line = await codec.encode_line(index, result, size, content_type)
            parts += line
            num_lines += 1
            encoded_size += sum(map(len, line))
        num_unsent -= num_lines
        if encoded_size <= codec.CHUNK_BYTES:
            await send(request, response, b"".join(parts))
        else:
            for part in parts:
                await send(request, response, part)
                await asyncio.sleep(0)
        dispatcher.call_table.results_read(batch, result_size)
    await response.write_eof()
    return response


async def send(request: web.Request, response: web.StreamResponse, part: bytes) -> None:
    """Send a part of a stream, and yield to the event loop after each `CHUNK_BYTES`."""
    for start in range(0, len(part), codec.CHUNK_BYTES):
        if start:
            await asyncio.sleep(0)
        chunk = part[start : start + codec.CHUNK_BYTES]
        await response.write(chunk)
        request.app[DISPATCHER].counters.bytes_out += len(chunk)


class _Signal:
    """An `asyncio.Event` for one waiter, with a time limit. An `asyncio.timeout` around an `Event` would cost a tenth
    of a small request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        self._wake()

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the signal is set. Returns False on timeout."""
        if not self._is_set:
            self._waiter = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
        return self._is_set

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
