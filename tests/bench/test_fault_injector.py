"""The fault injector kills zygotes, their jails and executors, and never a call."""

from __future__ import annotations

import os
import random

from bench.probes import fault_injector
from bench.probes.fault_injector import FaultInjector
from sandbox.types import Status
from tests.executor.calling import call, executor, wait_gone
from tests.executor.test_connection import SLEEP, jail_of, start_sleeper


def test_the_fault_injector_kills_a_zygote_and_not_its_call_with_the_same_command_line() -> None:
    with executor() as caller:
        seq, call_pid = start_sleeper(caller, timeout_s=2.0)
        by_kind = fault_injector.processes_by_kind(os.getpid())
        launcher, init, zygote = jail_of(caller)
        assert {call_pid, zygote} <= set(by_kind["zygote"])
        assert launcher in by_kind["launcher"] and init in by_kind["init"] and caller.process.pid in by_kind["executor"]
        assert fault_injector._kill(call_pid, "zygote") is False
        result = caller.result_of(seq)
        assert (result.status, result.attempts) == (Status.TIMEOUT, 1), "the call must run to its end"
        assert fault_injector._kill(zygote, "zygote") is True
        wait_gone([launcher, init, zygote])
        assert caller.run("1").value == "1"  # on a new zygote


def test_a_process_that_is_gone_is_not_counted_as_killed() -> None:
    pid = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(pid, 0)  # reaped, so the pid names no process any more
    assert fault_injector._kill(pid, "executor") is False
    injector = FaultInjector(random.Random(1))
    injector.kill_one(pid)
    assert not injector.kills


def test_sleeping_calls_are_not_killed() -> None:
    with executor() as caller:
        seqs = [caller.submit(call(SLEEP, timeout_s=1.0)) for _ in range(3)]
        for pid in fault_injector.processes_by_kind(os.getpid())["zygote"]:
            if pid != jail_of(caller)[2]:
                fault_injector._kill(pid, "zygote")
        assert {caller.result_of(seq).status for seq in seqs} == {Status.TIMEOUT}
