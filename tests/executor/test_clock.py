"""A call's own clock: waiting for a core is not the call's time, sleeping is, and starving oneself is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from sandbox.executor import clock
from sandbox.types import Result, Status
from tests.executor import zygotes
from tests.executor.zygotes import Peer, driven

HERE = os.getpid()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_pidfd_leads_to_its_process_while_there_is_one(child: subprocess.Popen[bytes]) -> None:
    fd = os.pidfd_open(child.pid)
    assert clock.host_pid(fd) == child.pid
    child.kill()
    child.wait()
    assert clock.host_pid(fd) is None
    os.close(fd)
    with open(os.devnull) as null:
        assert clock.host_pid(null.fileno()) is None


def test_waiting_is_read_from_the_scheduler_and_is_0_where_it_does_not_say() -> None:
    assert 0 <= clock.waited_s(HERE) < 1e6
    assert clock.waited_s(2**30) == 0.0


def test_a_process_is_alone_until_it_starts_another(child: subprocess.Popen[bytes]) -> None:
    assert clock.is_alone(child.pid)
    assert not clock.is_alone(HERE), "this one has a child"
    assert clock.is_alone(2**30)
    code = "import threading\nthreading.Thread(target=input).start()\nprint()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as threads:
        assert threads.stdout is not None
        threads.stdout.readline()
        assert not clock.is_alone(threads.pid)
        threads.kill()


class Machine:
    """A scheduler that keeps a call waiting for a share of the time, and what becomes of the call."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, share: float, *, alone: Callable[[], bool] = lambda: True
    ) -> None:
        self.killed_after: float | None = None
        self._patch = monkeypatch
        self._share, self._alone = share, alone

    async def run(self, timeout_s: float, **more: Any) -> Result:
        """A call that never ends by itself."""
        self._patch.setattr(clock, "host_pid", lambda _fd: 77)
        self._patch.setattr(clock, "waited_s", lambda _pid: self._share * (trio.current_time() - started))
        self._patch.setattr(clock, "is_alone", lambda _pid: self._alone())
        self._patch.setattr(signal, "pidfd_send_signal", self._kill)
        machine = self

        async def outlast(peer: Peer, ticket: int) -> None:
            machine._peer, machine._ticket = peer, ticket
            await trio.sleep(timeout_s)
            peer.overdue(ticket, timeout_s * 1e3)

        self._patch.setattr(Peer, "outlast", outlast, raising=False)
        async with driven(self._patch, zygotes=1, slots=1, profiles=("bare",)) as driver:
            started = trio.current_time()
            self._started = started
            (result,) = await driver.run("outlast", limits=zygotes.Limits(timeout_s=timeout_s, **more))
            return result

    def _kill(self, _fd: int, number: int) -> None:
        self.killed_after = trio.current_time() - self._started
        self._peer.say(zygotes.done(self._ticket, code=None, signal=number))


@pytest.mark.trio
@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 0.89])
async def test_waiting_for_a_core_is_not_the_calls_time(
    share: float, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    machine = Machine(monkeypatch, share)
    result = await machine.run(2.0)
    assert result.status is Status.TIMEOUT
    assert machine.killed_after == pytest.approx(2.0 / (1 - share), rel=0.05)


@pytest.mark.trio
async def test_a_call_without_a_core_is_no_verdict_in_the_end(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    machine = Machine(monkeypatch, 0.99)
    result = await machine.run(2.0)
    assert result.status is Status.UNAVAILABLE
    assert result.error is not None
    assert result.error.type == "Starved"
    assert machine.killed_after is not None
    cap_s = clock.hard_cap_s(2.0)
    assert cap_s <= machine.killed_after < cap_s + 3.0


@pytest.mark.trio
@pytest.mark.parametrize("alone", [lambda: False, iter([True, False, *[True] * 10_000]).__next__])
async def test_a_call_that_starves_itself_is_timed_out(
    alone: Callable[[], bool], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Else a fork bomb would be our fault, and free of charge; also one that hides its children later."""
    machine = Machine(monkeypatch, 0.99, alone=alone)
    assert (await machine.run(2.0)).status is Status.TIMEOUT
    assert machine.killed_after is not None
    assert 20.0 <= machine.killed_after < 23.0
