"""The executor as a process: frames from the gateway on one descriptor, results back on it (`sandbox.wire`).

End of file means that the gateway has gone, and then so do we: nothing here outlives the connection.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import trio

from sandbox import wire
from sandbox.config import ExecutorConfig
from sandbox.errors import ConfigError, ProtocolError, SandboxError
from sandbox.executor.executor import Executor
from sandbox.executor.result import WireResult
from sandbox.executor.unix_stream import Link
from sandbox.jail import AUTO
from sandbox.types import unavailable_result

STATS_S = 1.0
FLUSH_S = 5.0
"""At the end, for what is still to be sent."""

Frames = AsyncGenerator[list[Any], None]


async def serve(sock: socket.socket) -> int:
    """Until the gateway closes its end, or after "drain" when all is answered. Returns an exit code."""
    link = Link(sock)
    failure = ""
    async with trio.open_nursery() as nursery, aclosing(_frames(link, wire.Unpacker())) as frames:
        nursery.start_soon(link.flush_forever)
        try:
            first = await anext(frames, None)
            if first is None or first[0] != "configure":
                raise ProtocolError("expected a configure frame first")
            config, hurry = ExecutorConfig.decode(first[1]), first[2:] == [True]
            if config.isolation == AUTO:
                raise ConfigError(
                    f"isolation={AUTO}: expected a level; the server chooses one, for all its executors, once"
                )
            await _Service(link, config, hurry=hurry).run(frames)
        except* SandboxError as errors:
            failure = _first_line(errors)
            link.write(wire.pack(["failed", failure]))
        with trio.move_on_after(FLUSH_S):
            await link.flushed()
        nursery.cancel_scope.cancel()
    link.close()
    return 1 if failure else 0


class _Service:
    """Ties one executor to one gateway."""

    def __init__(self, link: Link, config: ExecutorConfig, *, hurry: bool) -> None:
        self._link = link
        self._results: list[tuple[int, WireResult]] = []
        self._have_results = trio.Event()
        self._draining = False
        self._executor = Executor(config, self._answer, hurry=hurry)
        self._executor.on_window = self._tell_window

    async def run(self, frames: Frames) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._executor.run)
            nursery.start_soon(self._announce)
            nursery.start_soon(self._send_results, nursery.cancel_scope)
            nursery.start_soon(self._send_stats)
            async for frame in frames:
                self._obey(frame)
                if self._is_drained:
                    break
            nursery.cancel_scope.cancel()
        self._pass_on()

    @property
    def _is_drained(self) -> bool:
        return self._draining and self._executor.is_idle

    def _obey(self, frame: list[Any]) -> None:
        match frame:
            case ["calls", list(calls)]:
                for seq, call in calls:
                    self._executor.submit(seq, call)
                self._executor.pump()
            case ["cancel", list(seqs)]:
                for seq in seqs:
                    self._executor.cancel(seq)
            case ["drain"]:
                self._draining = True
            case _:
                raise ProtocolError(f"unexpected frame {frame[0]!r} from the gateway")

    async def _announce(self) -> None:
        await self._executor.wait_ready()
        executor = self._executor
        zygotes = [zygote for family in executor.families for zygote in family.zygotes.values()]
        ready = {
            "slots": executor.slots,
            "long_slots": executor.long_slots,
            "wanted_files": executor.wanted_files,
            "lacks": sorted({module for zygote in zygotes for module in zygote.lacks}),
            "window": executor.window,
            "isolation": executor.level.value,
            "profiles": sorted({zygote.profile.value for zygote in zygotes}),
            "python": next((zygote.python for zygote in zygotes), ""),
            "pid": os.getpid(),
        }
        self._link.write(wire.pack(["ready", ready]))

    def _tell_window(self, window: int) -> None:
        self._link.write(wire.pack(["window", window]))

    def _answer(self, seq: int, result: WireResult) -> None:
        self._results.append((seq, result))
        self._have_results.set()

    async def _send_results(self, whole: trio.CancelScope) -> None:
        while True:
            await self._have_results.wait()
            self._have_results = trio.Event()
            self._pass_on()
            if self._is_drained:
                whole.cancel()

    def _pass_on(self) -> None:
        results, self._results = self._results, []
        for batch in _batches(results):
            self._link.write(_packed(batch))

    async def _send_stats(self) -> None:
        while True:
            await trio.sleep(STATS_S)
            self._link.write(wire.pack(["stats", self._executor.stats()]))


def _packed(batch: list[tuple[int, WireResult]]) -> bytes:
    try:
        return wire.pack(["results", batch])
    except ProtocolError as why:  # an operator's ceilings may grant more than a frame takes
        none = [(seq, unavailable_result(r["id"], "ResultTooLarge", str(why), r["attempts"])) for seq, r in batch]
        return wire.pack(["results", [(seq, result.encode(binary=True)) for seq, result in none]])


def _batches(results: list[tuple[int, WireResult]]) -> list[list[tuple[int, WireResult]]]:
    """In frames of at most 64 results, and of about 8 MiB where they are large."""
    batches: list[list[tuple[int, WireResult]]] = []
    size = 0
    for seq, result in results:
        weight = sum(map(len, (result["stdout"], result["stderr"], result["value"] or "", *result["files"].values())))
        if not batches or len(batches[-1]) == wire.MAX_FRAME_CALLS or size + weight > wire.TARGET_FRAME_BYTES:
            batches.append([])
            size = 0
        batches[-1].append((seq, result))
        size += weight
    return batches


async def _frames(link: Link, unpacker: wire.Unpacker) -> Frames:
    while data := await link.read():
        unpacker.feed(data)
        for frame in unpacker:
            yield frame


def _first_line(errors: BaseExceptionGroup[SandboxError]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
