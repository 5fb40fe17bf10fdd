"""What is killed: whatever runs calls, and never a call."""

from __future__ import annotations

import os
import random

from bench.probes import fault_injector
from bench.probes.fault_injector import Monkey
from sandbox.types import Status
from tests.executor.calling import call, executor, wait_gone
from tests.executor.test_connection import SLEEP, jail_of, start_sleeper


def test_a_call_that_looks_like_its_zygote_is_let_go_on() -> None:
    with executor() as caller:
        seq, pid = start_sleeper(caller, timeout_s=2.0)
        found = fault_injector.victims(os.getpid())
        launcher, init, zygote = jail_of(caller)
        assert {pid, zygote} <= set(found["zygote"])
        assert launcher in found["launcher"] and init in found["init"] and caller.process.pid in found["executor"]
        assert fault_injector._kill(pid, "zygote") is False
        result = caller.result_of(seq)
        assert (result.status, result.attempts) == (Status.TIMEOUT, 1), "it went on to its end"
        assert fault_injector._kill(zygote, "zygote") is True
        wait_gone([launcher, init, zygote])
        assert caller.run("1").value == "1"


def test_what_is_gone_already_is_not_counted() -> None:
    pid = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(pid, 0)
    assert fault_injector._kill(pid, "executor") is False
    one = Monkey(random.Random(1))
    one.strike(pid)
    assert not one.kills


def test_a_call_in_its_sleep_is_none_of_its_victims() -> None:
    with executor() as caller:
        seqs = [caller.submit(call(SLEEP, timeout_s=1.0)) for _ in range(3)]
        for pid in fault_injector.victims(os.getpid())["zygote"]:
            if pid != jail_of(caller)[2]:
                fault_injector._kill(pid, "zygote")
        assert {caller.result_of(seq).status for seq in seqs} == {Status.TIMEOUT}
