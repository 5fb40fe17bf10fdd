"""Turns bodies into the items of a form: a small body in the gateway, a large one in a worker process (`body_worker`).

Invariants:
- Whatever a body contains, the gateway can serve other requests meanwhile. In one step of the event loop it decodes
  only a body below `LARGE_BODY_BYTES`, or one frame of the worker.
- Large bodies are decoded one at a time, since a hostile one takes many times its size in memory. Each tenant has at
  most one body that waits for the worker, so that the tenants take turns.
- The worker starts with the first large body. It is killed if the request of its body is cancelled, and the next large
  body starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

from sandbox.gateway.calls.executor_handle import start_child
from sandbox.gateway.http import body_frames, codec, validation
from sandbox.gateway.http.auth import tenant_name
from sandbox.gateway.http.body_frames import BLOB, BODY, CONFIG, ERROR, HEADER, ITEMS, LARGE
from sandbox.gateway.http.codec import CHUNK_BYTES
from sandbox.gateway.http.errors import HttpError
from sandbox.gateway.http.validation import STEP_S, Form
from sandbox.settings.server import ServeConfig

LARGE_BODY_BYTES = 256 << 10
"""Size from which a body goes to the worker. The most costly content of this size takes about 30 ms to decode."""
WORKER_MODULE = "sandbox.gateway.http.body_worker"
"""The program of the worker. It is not imported here, since it runs as `__main__`."""
_STREAM_LIMIT_BYTES = 1 << 20
"""Maximum bytes from the worker that wait to be read."""


class BodyParser:
    """Parses the bodies of all requests. Call `stop` at the end."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()
        """Held while a large body is decoded."""
        self._tenant_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def parse(self, body: bytes, content_type: str, form: Form) -> None:
        """Decode and check a body, and add its items to the form. Raises what `Form.check` raises, and `HttpError`: 400
        if the body is malformed, 413 if it has more objects than any valid body."""
        if len(body) < LARGE_BODY_BYTES:
            raw = codec.decode(body, content_type, form.max_calls(self._config), form.max_keys)
            return await validation.fill(form, form.check(raw))
        async with self._tenant_turns.setdefault(tenant_name(form.owner), asyncio.Lock()), self._turn:
            return await self._parse_in_worker(body, content_type, form)

    async def stop(self) -> None:
        """End the worker."""
        if self._worker is not None:
            await self._worker.kill()
            self._worker = None

    async def _parse_in_worker(self, body: bytes, content_type: str, form: Form) -> None:
        if self._worker is not None and self._worker.has_exited:
            await self.stop()
        if self._worker is None:
            self._worker = await _Worker.start(self._config)
        try:
            await self._worker.parse(body, content_type, form)
        except (ConnectionError, EOFError):
            await self.stop()
            raise HttpError(
                503,
                "the process that decodes large bodies ended while it decoded this one, perhaps for lack of memory; "
                "send smaller batches",
            ) from None
        except BaseException:
            if not self._worker.is_idle:
                await self.stop()
            raise


class _Worker:
    """A running worker process, and the gateway's end of the socket to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.is_idle = True
        """Whether the worker waits for the next body."""
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, config: ServeConfig) -> _Worker:
        process, gateway_end = await start_child(WORKER_MODULE)
        reader, writer = await asyncio.open_unix_connection(sock=gateway_end, limit=_STREAM_LIMIT_BYTES)
        worker = cls(process, reader, writer)
        worker._send(CONFIG, body_frames.encode_config(config))
        return worker

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    async def parse(self, body: bytes, content_type: str, form: Form) -> None:
        """Send a body, and add the items that come back to the form."""
        self.is_idle = False
        tenant = None if form.owner is None else form.owner.name
        self._send(BODY, [body_frames.form_name(form), content_type, tenant, len(body)])
        view = memoryview(body)
        for start in range(0, len(body), CHUNK_BYTES):
            self._writer.write(view[start : start + CHUNK_BYTES])
            await self._writer.drain()
        step_ends_at = monotonic() + STEP_S
        async for item in self._items():
            form.receive(item)
            if monotonic() > step_ends_at:
                await asyncio.sleep(0)
                step_ends_at = monotonic() + STEP_S

    async def kill(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def _send(self, kind: int, message: list[Any]) -> None:
        payload = body_frames.pack(message)
        self._writer.write(HEADER.pack(kind, len(payload)) + payload)

    async def _items(self) -> AsyncIterator[Any]:
        """Yield the items of the body. Raises the error for which the body is refused."""
        while True:
            kind, size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            payload = await self._reader.readexactly(size)
            if kind == ITEMS:
                for item in body_frames.unpack(payload):
                    yield item
            elif kind == LARGE:
                yield await body_frames.attach(body_frames.unpack(payload), self._next_blob)
            else:
                self.is_idle = True
                if kind == ERROR:
                    name, arguments = body_frames.unpack(payload)
                    raise body_frames.find_by_name(name)(*arguments)
                return

    async def _next_blob(self) -> bytes:
        kind, size = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        assert kind == BLOB
        blob = io.BytesIO()  # it grows without copies
        while blob.tell() < size:
            part = await self._reader.read(min(size - blob.tell(), CHUNK_BYTES))
            if not part:
                raise EOFError
            blob.write(part)
        return blob.getvalue()
