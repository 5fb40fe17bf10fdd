"""Whatever ends a call, its slot is free only once its processes are gone: with control groups, and without."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio

from sandbox.config import ExecutorConfig
from sandbox.errors import IsolationError
from sandbox.executor import executor as core
from sandbox.executor.executor import Executor
from sandbox.executor.slots import Slots
from sandbox.jail import CgroupTree, choose_level
from sandbox.types import Call, Profile, Result
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, is_gone
from tests.jail.jails import descendants, is_passable, system_python

CROWD = 24
CODE = f"""
import os, time
for _ in range({CROWD} - 1):
    if os.fork() == 0: break
held = bytearray(b"x") * (4 << 20)  # which takes time to give back
time.sleep(1000)
"""


def guest_of(level: str) -> str:
    try:
        choose_level(level)
    except IsolationError as why:
        pytest.skip(str(why))
    if level == "landlock" and os.geteuid() != 0:
        pytest.skip("landlock as an ordinary user: a call is one process, which dies with its zygote at once")
    if level == "landlock" and not is_passable(OWN_PYTHON):
        return system_python() or pytest.skip("calls with uids of their own need a Python that others can reach")
    return OWN_PYTHON


def no_groups() -> CgroupTree:
    raise IsolationError("cgroups: none in this test")


@pytest.mark.trio
@pytest.mark.parametrize("victim", ["call", "zygote", "first zygote", "launcher"])
@pytest.mark.parametrize("has_groups", [True, False])
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
async def test_a_slot_is_free_only_when_the_processes_of_its_call_are_gone(
    level: str, has_groups: bool, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = guest_of(level)
    if has_groups:
        try:
            CgroupTree().close()
        except IsolationError as why:
            pytest.skip(str(why))
    else:
        monkeypatch.setattr(core.jail, "CgroupTree", no_groups)
    crowd: list[int] = []
    left: list[list[int]] = []
    free = Slots._mark_free

    def note(slots: Slots, number: int) -> None:
        left.append([pid for pid in crowd if not is_gone(pid)])
        free(slots, number)

    monkeypatch.setattr(Slots, "_mark_free", note)
    answers: list[Result] = []
    settings: dict[str, Any] = {"profiles": ("bare", "numeric"), "zygote_pools": 1, "slots": 2, "attempts": 1}
    executor = Executor(
        ExecutorConfig(python=python, isolation=level, **settings),
        lambda _seq, result: answers.append(Result.decode(result)),
    )
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.run)
            await executor.wait_ready()
            (family,) = executor.pools
            zygote = family.zygotes[Profile.NUMERIC]
            executor.submit(1, Call(CODE, profile=Profile.NUMERIC).encode(binary=True))
            executor.start_queued_calls()
            while len(crowd) < CROWD:
                await trio.sleep(0.01)
                crowd[:] = descendants(zygote.stream.peer_pid)[1:]
            assert zygote.jail_process is not None
            if victim == "call":
                executor.cancel(1)
            else:
                first = family.zygotes[Profile.BARE].stream.peer_pid
                pids = {"zygote": zygote.stream.peer_pid, "first zygote": first, "launcher": zygote.jail_process.pid}
                os.kill(pids[victim], signal.SIGKILL)
            while not left:  # noqa: ASYNC110  the kernel and zygotes have no event for it
                await trio.sleep(0.001)
            assert left == [[]]
            await executor.wait_ready()
            executor.submit(2, Call("6 * 7").encode(binary=True))
            executor.start_queued_calls()
            while not any(result.value == "42" for result in answers):  # noqa: ASYNC110
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
