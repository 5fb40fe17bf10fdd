"""The executor's end of the connection to its gateway. It receives frames with calls, and sends results and losses
(`sandbox.wire`).

If the stream ends, the gateway has ended. The executor then stops and kills all its calls.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import trio

from sandbox import wire
from sandbox.errors import ConfigError, ProtocolError, SandboxError, first_error
from sandbox.executor.executor import Executor
from sandbox.executor.pool_plan import plan_pools
from sandbox.executor.unix_stream import UnixStream
from sandbox.jail import AUTO
from sandbox.settings.server import ExecutorConfig
from sandbox.types import EncodedResult, UnavailableReason, unavailable_result

STATS_INTERVAL_S = 1.0
FLUSH_TIMEOUT_S = 5.0
"""Seconds for which the executor, before it exits, waits until all frames are sent."""

Frames = AsyncGenerator[list[Any], None]


async def serve(sock: socket.socket, set_log_format: Callable[[str], None] = lambda _log_format: None) -> int:
    """Serve a gateway until it closes its end. If it has sent "drain", stop as soon as all calls have ended. Return an
    exit code. `set_log_format` is called with the gateway's format of log lines."""
    stream = UnixStream(sock)
    failure = ""
    async with trio.open_nursery() as nursery, aclosing(_read_frames(stream, wire.Unpacker())) as frames:
        nursery.start_soon(stream.flush_forever)
        try:
            first_frame = await anext(frames, None)
            if first_frame is None or first_frame[0] != "configure":
                raise ProtocolError(f"expected a configure frame first, got {first_frame and first_frame[0]!r}")
            config, is_replacement = ExecutorConfig.decode(first_frame[1]), first_frame[2:] == [True]
            set_log_format(config.log_format)
            if config.isolation == AUTO:
                raise ConfigError(f"isolation={AUTO}: expected a level; the server chooses one for all its executors")
            await GatewayConnection(stream, config, is_replacement=is_replacement).run(frames)
        except* SandboxError as errors:
            failure = str(first_error(errors))
            stream.write(wire.pack(["failed", failure]))
        with trio.move_on_after(FLUSH_TIMEOUT_S):
            await stream.flushed()
        nursery.cancel_scope.cancel()
    stream.close()
    return 1 if failure else 0


class GatewayConnection:
    """Connects one executor with one gateway."""

    def __init__(self, stream: UnixStream, config: ExecutorConfig, *, is_replacement: bool) -> None:
        self._stream = stream
        self._is_draining = False
        self._until_drained = trio.CancelScope()
        self._executor = Executor(
            plan_pools(config),
            self._send_results,
            self._send_lost,
            self._send_window,
            self._send_session_ended,
            is_replacement=is_replacement,
        )

    async def run(self, frames: Frames) -> None:
        with self._until_drained:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._executor.run)
                nursery.start_soon(self._send_ready)
                nursery.start_soon(self._send_stats)
                async for frame in frames:
                    self._handle_frame(frame)
                    self._stop_if_drained()
                nursery.cancel_scope.cancel()

    def _stop_if_drained(self) -> None:
        if self._is_draining and self._executor.is_idle:
            self._until_drained.cancel()

    def _handle_frame(self, frame: list[Any]) -> None:
        match frame:
            case ["calls", list(calls)]:
                for seq, call in calls:
                    self._executor.submit(seq, call)
                self._executor.start_queued_calls()
            case ["cancel", list(seqs)]:
                for seq in seqs:
                    self._executor.cancel(seq)
            case ["close_session", str(session_id)]:
                self._executor.close_session(session_id)
            case ["drain"]:
                self._is_draining = True
            case _:
                raise ProtocolError(f"unexpected frame {frame[0]!r} from the gateway")

    async def _send_ready(self) -> None:
        await self._executor.wait_ready()
        executor, zygotes = self._executor, self._executor.all_zygotes()
        ready = {
            "slots": executor.plan.slots,
            "long_slots": executor.plan.long_slots,
            "sessions": executor.plan.sessions,
            "wanted_fds": executor.plan.wanted_fds,
            "missing_modules": sorted({module for zygote in zygotes for module in zygote.missing_modules}),
            "isolation": executor.plan.level.value,
            "cgroups": executor.cgroups,
            "warnings": executor.warnings,
            "python": next((zygote.python for zygote in zygotes), ""),
        }
        self._stream.write(wire.pack(["ready", ready]))

    def _send_window(self, window: int) -> None:
        self._stream.write(wire.pack(["window", window]))

    def _send_results(self, results: list[tuple[int, EncodedResult]]) -> None:
        for frame_results in _split_into_frames(results):
            self._stream.write(_encode_results(frame_results))
        self._stop_if_drained()

    def _send_lost(self, seq: int, reason: str, has_started: bool) -> None:
        self._stream.write(wire.pack(["lost", [[seq, reason, has_started]]]))
        self._stop_if_drained()

    def _send_session_ended(self, session_id: str, reason: str) -> None:
        self._stream.write(wire.pack(["session_ended", [session_id, reason]]))

    async def _send_stats(self) -> None:
        while True:
            await trio.sleep(STATS_INTERVAL_S)
            self._stream.write(wire.pack(["stats", self._executor.stats()]))


def _encode_results(results: list[tuple[int, EncodedResult]]) -> bytes:
    """Encode one frame. High limits allow results that exceed the largest frame; these become `unavailable`."""
    try:
        return wire.pack(["results", results])
    except ProtocolError as error:
        message = str(error)
        reason = UnavailableReason.RESULT_TOO_LARGE
        replaced = [(seq, unavailable_result(r["id"], reason, message, r["attempts"])) for seq, r in results]
        return wire.pack(["results", [(seq, result.encode(binary=True)) for seq, result in replaced]])


def _split_into_frames(results: list[tuple[int, EncodedResult]]) -> list[list[tuple[int, EncodedResult]]]:
    """Split results into lists of at most `MAX_FRAME_CALLS`, and of about `TARGET_FRAME_BYTES` if they are large."""
    frames: list[list[tuple[int, EncodedResult]]] = []
    frame_bytes = 0
    for seq, result in results:
        texts = result["stdout"], result["stderr"], result["value"] or ""
        result_bytes = sum(map(len, texts)) + sum(map(len, result["files"].values()))
        needs_frame = not frames or len(frames[-1]) == wire.MAX_FRAME_CALLS
        if needs_frame or frame_bytes + result_bytes > wire.TARGET_FRAME_BYTES:
            frames.append([])
            frame_bytes = 0
        frames[-1].append((seq, result))
        frame_bytes += result_bytes
    return frames


async def _read_frames(stream: UnixStream, unpacker: wire.Unpacker) -> Frames:
    while data := await stream.read():
        unpacker.feed(data)
        for frame in unpacker:
            yield frame
