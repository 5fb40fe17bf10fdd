"""The gateway's handle for one executor, on this machine or another: its process, the socket to it, and its restarts.

An executor is a process that runs calls. It forks each call from a *zygote*, an interpreter that has imported modules.

    spawn -> "configure" -> wait for "ready" -> is_ready ---lost---> kill, on_executor_lost
      ^                     (START_S)                                          |
      +------------------------------- back-off <-------------------------------+

Invariants:
- An executor is lost after one of these events: EOF, exit, a malformed frame, a "failed" frame, or `silence_timeout_s`
  without a frame.
- `is_ready` is true from the executor's "ready" frame until the loss is handled. Calls that are sent between the loss
  and its handling are lost too.
- When an executor is lost, its process group is killed, and `HandleOwner.on_executor_lost` is called after that. For an
  executor on another machine the connection is closed instead; the agent on that machine then kills the process group.
- Each start has its own connection, which is closed before `on_executor_lost` is called. So no result of an
  earlier start can arrive: neither from a process that dies late, nor from a machine that was cut off and comes back.
- If the first start fails, `started` gets the reason and there is no further start.
- Later starts are repeated with back-off until one succeeds. Their "configure" frame has `is_replacement`: the executor
  is then ready with its first zygote, and not only when all zygotes are ready, because calls already wait for it.
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
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, cast

from sandbox import wire
from sandbox.backoff import backoff_s
from sandbox.errors import NodeError, ProtocolError
from sandbox.gateway.calls.batch import result_bytes
from sandbox.gateway.calls.call_table import LostAttempt
from sandbox.gateway.calls.executor_report import MAX_WINDOW, ExecutorStats, ReadyReport
from sandbox.types import EncodedResult, Status

log = logging.getLogger(__name__)

EXECUTOR_MODULE = "sandbox.executor"
"""The program of the process. It is only a name here: the gateway uses asyncio and the executor uses Trio, so neither
package imports the other (contracts in pyproject.toml)."""
START_S = 120.0
"""Seconds from the exec to the "ready" frame: build the jail, start and warm up the zygotes. A large runtime on a cold
disk takes longest."""
SILENCE_TIMEOUT_S = 60.0
"""Seconds without a frame after which an executor counts as hung. Stats frames come about once a second."""
SILENCE_CHECK_INTERVAL_S = 1.0
EXIT_CODE_TIMEOUT_S = 0.5
"""Seconds to wait for the exit code after EOF. A message with the exit code is better than "closed its socket"."""
STOP_TIMEOUT_S = 5.0
"""Seconds from "drain" and EOF to the kill."""
MIN_BACKOFF_S = 0.1
"""Seconds before a lost executor is restarted. Each start that fails doubles the wait, up to `MAX_BACKOFF_S`."""
MAX_BACKOFF_S = 10.0
HIGH_WATER_BYTES = 1 << 20
"""If more bytes than this are unsent on the way to an executor, it gets no more calls."""
MAX_REASON_CHARS = 500
"""Maximum characters of the reason why an attempt was lost. A longer reason is cut."""
_STATUSES = frozenset(status.value for status in Status)


class LaunchedExecutor(Protocol):
    """A started executor process, and the gateway's end of the socket to it."""

    @property
    def socket(self) -> socket.socket: ...

    def kill(self) -> None:
        """Kill the process and all that it started. Does nothing if it has exited."""

    async def wait(self) -> int | None:
        """Wait for the exit and return the exit code. For an executor on another machine, wait for the end of the
        connection and return None."""
        ...


Launch = Callable[[], Awaitable[LaunchedExecutor]]
"""Starts an executor. Raises `OSError` or `NodeError`."""
SizedResult = tuple[int, EncodedResult, int]
"""`seq` (the number of the attempt), its result, and the `result_bytes` of this result."""


class HandleOwner(Protocol):
    """Callbacks of an executor handle."""

    def on_executor_ready(self, executor: ExecutorHandle) -> None: ...
    def on_results(self, executor: ExecutorHandle, results: list[SizedResult]) -> None: ...
    def on_calls_lost(self, executor: ExecutorHandle, lost: list[LostAttempt]) -> None: ...
    def on_session_ended(self, executor: ExecutorHandle, session_id: str, reason: str) -> None: ...
    def on_window_grown(self, executor: ExecutorHandle) -> None: ...
    def on_executor_lost(self, executor: ExecutorHandle) -> None: ...


class ExecutorHandle:
    """One executor, which `run` starts and restarts. The default of `silence_timeout_s` is `SILENCE_TIMEOUT_S`."""

    def __init__(
        self,
        number: int,
        launch: Launch,
        settings: Mapping[str, object],
        owner: HandleOwner,
        silence_timeout_s: float | None = None,
    ) -> None:
        self.number = number
        self.settings = settings
        self.is_ready = False
        self.window = 0
        """Calls that the executor accepts at once: twice its slots until it sends a "window" frame."""
        self.ready_report: ReadyReport | None = None
        """The last "ready" frame; None before the executor has sent one."""
        self.stats = ExecutorStats()
        self.restarts = 0
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the executor is ready for the first time, or with `NodeError` if the first start fails."""
        self._launch = launch
        self._silence_timeout_s = silence_timeout_s
        self._owner = owner
        self._connection: _ExecutorProtocol | None = None
        self._process: LaunchedExecutor | None = None
        self._failures = 0
        """Starts in a row that failed."""

    @property
    def takes_calls(self) -> bool:
        return self.is_ready and self._connection is not None and not self._connection.is_paused

    def send(self, message: list[object]) -> None:
        """Queue a frame for the executor. If there is no connection, the frame is dropped: the owner has been told of
        the loss by `on_executor_lost`."""
        if self._connection is not None:
            self._connection.send(message)

    def send_calls(self, calls: list[list[object]]) -> None:
        """Queue a frame with calls, each as `[seq, call]`."""
        if self._connection is not None:
            self._connection.write(wire.pack_calls(calls))

    def kill(self) -> None:
        """Kill the executor without a "drain" frame."""
        if self._process is not None:
            self._process.kill()

    def drop(self) -> None:
        """Close the connection, kill the executor and tell the owner of the loss. The caller must cancel `run` next."""
        if self._process is not None:
            self._kill_and_report(self._process)

    async def run(self) -> None:
        """Run an executor, and restart it, until cancelled; then stop it."""
        while True:
            error = await self._run_process()
            if not self.started.done():
                self.started.set_exception(NodeError(f"executor {self.number} did not start: {error}"))
                return
            log.warning("executor %d lost: %s", self.number, error)
            self.restarts += 1
            # The loss counts as the first failure, so that the first restart waits too.
            await asyncio.sleep(backoff_s(self._failures + 1, MIN_BACKOFF_S, MAX_BACKOFF_S))

    async def _run_process(self) -> Exception:
        """Run one executor process to its end, and return the reason of the end."""
        try:
            process = await self._launch()
        except (OSError, NodeError) as error:
            self._failures += 1
            return error
        self._process = process
        try:
            connection = await self._connect(process)
            connection.send(["configure", self.settings, self.started.done()])
            async with asyncio.TaskGroup() as tasks:
                watchers = [  # they only mark the connection as lost, which ends `_wait_until_lost`
                    tasks.create_task(_wait_for_exit(process, connection)),
                    tasks.create_task(_wait_for_silence(connection, self._silence_timeout_s or SILENCE_TIMEOUT_S)),
                ]
                try:
                    return await self._wait_until_lost(connection)
                except asyncio.CancelledError:
                    await self._stop_gently(process, connection)
                    raise
                finally:
                    for task in watchers:
                        task.cancel()
        finally:
            self._kill_and_report(process)

    async def _connect(self, process: LaunchedExecutor) -> _ExecutorProtocol:
        loop = asyncio.get_running_loop()
        is_local = process.socket.family == socket.AF_UNIX
        create_connection = loop.create_unix_connection if is_local else loop.create_connection
        _, connection = await create_connection(lambda: _ExecutorProtocol(self, self._owner, loop), sock=process.socket)
        self._connection = connection
        return connection

    async def _wait_until_lost(self, connection: _ExecutorProtocol) -> Exception:
        try:
            async with asyncio.timeout(START_S):
                await asyncio.wait((connection.ready, connection.lost), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return NodeError(f"not ready {START_S:g} s after its start")
        if not connection.lost.done():
            self._mark_ready()
        return await connection.lost

    def on_ready(self, report: ReadyReport) -> None:
        """Store the content of the "ready" frame, and set the first window."""
        self.ready_report = report
        self.window = report.slots * 2

    def on_window(self, window: int) -> None:
        """Set the number of calls that the executor accepts at once. Raises `ProtocolError`."""
        assert self.ready_report is not None
        slots = self.ready_report.slots
        if not slots <= window <= MAX_WINDOW:
            raise ProtocolError(f"expected a window from {slots}, its slots, to {MAX_WINDOW}, got {window}")
        previous, self.window = self.window, window
        if window > previous:
            self._owner.on_window_grown(self)

    def _mark_ready(self) -> None:
        self.is_ready = True
        if not self.started.done():
            self.started.set_result(None)
        self._owner.on_executor_ready(self)

    async def _stop_gently(self, process: LaunchedExecutor, connection: _ExecutorProtocol) -> None:
        """Send "drain" and EOF, and give the executor `STOP_TIMEOUT_S` to exit."""
        connection.send(["drain"])
        connection.send_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()

    def _kill_and_report(self, process: LaunchedExecutor) -> None:
        was_ready, self.is_ready = self.is_ready, False
        self._failures = 0 if was_ready else self._failures + 1
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        process.socket.close()
        process.kill()
        self._process = None
        self.stats = ExecutorStats()
        if was_ready:
            self._owner.on_executor_lost(self)


class _ExecutorProtocol(asyncio.Protocol):
    """The socket to an executor. It decodes frames, and completes each of the futures `ready` and `lost` once."""

    def __init__(self, executor: ExecutorHandle, owner: HandleOwner, loop: asyncio.AbstractEventLoop) -> None:
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[Exception] = loop.create_future()
        self.is_paused = False
        self.received_frame = False
        """Whether a frame came since the last check for silence."""
        self._executor = executor
        self._owner = owner
        self._loop = loop
        self._unpacker = wire.Unpacker()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.received_frame = True
        self._unpacker.feed(data)
        try:
            for message in self._unpacker:
                self._handle_frame(message)
        except ProtocolError as error:
            self.mark_lost(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the executor as lost after `EXIT_CODE_TIMEOUT_S`. Usually the process has exited, and `_wait_for_exit`
        marks it earlier with the exit code, which makes a better message."""
        self.is_paused = True
        reason = NodeError(f"closed its socket{f' ({exc})' if exc else ''}")
        self._loop.call_later(EXIT_CODE_TIMEOUT_S, self.mark_lost, reason)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._owner.on_window_grown(self._executor)

    def send(self, message: list[object]) -> None:
        self.write([wire.pack(message)])

    def write(self, parts: list[bytes]) -> None:
        """Send the parts of a frame."""
        if self._transport is not None and not self._transport.is_closing():
            for part in parts:
                self._transport.write(part)

    def send_eof(self) -> None:
        """End the stream to the executor after all queued frames are sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def mark_lost(self, reason: Exception) -> None:
        """Complete `lost`. Only the first reason counts."""
        if not self.lost.done():
            self.lost.set_result(reason)

    def _handle_frame(self, message: list[object]) -> None:
        if self.lost.done():
            return
        match message:
            case ["results", list(pairs)] if self.ready.done():
                self._owner.on_results(self._executor, [_check_result(pair) for pair in pairs])
            case ["lost", list(attempts)] if self.ready.done():
                self._owner.on_calls_lost(self._executor, list(map(_check_lost, attempts)))
            case ["session_ended", [str(session_id), str(reason)]]:
                self._owner.on_session_ended(self._executor, session_id, reason[:MAX_REASON_CHARS])
            case ["window", int(window)] if self.ready.done():
                self._executor.on_window(window)
            case ["stats", dict(stats)]:
                self._executor.stats = ExecutorStats.decode(stats)
            case ["ready", dict(report)] if not self.ready.done():
                self._executor.on_ready(ReadyReport.decode(report))
                self.ready.set_result(None)
            case ["failed", str(reason)]:
                self.mark_lost(NodeError(reason))
            case _:
                raise ProtocolError(f"unexpected frame {message[0]!r:.40} with {len(message) - 1} parts")


def _check_result(pair: tuple[int, EncodedResult]) -> SizedResult:
    """Check the parts of a result that the gateway reads; the rest is passed through. An executor may send anything,
    whatever the annotation says. Raises `ProtocolError`."""
    try:
        seq, result = pair
        usage = result["usage"]
        times_ms = usage["queue_ms"] + usage["run_ms"] + usage["cpu_ms"]
        if isinstance(times_ms, (int, float)) and isinstance(result["files"], dict) and result["status"] in _STATUSES:
            return seq, result, result_bytes(result)
    except (AttributeError, TypeError, ValueError, KeyError):
        pass
    raise ProtocolError(f"expected a result as [seq, result], got {pair!r:.120}")


def _check_lost(attempt: object) -> LostAttempt:
    """Check an item of a "lost" frame. Raises `ProtocolError`."""
    match attempt:
        case [int(seq), str(reason), bool(has_started)]:
            return seq, reason[:MAX_REASON_CHARS], has_started
    raise ProtocolError(f"expected a lost attempt as [seq, reason, has_started], got {attempt!r:.120}")


async def _wait_for_exit(process: LaunchedExecutor, connection: _ExecutorProtocol) -> None:
    exit_code = await process.wait()
    if exit_code is not None:  # otherwise `connection_lost` has the reason
        connection.mark_lost(NodeError(f"exited with code {exit_code}; its output is in the log above"))


async def _wait_for_silence(connection: _ExecutorProtocol, timeout_s: float) -> None:
    """Mark the executor as lost after `timeout_s` without a frame. The time is counted in check intervals and not read
    from a clock, so that time in which the gateway itself is stopped does not count."""
    silent_s = 0.0
    while silent_s < timeout_s:
        await asyncio.sleep(SILENCE_CHECK_INTERVAL_S)
        silent_s = 0.0 if connection.received_frame else silent_s + SILENCE_CHECK_INTERVAL_S
        # Before "ready" there is no silence: START_S limits that time.
        connection.received_frame = not connection.ready.done()
    connection.mark_lost(NodeError(f"sent no frame for {timeout_s:g} s"))


async def start_child(module: str) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start `python -m MODULE --fd N` in a session of its own, so that Ctrl+C in a terminal is for the gateway only.
    `N` is one end of a socket pair. Returns the process and the other end."""
    gateway_end, child_end = socket.socketpair()
    with child_end:
        fd = child_end.fileno()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, "--fd", str(fd)),
                stdin=DEVNULL,
                pass_fds=(fd,),
                start_new_session=True,
            )
        except BaseException:
            gateway_end.close()
            raise
    return process, gateway_end


class ExecutorProcess:
    """`python -m sandbox.executor --fd N` in its own process group: the `LaunchedExecutor` of a real server."""

    def __init__(self, process: asyncio.subprocess.Process, gateway_end: socket.socket) -> None:
        self.socket = gateway_end
        self._process = process

    @classmethod
    async def launch(cls, module: str = EXECUTOR_MODULE) -> ExecutorProcess:
        return cls(*await start_child(module))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()
