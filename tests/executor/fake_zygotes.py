"""Fake zygotes, which send real frames over real sockets under Trio and have no processes.

A real zygote is the interpreter that forks once per call. The code of a call selects what a fake zygote does:

    "NAME"              it calls the method NAME of `FakeZygote` each time the call is started
    "NAME TIMES ..."    it calls that method the first TIMES times, and then `ok`; further words have no meaning, they
                        only make codes different

`Fleet.start_jail` replaces `ZygotePool._start_jail`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import marshal
import os
import signal
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from sandbox.executor import executor, zygote_pool
from sandbox.executor.executor import Executor
from sandbox.executor.pool_plan import plan_pools
from sandbox.jail import Interpreter
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Call, EncodedResult, Result
from tests.executor.calling import OWN_PYTHON, Attempts

_find = cache(Interpreter.find)

_HOSTILE_BEHAVIOURS = """
    die kill_jail garbage huge_head huge_body too_large truncated twice unknown_call other_call no_op ready_again
    wrong_types deep_json not_a_number invalid_wall_time no_pidfd fake_pidfd two_still_running too_many_fds
"""
HOSTILE_BEHAVIOURS = tuple(_HOSTILE_BEHAVIOURS.split())
"""Names of the methods of `FakeZygote` that break the protocol."""


def frame(header: dict[str, Any] | str, *blobs: bytes) -> bytes:
    """One frame. A header that is a text is sent as it is, valid or not."""
    if isinstance(header, dict):
        header = json.dumps({**header, "blobs": [len(blob) for blob in blobs]})
    return struct.pack("<II", len(header), sum(map(len, blobs))) + header.encode() + b"".join(blobs)


def ended_json(run_id: int, stdout: bytes = b"", **fields: Any) -> bytes:
    """An `ended` frame with a JSON header, which no real zygote sends but the executor accepts."""
    usage = {"wall_ms": 1.0, "cpu_ms": 1.0, "peak_kb": 1024, "stdout_truncated": False, "stderr_truncated": False}
    header = {"op": "ended", "run_id": run_id, "exit_code": 0, "signal": None, **usage, **fields}
    return frame(header, stdout, b"", b"", b"")


def ended_binary(run_id: int, stdout: bytes = b"", exit_code: int = 0) -> bytes:
    """An `ended` frame as real zygotes send it: the fields of `protocol.ENDED`, and the lengths of four blobs."""
    head = struct.pack("<BQiiQQQB4Q", 1, run_id, exit_code, -1, 1000, 1000, 1024, 0, len(stdout), 0, 0, 0)
    return struct.pack("<II", len(head), len(stdout)) + head + stdout


class FakeJail:
    """A fake of the jail's process, with the methods that the pool uses."""

    pid = 1 << 30
    """A process id that no process has."""

    def __init__(self) -> None:
        self.zygotes: list[FakeZygote] = []
        self.outlives_kill = False

    def kill(self) -> None:
        for zygote in self.zygotes:
            zygote.end()

    def poll(self) -> int | None:
        """Return the exit status, or None while the jail runs."""
        return None if self.outlives_kill else 0


class FakeZygote:
    """A zygote's end of the socket."""

    def __init__(self, fleet: Fleet, jail: FakeJail, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.fleet, self.jail, self.sock = fleet, jail, sock
        self.calls: dict[int, str] = {}
        """Code of the running calls, by run id."""
        self.fds: list[int] = []
        """Received descriptors."""
        self.is_open = True
        jail.zygotes.append(self)
        fleet.zygotes.append(self)

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send the bytes that the socket accepts. The rest is lost, as if the zygote died in the middle of a frame."""
        try:
            if self.is_open:
                socket.send_fds(self.sock, [data], list(fds))
        except OSError:
            self.end()

    async def serve(self) -> None:
        buffer = b""
        while self.is_open:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 4)
            except BlockingIOError:
                try:
                    await trio.lowlevel.wait_readable(self.sock)
                except trio.ClosedResourceError:
                    break
                continue
            except OSError:
                break
            if not data:
                break
            self.fds += fds
            buffer += data
            while self.is_open and len(buffer) >= 8:  # the two lengths before each frame
                head_size, body_size = struct.unpack_from("<II", buffer)
                body_start = 8 + head_size
                end = body_start + body_size
                if len(buffer) < end:
                    break
                header = marshal.loads(buffer[8:body_start])
                self.handle_frame(header, buffer[body_start:end])
                buffer = buffer[end:]
        self.end()

    def handle_frame(self, header: dict[str, Any], body: bytes) -> None:
        match header["op"]:
            case "configure":
                self.fleet.on_start(self)
            case "start":
                self.send_ready()
            case "spawn":
                self.fleet.add_zygote(self.jail, socket.socket(fileno=self.fds.pop(0)))
            case "call":
                code = body[: header["blobs"][0]].decode()
                self.calls[header["run_id"]] = code
                self.fleet.behave(self, header["run_id"], code)
            case "kill" if header["run_id"] in self.calls:
                self.send(ended_json(header["run_id"], exit_code=None, signal=signal.SIGKILL))

    def send_loaded(self) -> None:
        self.send(frame({"op": "loaded", "python": "3.0", "modules": ["sys"], "missing": [], "problems": []}))

    def send_ready(self) -> None:
        self.send(frame({"op": "ready"}))

    def send_still_running(self, run_id: int, wall_ms: float) -> None:
        """Send a report with a descriptor that is no pidfd."""
        with open(os.devnull) as null:
            header = {"op": "still_running", "run_id": run_id, "wall_ms": wall_ms}
            self.send(frame(header), (null.fileno(),))

    # The behaviours that a call can select

    def ok(self, run_id: int) -> None:
        """Echo the code to standard output."""
        self.send(ended_binary(run_id, self.calls.pop(run_id).encode()))

    async def slow(self, run_id: int) -> None:
        await trio.sleep(0.01 * (run_id % 7))  # so that the calls end in another order than that of their start
        self.ok(run_id)

    def hang(self, run_id: int) -> None: ...

    def killed(self, run_id: int) -> None:
        del self.calls[run_id]
        self.send(ended_json(run_id, exit_code=None, signal=signal.SIGKILL))

    def start_failed(self, run_id: int) -> None:
        del self.calls[run_id]
        self.send(frame({"op": "start_failed", "run_id": run_id, "reason": "no\nprocess" * 1000}))

    def die(self, _run_id: int) -> None:
        self.end()

    def kill_jail(self, _run_id: int) -> None:
        self.jail.kill()

    def garbage(self, _run_id: int) -> None:
        self.send(b"\xff" * 1000)

    def huge_head(self, _run_id: int) -> None:
        self.send(struct.pack("<II", (1 << 32) - 1, 0) + b"{" * 1000)

    def huge_body(self, _run_id: int) -> None:
        self.send(struct.pack("<II", 10, (1 << 32) - 1) + b"{" * 1000)

    def too_large(self, _run_id: int) -> None:
        self.send(struct.pack("<II", 100, 1 << 30))  # within a u32, but more than the call's limits allow

    def truncated(self, run_id: int) -> None:
        self.send(ended_binary(run_id)[:-20])  # without the lengths of some blobs

    def twice(self, run_id: int) -> None:
        self.send(2 * ended_json(run_id, self.calls.pop(run_id).encode()))

    def unknown_call(self, _run_id: int) -> None:
        self.send(ended_json(1 << 60))

    def other_call(self, run_id: int) -> None:
        """Report the end of a call that runs in another zygote."""
        others = [other for zygote in self.fleet.zygotes if zygote is not self for other in zygote.calls]
        self.send(ended_json(next(iter(others), run_id + 1)))

    def no_op(self, run_id: int) -> None:
        self.send(frame({"run_id": run_id}))

    def ready_again(self, _run_id: int) -> None:
        self.send_ready()

    def wrong_types(self, run_id: int) -> None:
        self.send(ended_json(run_id, exit_code={}, wall_ms=True))

    def deep_json(self, _run_id: int) -> None:
        self.send(frame('{"op": "ended", "blobs": [], "run_id": ' + "[" * 100_000 + "}"))

    def not_a_number(self, run_id: int) -> None:
        self.send(frame(f'{{"op": "ended", "blobs": [], "run_id": {run_id}, "wall_ms": NaN, "cpu_ms": Infinity}}'))

    def invalid_wall_time(self, run_id: int) -> None:
        self.send(frame({"op": "still_running", "run_id": run_id, "wall_ms": "soon"}))

    def no_pidfd(self, run_id: int) -> None:
        self.send(frame({"op": "still_running", "run_id": run_id, "wall_ms": 10.0}))

    def fake_pidfd(self, run_id: int) -> None:
        self.send_still_running(run_id, -1e14)

    def two_still_running(self, run_id: int) -> None:
        with subprocess.Popen(["sleep", "1000"]) as victim:
            pidfd = os.pidfd_open(victim.pid)
            for _ in range(2):
                self.send(frame({"op": "still_running", "run_id": run_id, "wall_ms": 0.0}), (pidfd,))
            os.close(pidfd)
            victim.kill()

    def too_many_fds(self, _run_id: int) -> None:
        with open(os.devnull) as null:
            for _ in range(40):
                self.send(b"\0", (null.fileno(),) * 10)


class Fleet:
    """All fake zygotes of an executor."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.zygotes: list[FakeZygote] = []
        self.jails: list[FakeJail] = []
        self.started: Counter[str] = Counter()
        """How often each code was started."""
        self.on_start = FakeZygote.send_loaded
        """Called with the first zygote of each jail when the pool has configured it."""
        self._nursery = nursery

    def start_jail(self, _pool: zygote_pool.ZygotePool, sock: socket.socket) -> FakeJail:
        self.jails.append(FakeJail())
        self.add_zygote(self.jails[-1], sock.dup())
        return self.jails[-1]

    def add_zygote(self, jail: FakeJail, sock: socket.socket) -> None:
        zygote = FakeZygote(self, jail, sock)
        if len(jail.zygotes) > 1:
            zygote.send_loaded()
        self._nursery.start_soon(zygote.serve)

    def behave(self, zygote: FakeZygote, run_id: int, code: str) -> None:
        self.started[code] += 1
        name, times, *_ = (*code.split(), "1000000")  # without TIMES: each time
        behaviour = getattr(zygote, name if self.started[code] <= int(times) else "ok")
        if inspect.iscoroutinefunction(behaviour):
            self._nursery.start_soon(behaviour, run_id)
        else:
            behaviour(run_id)


class ExecutorDriver:
    """An executor with fake zygotes, and the results of its calls."""

    def __init__(self, config: ExecutorConfig, is_replacement: bool) -> None:
        self.windows: list[int] = []
        """The window of the executor after each of its changes."""
        self.executor = Executor(
            plan_pools(config), self._on_results, self._on_lost, self.windows.append, is_replacement=is_replacement
        )
        self.attempts = Attempts(config.attempts, self.executor.submit)
        self.results: dict[int, Result] = {}
        self.fleet: Fleet
        self._changed = trio.Event()
        self._seqs = itertools.count(1000)  # tests that choose seqs themselves use smaller ones

    def _on_results(self, results: list[tuple[int, EncodedResult]]) -> None:
        for seq, result in results:
            self._add_result(seq, self.attempts.decode(seq, result))

    def _on_lost(self, seq: int, reason: str, has_started: bool) -> None:
        if (unavailable := self.attempts.lost(seq, reason, has_started)) is not None:
            self._add_result(seq, unavailable)
        self.executor.start_queued_calls()

    def _add_result(self, seq: int, result: Result) -> None:
        assert seq not in self.results, "a call got two results"
        self.results[seq] = result
        self._changed.set()
        self._changed = trio.Event()

    def submit(self, *codes: str, reserved: bool = False, **fields: Any) -> list[int]:
        """Submit a call per code, all in reserved places or none; return their seqs."""
        seqs = list(itertools.islice(self._seqs, len(codes)))
        for seq, code in zip(seqs, codes, strict=True):
            self.attempts.start(seq, {**Call(code, **fields).encode(binary=True), "reserved": reserved})
        self.executor.start_queued_calls()
        return seqs

    async def run(self, *codes: str, **fields: Any) -> list[Result]:
        """Submit a call per code and wait for their results."""
        seqs = self.submit(*codes, **fields)
        await self.wait_for(seqs)
        return [self.results[seq] for seq in seqs]

    async def wait_for(self, seqs: list[int]) -> None:
        with trio.fail_after(10_000):  # seconds of Trio's mock clock, which jumps
            while not all(seq in self.results for seq in seqs):
                await self._changed.wait()

    def check_idle(self) -> None:
        """Assert that no call runs and that each slot is in the list of free slots exactly once."""
        assert self.executor.is_idle and not self.executor._queued
        for pool in self.executor.pools:
            assert sorted(pool.slots.free) == list(range(pool.slots.count)) and not pool.slots.reserved
            assert not any(zygote.running for zygote in pool.zygotes.values())


@asynccontextmanager
async def driven_executor(
    monkeypatch: pytest.MonkeyPatch, *, is_replacement: bool = False, **settings: Any
) -> AsyncIterator[ExecutorDriver]:
    """Start an executor with fake zygotes and Trio's clock, and wait until it is ready. Asserts at the end that no
    descriptor has leaked."""
    settings = {"isolation": "none", "profiles": ("bare", "numeric"), "zygote_pools": 2, "slots": 4, **settings}
    with monkeypatch.context() as patch:
        patch.setattr(executor, "time", SimpleNamespace(monotonic=trio.current_time))
        patch.setattr(Interpreter, "find", _find)
        driver = ExecutorDriver(ExecutorConfig(python=str(OWN_PYTHON), **settings), is_replacement)
        fds_before = len(os.listdir("/proc/self/fd"))
        async with trio.open_nursery() as nursery:
            driver.fleet = Fleet(nursery)
            patch.setattr(zygote_pool.ZygotePool, "_start_jail", lambda pool, sock: driver.fleet.start_jail(pool, sock))
            nursery.start_soon(driver.executor.run)
            await driver.executor.wait_ready()
            yield driver
            nursery.cancel_scope.cancel()
        for zygote in driver.fleet.zygotes:
            zygote.end()
        assert len(os.listdir("/proc/self/fd")) == fds_before, "descriptors leaked"


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    with trio.fail_after(10_000):  # seconds of Trio's mock clock, which jumps
        while not condition():  # noqa: ASYNC110  no event is set when the condition changes
            await trio.sleep(1)
