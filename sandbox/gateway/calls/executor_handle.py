"""One executor: its process, the socket to it, and starting it again when it is gone.

Invariants:
- A node is `ready` only between the executor's "ready" frame and the first sign of its end: EOF, exit, a broken frame,
  a refusal to start, or `SILENCE_S` without a frame.
- Whatever ended it, its process group is killed before the owner hears of the loss.
- A first start that fails is final, and `started` says why; later ones are tried again with back-off, and in a hurry:
  calls wait for them.

What the executor is to run is its owner's business (`Owner`, which `dispatch.Dispatcher` is).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from sandbox import wire
from sandbox.backoff import backoff_s
from sandbox.errors import NodeError, ProtocolError
from sandbox.gateway.calls.call_table import size_of
from sandbox.types import EncodedResult, Status

log = logging.getLogger(__name__)

EXECUTOR = "sandbox.executor"
"""Run by name, since this room does not import that one."""
START_S = 120.0
"""From exec to "ready": jail, zygotes, their warm-up; a cold disk under a large runtime is what takes longest."""
SILENCE_S = 60.0
"""Stats come about once a second, so an executor silent for this long hangs."""
TURN_S = 1.0
"""How often it is looked whether it has spoken."""
EXIT_S = 0.5
"""From EOF to the exit code."""
STOP_S = 5.0
"""From "drain" and EOF to the kill."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0
"""Seconds before an executor is restarted: the shortest and the longest wait. It doubles with each start that fails."""
MAX_WINDOW = 1_000_000
"""Calls that an executor may ask for at once."""
HIGH_WATER_BYTES = 1 << 20
"""Unsent bytes towards an executor above which it gets no more calls."""
_STATUSES = frozenset(status.value for status in Status)


class Process(Protocol):
    """A started executor, and our end of the socket to it."""

    @property
    def socket(self) -> socket.socket: ...

    def kill(self) -> None:
        """End it and all that it started. Harmless when it has ended."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...


Launch = Callable[[], Awaitable[Process]]
Sized = tuple[int, EncodedResult, int]
"""The number of a call, its answer, and about how many bytes that is."""


class Owner(Protocol):
    """Who hears from a node."""

    def node_ready(self, node: Node) -> None: ...
    def node_answered(self, node: Node, answers: list[Sized]) -> None: ...
    def node_has_room(self, node: Node) -> None: ...
    def node_lost(self, node: Node) -> None: ...


class Node:
    """One executor, kept alive by `run`."""

    def __init__(self, number: int, launch: Launch, settings: dict[str, Any], owner: Owner) -> None:
        self.number = number
        self.is_ready = False
        self.window = 0
        """How many calls it wants in hand at once: twice its slots, until it says otherwise."""
        self.about: dict[str, Any] = {}
        """What the executor said when it was ready."""
        self.stats: dict[str, Any] = {}
        """The last stats frame."""
        self.restarts = 0
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._launch = launch
        self._settings = settings
        self._owner = owner
        self._link: _Link | None = None
        self._process: Process | None = None
        self._failures = 0

    @property
    def takes_calls(self) -> bool:
        return self.is_ready and self._link is not None and not self._link.is_paused

    def send(self, message: list[Any]) -> None:
        """Queue a frame for the executor; lost without a word when it is gone, as `node_lost` tells."""
        if self._link is not None:
            self._link.send(message)

    def kill(self) -> None:
        """Skip the gentle rung."""
        if self._process is not None:
            self._process.kill()

    async def run(self) -> None:
        """Keep an executor alive until cancelled; then stop it, gently first."""
        while True:
            why = await self._live()
            if not self.started.done():
                self.started.set_exception(NodeError(f"executor {self.number} did not start: {why}"))
                return
            log.warning("executor %d is lost: %s", self.number, why)
            self.restarts += 1
            await asyncio.sleep(backoff_s(self._failures + 1, MIN_BACKOFF_S, MAX_BACKOFF_S))

    async def _live(self) -> Exception:
        """One life of the executor, and why it ended."""
        try:
            process = await self._launch()
        except OSError as why:
            return why
        self._process = process
        try:
            link = await self._connect(process)
            link.send(["configure", self._settings, self.started.done()])
            async with asyncio.TaskGroup() as watchers:
                watch = [watchers.create_task(_watch_exit(process, link)), watchers.create_task(_watch_silence(link))]
                try:
                    return await self._until_lost(link)
                except asyncio.CancelledError:
                    await self._stop(process, link)
                    raise
                finally:
                    for task in watch:
                        task.cancel()
        finally:
            self._end(process)

    async def _connect(self, process: Process) -> _Link:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: _Link(self, self._owner, loop), sock=process.socket)
        self._link = link
        return link

    async def _until_lost(self, link: _Link) -> Exception:
        first: list[asyncio.Future[Any]] = [link.ready, link.lost]
        try:
            async with asyncio.timeout(START_S):
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return NodeError(f"not ready {START_S:g} s after its start")
        if not link.lost.done():
            self._become_ready()
        return await link.lost

    def introduce(self, about: dict[str, Any]) -> None:
        """What the executor says of itself when it is ready. Raises `ProtocolError`."""
        slots = about.get("slots")
        if not isinstance(slots, int) or not 1 <= slots <= MAX_WINDOW // 2:
            raise ProtocolError(f"expected 'ready' with slots from 1 to {MAX_WINDOW // 2}, got {slots!r:.40}")
        self.about = about
        self.window = slots * 2

    def grant(self, window: int) -> None:
        """The executor wants `window` calls in hand from now on. Raises `ProtocolError`."""
        slots = self.about["slots"]
        if not slots <= window <= MAX_WINDOW:
            raise ProtocolError(f"expected a window from {slots}, its slots, to {MAX_WINDOW}, got {window}")
        had, self.window = self.window, window
        if window > had:
            self._owner.node_has_room(self)

    def _become_ready(self) -> None:
        self.is_ready = True
        if not self.started.done():
            self.started.set_result(None)
        self._owner.node_ready(self)

    async def _stop(self, process: Process, link: _Link) -> None:
        """The gentle rung: it is told, loses its socket, and has a while to go. `_end` is the next."""
        link.send(["drain"])
        link.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()

    def _end(self, process: Process) -> None:
        was_ready, self.is_ready = self.is_ready, False
        self._failures = 0 if was_ready else self._failures + 1
        if self._link is not None:
            self._link.abort()
            self._link = None
        process.socket.close()
        process.kill()
        self._process = None
        self.stats = {}
        if was_ready:
            self._owner.node_lost(self)


class _Link(asyncio.Protocol):
    """The socket to an executor: frames in and out, and two futures for its beginning and its end."""

    def __init__(self, node: Node, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[Exception] = loop.create_future()
        self.is_paused = False
        self.has_spoken = False
        self._node = node
        self._owner = owner
        self._loop = loop
        self._unpacker = wire.Unpacker()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.has_spoken = True
        self._unpacker.feed(data)
        try:
            for message in self._unpacker:
                self._receive(message)
        except ProtocolError as why:
            self.lose(why)

    def connection_lost(self, exc: Exception | None) -> None:
        """Most often it has ended, and its exit code, which comes a moment later, says more."""
        self.is_paused = True
        self._loop.call_later(EXIT_S, self.lose, NodeError(f"closed its socket{f' ({exc})' if exc else ''}"))

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._owner.node_has_room(self._node)

    def send(self, message: list[Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.pack(message))

    def close(self) -> None:
        """Close after what was sent has gone out."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def lose(self, why: Exception) -> None:
        """The first reason to be lost is the one that counts."""
        if not self.lost.done():
            self.lost.set_result(why)

    def _receive(self, message: list[Any]) -> None:
        if self.lost.done():
            return
        match message:
            case ["results", list(pairs)] if self.ready.done():
                self._owner.node_answered(self._node, [_answer(pair) for pair in pairs])
            case ["window", int(window)] if self.ready.done():
                self._node.grant(window)
            case ["stats", dict(stats)]:
                self._node.stats = stats
            case ["ready", dict(about)] if not self.ready.done():
                self._node.introduce(about)
                self.ready.set_result(None)
            case ["failed", str(why)]:
                self.lose(NodeError(why))
            case _:
                raise ProtocolError(f"a {message[0]!r:.40} frame with {len(message) - 1} parts is out of place")


def _answer(pair: Any) -> Sized:
    """What the gateway itself reads of a result is checked; the rest is passed through."""
    try:
        seq, answer = pair
        usage = answer["usage"]
        sound = isinstance(usage["queue_ms"] + usage["run_ms"], (int, float)) and isinstance(answer["files"], dict)
        if sound and answer["status"] in _STATUSES:
            return seq, answer, size_of(answer)
    except (TypeError, ValueError, KeyError):
        pass
    raise ProtocolError(f"expected a result as [seq, result], got {pair!r:.120}")


async def _watch_exit(process: Process, link: _Link) -> None:
    code = await process.wait()
    link.lose(NodeError(f"ended with exit code {code}; what it printed is above"))


async def _watch_silence(link: _Link) -> None:
    """Counts its own turns rather than seconds: if we were stopped, so was this count."""
    silent_s = 0.0
    while silent_s < SILENCE_S:
        await asyncio.sleep(TURN_S)
        silent_s = 0.0 if link.has_spoken else silent_s + TURN_S
        link.has_spoken = not link.ready.done()
    link.lose(NodeError(f"said nothing for {SILENCE_S:g} s"))


class ExecutorProcess:
    """The real thing: `python -m sandbox.executor --fd N` in its own process group."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self.socket = ours
        self._process = process

    @classmethod
    async def launch(cls, module: str = EXECUTOR) -> ExecutorProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", module, "--fd", str(fd)),
                    stdin=DEVNULL,
                    pass_fds=(fd,),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()
