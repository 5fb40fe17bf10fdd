"""Zygotes that run nothing: real frames over real sockets, under Trio. What a call's code says is what they do with it.

    "NAME"              what `Peer` has under that name, every time the call comes
    "NAME TIMES WHO"    the first TIMES times, later "ok"; WHO only makes codes different

`Fleet.start_jail` stands where `Family._start_jail` does.
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from sandbox.config import ExecutorConfig
from sandbox.executor import executor, zygote_pool
from sandbox.executor.executor import Executor
from sandbox.jail import Interpreter
from sandbox.types import Call, Limits, Result
from tests.executor.calling import OWN_PYTHON

_find = cache(Interpreter.find)

__all__ = ["HOSTILE", "Driven", "Fleet", "Limits", "Peer", "answer", "done", "driven", "frame"]

HOSTILE = (
    *("die", "garbage", "huge_head", "huge_body", "nobody", "other", "twice", "half", "late", "no_pidfd", "floods_fds"),
    *(
        "wrong_types",
        "deep",
        "not_a_number",
        "ready_again",
        "no_op",
        "too_much",
        "fake_pidfd",
        "two_lasting",
        "kill_jail",
    ),
)
"""All that a zygote may do wrong in answer to a call."""


def frame(header: dict[str, Any] | str, *blobs: bytes) -> bytes:
    """One frame, of any header at all."""
    if isinstance(header, dict):
        header = json.dumps({**header, "blobs": [len(blob) for blob in blobs]})
    return struct.pack("<II", len(header), sum(map(len, blobs))) + header.encode() + b"".join(blobs)


def done(ticket: int, stdout: bytes = b"", **more: Any) -> bytes:
    usage = {"wall_ms": 1.0, "cpu_ms": 1.0, "peak_kb": 1024, "stdout_truncated": False, "stderr_truncated": False}
    return frame(
        {"op": "ended", "run_id": ticket, "exit_code": 0, "signal": None, **usage, **more}, stdout, b"", b"", b""
    )


def answer(ticket: int, stdout: bytes = b"", code: int = 0) -> bytes:
    """The same as guests say it."""
    head = struct.pack("<BQiiQQQB4Q", 1, ticket, code, -1, 1000, 1000, 1024, 0, len(stdout), 0, 0, 0)
    return struct.pack("<II", len(head), len(stdout)) + head + stdout


class Jail:
    """A family's process, as far as it is asked about."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    def kill(self) -> None:
        for peer in self.peers:
            peer.end()

    def wait(self) -> int:
        return 0


class Peer:
    """A zygote's end of the socket."""

    def __init__(self, fleet: Fleet, jail: Jail, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.fleet, self.jail, self.sock = fleet, jail, sock
        self.calls: dict[int, str] = {}
        self.fds: list[int] = []
        self.is_open = True
        jail.peers.append(self)
        fleet.peers.append(self)

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()

    def say(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """What does not fit is lost, as by a zygote that dies in the middle."""
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
            while self.is_open and len(buffer) >= 8:
                head, body = struct.unpack_from("<II", buffer)
                if len(buffer) < 8 + head + body:
                    break
                header = marshal.loads(buffer[8 : 8 + head])
                self.obey(header, buffer[8 + head : 8 + head + body])
                buffer = buffer[8 + head + body :]
        self.end()

    def obey(self, header: dict[str, Any], body: bytes) -> None:
        match header["op"]:
            case "configure":
                self.fleet.on_start(self)
            case "spawn":
                self.fleet.begin(self.jail, socket.socket(fileno=self.fds.pop(0)))
            case "call":
                code = body[: header["blobs"][0]].decode()
                self.calls[header["run_id"]] = code
                self.fleet.behave(self, header["run_id"], code)
            case "kill" if header["run_id"] in self.calls:
                self.say(done(header["run_id"], exit_code=None, signal=signal.SIGKILL))

    def warm(self) -> None:
        self.say(frame({"op": "ready", "python": "3.0", "modules": ["sys"], "missing": [], "problems": []}))

    # what a call makes it do

    def ok(self, ticket: int) -> None:
        self.say(answer(ticket, self.calls.pop(ticket).encode()))

    async def slow(self, ticket: int) -> None:
        await trio.sleep(0.01 * (ticket % 7))
        self.ok(ticket)

    def hang(self, ticket: int) -> None: ...

    def killed(self, ticket: int) -> None:
        del self.calls[ticket]
        self.say(done(ticket, exit_code=None, signal=signal.SIGKILL))

    def failed(self, ticket: int) -> None:
        del self.calls[ticket]
        self.say(frame({"op": "start_failed", "run_id": ticket, "reason": "no\nroom" * 1000}))

    def die(self, _ticket: int) -> None:
        self.end()

    def kill_jail(self, _ticket: int) -> None:
        self.jail.kill()

    def garbage(self, _ticket: int) -> None:
        self.say(b"\xff" * 1000)

    def huge_head(self, _ticket: int) -> None:
        self.say(struct.pack("<II", (1 << 32) - 1, 0) + b"{" * 1000)

    def huge_body(self, _ticket: int) -> None:
        self.say(struct.pack("<II", 10, (1 << 32) - 1) + b"{" * 1000)

    def nobody(self, _ticket: int) -> None:
        self.say(done(1 << 60))

    def other(self, ticket: int) -> None:
        elsewhere = [t for peer in self.fleet.peers if peer is not self for t in peer.calls]
        self.say(done(next(iter(elsewhere), ticket + 1)))

    def twice(self, ticket: int) -> None:
        self.say(2 * done(ticket, self.calls.pop(ticket).encode()))

    def half(self, ticket: int) -> None:
        self.say(answer(ticket)[:-20])

    def late(self, ticket: int) -> None:
        self.say(frame({"op": "still_running", "run_id": ticket, "pid": 7, "wall_ms": "soon"}))

    def no_pidfd(self, ticket: int) -> None:
        self.say(frame({"op": "still_running", "run_id": ticket, "pid": 7, "wall_ms": 10.0}))

    def fake_pidfd(self, ticket: int) -> None:
        self.lasting(ticket, -1e14)

    def lasting(self, ticket: int, wall_ms: float) -> None:
        with open(os.devnull) as null:
            self.say(frame({"op": "still_running", "run_id": ticket, "pid": 7, "wall_ms": wall_ms}), (null.fileno(),))

    def two_lasting(self, ticket: int) -> None:
        with subprocess.Popen(["sleep", "1000"]) as victim:
            own = os.pidfd_open(victim.pid)
            for _ in range(2):
                self.say(frame({"op": "still_running", "run_id": ticket, "pid": 7, "wall_ms": 0.0}), (own,))
            os.close(own)
            victim.kill()

    def floods_fds(self, ticket: int) -> None:
        with open(os.devnull) as null:
            for _ in range(40):
                self.say(b"\0", (null.fileno(),) * 10)

    def wrong_types(self, ticket: int) -> None:
        self.say(done(ticket, exit_code={}, wall_ms=True))

    def deep(self, ticket: int) -> None:
        self.say(frame('{"op": "ended", "blobs": [], "run_id": ' + "[" * 100_000 + "}"))

    def not_a_number(self, ticket: int) -> None:
        self.say(frame(f'{{"op": "ended", "blobs": [], "run_id": {ticket}, "wall_ms": NaN, "cpu_ms": Infinity}}'))

    def ready_again(self, _ticket: int) -> None:
        self.warm()

    def no_op(self, ticket: int) -> None:
        self.say(frame({"run_id": ticket}))

    def too_much(self, ticket: int) -> None:
        self.say(struct.pack("<II", 100, 1 << 30))


class Fleet:
    """All zygotes of an executor."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.peers: list[Peer] = []
        self.jails: list[Jail] = []
        self.started: Counter[str] = Counter()
        """How often each code came."""
        self.on_start = Peer.warm
        self._nursery = nursery

    def start_jail(self, _family: zygote_pool.Family, sock: socket.socket) -> Jail:
        self.jails.append(Jail())
        self.begin(self.jails[-1], sock.dup())
        return self.jails[-1]

    def begin(self, jail: Jail, sock: socket.socket) -> None:
        peer = Peer(self, jail, sock)
        if len(jail.peers) > 1:
            peer.warm()
        self._nursery.start_soon(peer.serve)

    def behave(self, peer: Peer, ticket: int, code: str) -> None:
        self.started[code] += 1
        name, times, *_ = (*code.split(), "1000000")
        act = getattr(peer, name if self.started[code] <= int(times) else "ok")
        if inspect.iscoroutinefunction(act):
            self._nursery.start_soon(act, ticket)
        else:
            act(ticket)


class Driven:
    """An executor over a fleet, and what it answered."""

    def __init__(self, config: ExecutorConfig, hurry: bool) -> None:
        self.executor = Executor(config, self._answer, hurry=hurry)
        self.answers: dict[int, Result] = {}
        self.fleet: Fleet
        self._changed = trio.Event()
        self._seqs = itertools.count(1000)

    def _answer(self, seq: int, result: dict[str, Any]) -> None:
        assert seq not in self.answers, "answered twice"
        self.answers[seq] = Result.decode(result)
        self._changed.set()
        self._changed = trio.Event()

    def submit(self, *codes: str, **more: Any) -> list[int]:
        seqs = list(itertools.islice(self._seqs, len(codes)))
        for seq, code in zip(seqs, codes, strict=True):
            self.executor.submit(seq, Call(code, **more).encode(binary=True))
        self.executor.pump()
        return seqs

    async def run(self, *codes: str, **more: Any) -> list[Result]:
        seqs = self.submit(*codes, **more)
        await self.all_of(seqs)
        return [self.answers[seq] for seq in seqs]

    async def all_of(self, seqs: list[int]) -> None:
        with trio.fail_after(10_000):  # of a clock that jumps
            while not all(seq in self.answers for seq in seqs):
                await self._changed.wait()

    def check_at_rest(self) -> None:
        """Nothing runs, so every slot is free, once."""
        assert self.executor.is_idle
        for one in self.executor.families:
            assert sorted(one.slots.free) == list(range(one.slots.count))
            assert not any(zygote.calls for zygote in one.zygotes.values())


@asynccontextmanager
async def driven(monkeypatch: pytest.MonkeyPatch, *, hurry: bool = False, **settings: Any) -> AsyncIterator[Driven]:
    """An executor whose zygotes are fakes and whose clock is Trio's; ready, and at rest at the end."""
    settings = {"isolation": "none", "profiles": ("bare", "numeric"), "zygote_pools": 2, "slots": 4, **settings}
    with monkeypatch.context() as patch:
        patch.setattr(executor, "time", SimpleNamespace(monotonic=trio.current_time))
        patch.setattr(Interpreter, "find", _find)
        driver = Driven(ExecutorConfig(python=str(OWN_PYTHON), **settings), hurry)
        before = len(os.listdir("/proc/self/fd"))
        async with trio.open_nursery() as nursery:
            driver.fleet = Fleet(nursery)
            patch.setattr(zygote_pool.Family, "_start_jail", lambda self, sock: driver.fleet.start_jail(self, sock))
            nursery.start_soon(driver.executor.run)
            await driver.executor.wait_ready()
            yield driver
            nursery.cancel_scope.cancel()
        for peer in driver.fleet.peers:
            peer.end()
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors leaked"
