"""Tests of memory limits on machines without cgroups.

The executor sums up the memory of the processes of a call. If the machine runs out of memory, the kernel's OOM killer
kills calls before it kills the server.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox import machine
from sandbox.errors import IsolationError
from sandbox.executor import run_once
from sandbox.executor.time.process_tree import ProcessTree, exceeds_memory
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.jail import choose_level
from sandbox.settings.server import ExecutorConfig, ServeConfig
from sandbox.types import Call, Limits, Network, Result, Status
from tests.executor.calling import NO_CGROUPS, OWN_PYTHON, call, executor, executor_after
from tests.jail.jails import all_users_can_reach, system_python

MIB = 1 << 20
FORKS_THEN_COPIES = f"""
import os, sys
kept = bytearray(b"x" * (64 * {MIB}))
done_r, done_w = os.pipe()
go_r, go_w = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.write(done_w, b".")
        os.read(go_r, 1)
        kept[:] = b"y" * len(kept)
        os.write(done_w, b".")
        os.read(0, 1)
        os._exit(0)
for _ in range(3):
    os.read(done_r, 1)
print(flush=True)
input()
os.write(go_w, b"...")
for _ in range(3):
    os.read(done_r, 1)
print(flush=True)
input()
"""
"""Code that forks three processes, which share 64 MiB with their parent, and prints a line. When it gets a line of
input, each of the three processes writes to the 64 MiB, and so copies them. Then the code prints a second line."""


def test_the_thread_that_reads_memory_is_started_before_the_first_call() -> None:
    """The start of a later thread could fail, because a fork bomb may have taken all processes of the container."""
    with executor(isolation="none") as caller:
        assert len(list(Path(f"/proc/{caller.process.pid}/task").iterdir())) == 2


def test_shared_pages_count_once_and_copied_pages_count_for_each_process() -> None:
    argv = [sys.executable, "-c", FORKS_THEN_COPIES]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        tree = ProcessTree(process.pid)
        for copies in (1, 4):
            process.stdout.readline()
            tree.sample()
            resident = tree.resident_bytes()
            assert len(resident) == 4
            assert sum(resident.values()) > 4 * 64 * MIB
            assert exceeds_memory(resident, copies * 64 * MIB - MIB, zygote_bytes=0)
            assert not exceeds_memory(resident, (copies * 64 + 40) * MIB, zygote_bytes=0), "40 MiB for the interpreters"
            process.stdin.write(b"\n")
            process.stdin.flush()
        process.communicate()


def test_if_shared_pages_cannot_be_counted_the_zygotes_memory_is_subtracted_for_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_path: str) -> bytes:
        raise PermissionError

    monkeypatch.setattr("sandbox.executor.time.process_tree._read", refuse)
    resident = {1: 100, 2: 60, 3: 10}
    sum_bytes = (100 - 20) + (60 - 20) + 0
    assert exceeds_memory(resident, sum_bytes - 1, zygote_bytes=20)
    assert not exceeds_memory(resident, sum_bytes, zygote_bytes=20)


def test_the_memory_of_a_single_process_is_not_read() -> None:
    tree = ProcessTree(1)
    tree._pids = [1]
    assert tree.resident_bytes() == {}


MEMORY_BOMB = """
import os, time
for n in range({processes} - 1):
    if os.fork() == 0:
        if "{timing}" == "in turn": time.sleep(0.05 * n)
        kept = b"x" * (20 << 20)
        time.sleep(1000)
time.sleep(1000)
"""


@pytest.mark.parametrize("timing", ["at once", "in turn"])
def test_calls_that_exceed_memory_together_end_as_memory_limit_and_change_no_other_result(timing: str) -> None:
    """There are 8 calls with 12 processes of 20 MiB each. Without limits they would use 8 * 12 * 20 MiB."""
    processes = 12
    with executor(server=executor_after(NO_CGROUPS), slots=12, isolation="namespaces") as caller:
        limits = {"memory_mb": 24, "disk_mb": 1, "processes": processes, "timeout_s": 60}
        bomb = MEMORY_BOMB.format(timing=timing, processes=processes)
        bombs = [caller.submit(call(bomb, **limits)) for _ in range(8)]
        others = [caller.submit(call(f"import time; time.sleep(0.1); {n}", timeout_s=60)) for n in range(20)]
        for n, seq in enumerate(others):
            result = caller.result_of(seq)
            assert (result.status, result.value, result.attempts) == (Status.OK, str(n), 1), result
        for seq in bombs:
            result = caller.result_of(seq)
            assert (result.status, result.attempts) == (Status.MEMORY_LIMIT, 1), result
            assert result.error is not None
            assert "memory_mb" in result.error.message
        assert caller.run("1").value == "1"


SOCKET_BOMBS = {
    "connections that wait": """
for n in range(COUNT):
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind(str(n)); kept[-1].listen(128)
    for _ in range(128):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(n))
            client.setblocking(False)
            client.send(bytes(1 << 16))
""",
    "datagrams": """
for n in range(10 * COUNT):
    kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    kept[-1].bind("\\0%d" % n)
    for _ in range(10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.sendto(bytes(200_000), "\\0%d" % n)
""",
    "TCP": """
server = socket.create_server(("127.0.0.1", 8000))
for n in range(2 * COUNT):
    kept.append(socket.create_connection(("127.0.0.1", 8000)))
    kept[-1].setblocking(False)
    try:
        while True: kept[-1].send(bytes(1 << 16))
    except BlockingIOError: pass
""",
    "UDP": """
if COUNT > 1: __import__("os").fork()
for n in range(20 * COUNT):
    kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    kept[-1].bind(("127.0.0.1", 0))
    for _ in range(8):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.sendto(bytes(50_000), kept[-1].getsockname())
""",
}


@pytest.mark.parametrize(
    ("bomb", "network", "cgroups"),
    [
        ("connections that wait", Network.NONE, "no cgroups"),
        ("datagrams", Network.NONE, "no cgroups"),
        ("TCP", Network.LOOPBACK, "no cgroups"),
        ("UDP", Network.LOOPBACK, "no cgroups"),
        ("TCP", Network.LOOPBACK, "cgroups"),  # a cgroup of version 1 does not count the buffers of TCP sockets
        ("UDP", Network.LOOPBACK, "cgroups"),
    ],
)
def test_data_in_sockets_counts_as_memory(bomb: str, network: Network, cgroups: str) -> None:
    server = (sys.executable,) if cgroups == "cgroups" else executor_after(NO_CGROUPS)
    code = f"import socket, time\nkept = []\n{SOCKET_BOMBS[bomb]}\ntime.sleep(SLEEP_S)"
    with executor(server=server, isolation="namespaces") as caller:
        options: dict[str, Any] = {"memory_mb": 16, "disk_mb": 1, "timeout_s": 30, "network": network}
        few = caller.run(code.replace("COUNT", "1").replace("SLEEP_S", "0.5"), **options)
        assert few.status is Status.OK, few
        many = caller.run(code.replace("COUNT", "12").replace("SLEEP_S", "1000"), **options)
        assert many.status is Status.MEMORY_LIMIT, many


@pytest.mark.parametrize("level", ["nsjail", "namespaces", "landlock", "none"])
def test_the_oom_killer_prefers_calls_to_the_server(level: str) -> None:
    try:
        choose_level(level)
    except IsolationError as error:
        pytest.skip(str(error))
    own_score = oom_score_adj("self")
    guest_python = OWN_PYTHON if all_users_can_reach(OWN_PYTHON) or level != "landlock" else system_python()
    if guest_python is None:
        pytest.skip("calls with their own uids need a Python in a directory that everyone may enter")
    with executor(guest_python, isolation=level) as caller:
        seq = caller.submit(call("import time; time.sleep(1000)", timeout_s=1000))
        caller.until(lambda: caller.stats.get("running") == 1)
        server, *jailed = caller.processes()
        assert len(jailed) >= 3, "launcher, zygote and call"
        assert oom_score_adj(server) == own_score
        assert {oom_score_adj(pid) for pid in jailed} == {1000}, "the highest score"
        caller.send("cancel", [seq])


def oom_score_adj(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_memory_limits_are_capped_by_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 100 * MIB)
    assert Dispatcher(ServeConfig()).config.max_limits.memory_mb == 100
    assert Dispatcher(ServeConfig(max_limits=Limits(memory_mb=64))).config.max_limits.memory_mb == 64
    monkeypatch.setattr(machine, "memory_limit", lambda: MIB)
    assert Dispatcher(ServeConfig()).config.max_limits.memory_mb == 16, "the smallest limit that a call may have"


def test_run_once_caps_memory_by_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 100 * MIB)
    config = ExecutorConfig(python=OWN_PYTHON, isolation="none")

    def run(memory_mb: int) -> Result:
        return run_once(Call("x = bytearray(200 << 20)", limits=Limits(memory_mb=memory_mb)), config)

    result = run(1000)
    assert result.clamped == {"memory_mb": 100}
    assert result.status is Status.MEMORY_LIMIT
    assert run(100).clamped == {}
