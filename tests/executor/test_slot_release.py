"""Tests of the release of slots. A slot is the set of resources that one call at a time uses.

A slot is free only once all processes of its call have ended, whatever ended the call, with and without cgroups.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio

from sandbox.errors import IsolationError
from sandbox.executor import executor as executor_module
from sandbox.executor.executor import Executor
from sandbox.executor.pool_plan import plan_pools
from sandbox.executor.slots import Slots
from sandbox.jail import CgroupTree, choose_level
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Call, Profile, Result
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, is_gone
from tests.jail.jails import all_users_can_reach, system_python, tree_pids

PROCESSES = 24
FORKING_CODE = f"""
import os, time
for _ in range({PROCESSES} - 1):
    if os.fork() == 0: break
held = bytearray(b"x") * (4 << 20)  # freeing it takes time
time.sleep(1000)
"""


@pytest.fixture
def python(level: str, has_cgroups: bool) -> str:
    """Return a Python that calls can use at this level. If there is none, this fixture skips the test. A skip inside of
    a Trio test would lose its reason."""
    try:
        choose_level(level)
        if has_cgroups:
            CgroupTree().close()
    except IsolationError as error:
        pytest.skip(str(error))
    if level == "landlock" and os.geteuid() != 0:
        pytest.skip("landlock as an ordinary user: a call is one process, which dies with its zygote")
    if level == "landlock" and not all_users_can_reach(OWN_PYTHON):
        return system_python() or pytest.skip(
            "calls with their own uids need a Python in a directory that everyone may enter"
        )
    return OWN_PYTHON


def no_cgroups() -> CgroupTree:
    """Replace `CgroupTree` on a machine without cgroups."""
    raise IsolationError("cgroups: none in this test")


@pytest.mark.trio
@pytest.mark.parametrize("victim", ["call", "zygote", "first zygote", "launcher"])
@pytest.mark.parametrize("has_cgroups", [True, False])
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
async def test_a_slot_is_free_only_when_the_processes_of_its_call_are_gone(
    level: str, has_cgroups: bool, victim: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cgroups:
        monkeypatch.setattr(executor_module.jail, "CgroupTree", no_cgroups)
    call_pids: list[int] = []
    alive_when_freed: list[list[int]] = []
    mark_free = Slots._mark_free

    def record_and_mark_free(slots: Slots, slot: int) -> None:
        alive_when_freed.append([pid for pid in call_pids if not is_gone(pid)])
        mark_free(slots, slot)

    monkeypatch.setattr(Slots, "_mark_free", record_and_mark_free)
    results: list[Result] = []
    settings: dict[str, Any] = {"profiles": ("bare", "numeric"), "zygote_pools": 1, "slots": 2}

    def on_lost(seq: int, _reason: str, _has_started: bool) -> None:
        """Submit the second call again, as the gateway does. When the first process is killed, the other
        zygotes of its jail end shortly after it. A call that is sent to one of them in this time is lost."""
        if seq > 1:
            submit(seq + 1, Call("6 * 7"))

    executor = Executor(
        plan_pools(ExecutorConfig(python=python, isolation=level, **settings)),
        lambda ended: results.extend(Result.decode(result) for _, result in ended),
        on_lost,
    )

    def submit(seq: int, call: Call) -> None:
        executor.submit(seq, call.encode(binary=True))
        executor.start_queued_calls()

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.run)
            await executor.wait_ready()
            (pool,) = executor.pools
            zygote = pool.zygotes[Profile.NUMERIC]
            submit(1, Call(FORKING_CODE, profile=Profile.NUMERIC))
            while len(call_pids) < PROCESSES:
                await trio.sleep(0.01)
                call_pids[:] = tree_pids(zygote.stream.peer_pid)[2:]  # after zygote and template
            assert zygote.jail_process is not None
            if victim == "call":
                executor.cancel(1)
            else:
                first_zygote = pool.zygotes[Profile.BARE]
                pid_of = {
                    "zygote": zygote.stream.peer_pid,
                    "first zygote": first_zygote.stream.peer_pid,
                    "launcher": zygote.jail_process.pid,
                }
                os.kill(pid_of[victim], signal.SIGKILL)
            while not alive_when_freed:  # noqa: ASYNC110  no event is set when a slot is freed
                await trio.sleep(0.001)
            assert alive_when_freed == [[]]
            submit(2, Call("6 * 7"))
            while not any(result.value == "42" for result in results):  # noqa: ASYNC110  no event is set here either
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
