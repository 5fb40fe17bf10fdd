"""Tests of the executor process with real jails, through its socket.

The executor survives the death of its zygotes (the interpreters that fork once per call), and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from sandbox import wire
from sandbox.errors import IsolationError
from sandbox.executor.connection import serve
from sandbox.jail import choose_level
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Status
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, Caller, call, executor, wait_gone
from tests.jail import jails
from tests.jail.jails import children

SLEEP = "import time\ntime.sleep(1000)"


@pytest.fixture(scope="module")
def one_zygote() -> Iterator[Caller]:
    """An executor with the bare profile only."""
    with executor() as caller:
        yield caller


@pytest.fixture
def two_zygotes() -> Iterator[Caller]:
    """An executor with two profiles. The zygote of the second runs calls even if its Python lacks numpy."""
    with executor(profiles=("bare", "numeric")) as caller:
        yield caller


def jail_of(caller: Caller) -> tuple[int, int, int]:
    """Pids of launcher, init and the first zygote."""
    (launcher,) = children(caller.process.pid)
    (init,) = children(launcher)
    (zygote,) = children(init)
    return launcher, init, zygote


def call_pids_of(zygote: int) -> list[int]:
    """Pids of a zygote's calls. Each call leads a process group, and a zygote is in the group of its jail."""
    return [child for child in children(zygote) if os.getpgid(child) == child]


def start_sleeper(caller: Caller, **more: object) -> tuple[int, int]:
    """Start a call that does not end. Return the seq of the call and the pid of its process."""
    pids_before = set(_all_call_pids(caller))
    seq = caller.submit(call(SLEEP, **more))
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:  # no frame reports that a call has started, so its process is the only sign
        new_pids = set(_all_call_pids(caller)) - pids_before
        if new_pids:
            return seq, new_pids.pop()
        time.sleep(0.01)
    pytest.fail("the call did not start")


def _all_call_pids(caller: Caller) -> list[int]:
    pids = []
    for pid in caller.processes():
        with suppress(ProcessLookupError):
            pids += call_pids_of(pid) if "zygote.py" in _command(pid) else []
    return pids


def host_parent(pid: int) -> int:
    """The parent's pid in the PID namespace of the host."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_the_ready_frame_describes_the_executor(one_zygote: Caller) -> None:
    assert one_zygote.ready["slots"] == 4
    assert one_zygote.ready["python"] == ".".join(map(str, sys.version_info[:3]))
    one_zygote.until(lambda: one_zygote.stats.get("zygotes") == {"bare": 1})  # not in stats from before `ready`
    assert one_zygote.stats["slots"] == 4


def test_the_ready_frame_names_missing_modules(two_zygotes: Caller) -> None:
    has_numpy = subprocess.run([OWN_PYTHON, "-I", "-c", "import numpy"], capture_output=True).returncode == 0
    assert two_zygotes.ready["missing_modules"] == ([] if has_numpy else ["numpy"])
    two_zygotes.until(lambda: two_zygotes.stats.get("zygotes") == {"bare": 1, "numeric": 1})


def test_each_of_many_calls_gets_its_own_result(one_zygote: Caller) -> None:
    results = one_zygote.run_all([call(f"print({n})\n{n}", id=f"c{n}") for n in range(200)])
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(200)]
    assert [result.value for result in results] == [f"{n}" for n in range(200)]
    assert [result.id for result in results] == [f"c{n}" for n in range(200)]


def test_calls_that_run_at_once_have_different_uids(one_zygote: Caller) -> None:
    code = "import os, time\nprint(os.getuid())\ntime.sleep(0.3)"
    uids = [result.stdout for result in one_zygote.run_all([call(code)] * 4)]
    # At level none a call is user 0. The calls of an ordinary user's server share a uid, which their user namespaces do
    # not map.
    shares_uid = one_zygote.run("import os\nos.getuid()").value in ("0", "65534")
    assert shares_uid or len(set(uids)) == len(uids)


def test_imports_that_a_zygote_has_not_loaded_are_counted(one_zygote: Caller) -> None:
    one_zygote.run("try:\n    import nowhere_at_all\nexcept ImportError: pass")
    one_zygote.until(lambda: one_zygote.stats.get("missed_imports", {}).get("nowhere_at_all") == 1)


def test_a_sleeper_is_timed_out_at_its_limit_and_not_before(one_zygote: Caller) -> None:
    result = one_zygote.run(SLEEP, timeout_s=0.5)
    assert result.status is Status.TIMEOUT
    assert 500 <= result.usage.run_ms < 5000, "virtual time is behind wall time on a loaded machine"


@pytest.mark.slow
def test_waiting_for_a_busy_core_does_not_count_towards_the_time_limit(one_zygote: Caller) -> None:
    """A call with 0.8 s of work and a limit of 1 s shares one core with three busy processes."""
    zygote = jail_of(one_zygote)[2]
    forkers = zygote, *children(zygote)  # the zygote and its template, if it has one: calls inherit their affinity
    cores = os.sched_getaffinity(zygote)
    core = min(cores)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for pid in (*forkers, *(process.pid for process in busy)):
            os.sched_setaffinity(pid, {core})
        code = "import time\nwhile time.process_time() < 0.8: pass\n'finished'"
        result = one_zygote.run(code, timeout_s=1.0)
    finally:
        for pid in forkers:
            os.sched_setaffinity(pid, cores)
        for process in busy:
            process.kill()
            process.wait()
    assert (result.status, result.value) == (Status.OK, "'finished'")
    assert result.usage.run_ms > 1000, "the call has not waited longer than its limit, so the test has tested nothing"


def test_extreme_limits_are_accepted(one_zygote: Caller) -> None:
    largest = {"timeout_s": 1e9, "memory_mb": 10**9, "output_kb": 10**6, "processes": 10**9, "disk_mb": 10**6}
    assert one_zygote.run("print(1)\n2", **largest).value == "2"
    smallest = {"timeout_s": 0.01, "memory_mb": 16, "output_kb": 1, "processes": 1, "disk_mb": 1}
    assert one_zygote.run("2", **{**smallest, "timeout_s": 20.0}).value == "2"
    assert one_zygote.run(SLEEP, **smallest).status is Status.TIMEOUT


def test_a_cancelled_call_ends_and_frees_its_slot(one_zygote: Caller) -> None:
    sleepers = [start_sleeper(one_zygote) for _ in range(4)]
    queued = [one_zygote.submit(call("print('never')")) for _ in range(3)]
    one_zygote.send("cancel", queued)
    one_zygote.send("cancel", [seq for seq, _ in sleepers])
    wait_gone([pid for _, pid in sleepers])
    assert [result.status for result in one_zygote.run_all([call("1")] * 8)] == [Status.OK] * 8
    assert not {*queued, *(seq for seq, _ in sleepers)} & {*one_zygote.results}
    one_zygote.send("cancel", [10**9, -1, *queued])  # unknown seqs are ignored
    assert one_zygote.run("1").status is Status.OK


def test_a_killed_zygote_costs_its_calls_a_retry(two_zygotes: Caller) -> None:
    _, bystander = start_sleeper(two_zygotes, profile="bare")
    first_zygote = jail_of(two_zygotes)[2]
    _template, second_zygote = [pid for pid in children(first_zygote) if pid not in call_pids_of(first_zygote)]
    seq, pid = start_sleeper(two_zygotes, profile="numeric", timeout_s=2.0)
    os.kill(second_zygote, signal.SIGKILL)
    wait_gone([second_zygote, pid])
    result = two_zygotes.result_of(seq)
    assert (result.status, result.attempts) == (Status.TIMEOUT, 2)
    # Only a cgroup shows that all processes of a call have ended. Without cgroups, the whole jail is restarted.
    has_cgroups = bool(two_zygotes.ready["cgroups"])
    assert os.path.exists(f"/proc/{bystander}") == has_cgroups, "the call of the other zygote"
    code = "import os\nos.read(0, 1)\nprint('answered')"
    assert two_zygotes.run(code, profile="numeric", stdin="x").stdout == "answered\n"
    restarts = 1 if has_cgroups else 2
    two_zygotes.until(lambda: two_zygotes.stats.get("zygote_restarts_total") == restarts)


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["launcher", "init", "zygote"])
def test_a_killed_jail_costs_its_calls_a_retry(victim: int, two_zygotes: Caller) -> None:
    pids_before = two_zygotes.processes()
    seqs = [start_sleeper(two_zygotes, profile=profile, timeout_s=2.0)[0] for profile in ("bare", "numeric")]
    os.kill(jail_of(two_zygotes)[victim], signal.SIGKILL)
    for seq in seqs:
        result = two_zygotes.result_of(seq)
        assert result.status is Status.TIMEOUT
        assert result.attempts in (2, 3), "the first retry may be in another zygote of the jail that has yet to die"
    wait_gone([pid for pid in pids_before if pid != two_zygotes.process.pid])
    results = two_zygotes.run_all([call("1"), call("1", profile="numeric")])
    assert [result.status for result in results] == [Status.OK] * 2


def test_a_call_whose_zygote_is_killed_each_time_is_unavailable() -> None:
    with executor(attempts=2) as caller:
        seq, first_pid = start_sleeper(caller)
        os.kill(host_parent(first_pid), signal.SIGKILL)
        wait_gone([first_pid])
        while not (pids := _all_call_pids(caller)):
            assert caller.receive()
        os.kill(host_parent(pids[0]), signal.SIGKILL)
        result = caller.result_of(seq)
        assert (result.status, result.attempts) == (Status.UNAVAILABLE, 2)
        assert result.error is not None
        assert result.error.type == "Poison"
        assert caller.run("1").status is Status.OK


@pytest.mark.parametrize("end", ["close", "shutdown", "SIGTERM", "SIGKILL", "SIGINT and close"])
def test_all_processes_end_with_the_executor(end: str) -> None:
    with executor(zygote_pools=2) as caller:
        start_sleeper(caller)
        caller.submit(call("import os\nos.setsid() if os.fork() else None\nimport time\ntime.sleep(1000)"))
        start_sleeper(caller)
        pids = caller.processes()
        assert len(pids) > 8, "the executor, two jails of three processes each, and the calls"
        if end == "close":
            caller.gateway_sock.close()
        elif end == "shutdown":
            caller.gateway_sock.shutdown(socket.SHUT_WR)
        elif end == "SIGINT and close":
            os.kill(caller.process.pid, signal.SIGINT)
            assert caller.run("1").status is Status.OK, "Ctrl-C alone does not end the executor"
            caller.gateway_sock.close()
        else:
            os.kill(caller.process.pid, signal.Signals[end])
        exit_code = caller.process.wait(DEADLINE_S)
        wait_gone(pids)
        # `executor` asserts an exit code of 0. A process that is ended by a signal has another exit code.
        caller.process.returncode = 0 if end.startswith("SIG") else exit_code


def test_drain_answers_the_submitted_calls_and_ends() -> None:
    with executor(slots=2) as caller:
        seqs = [caller.submit(call(f"import time\ntime.sleep(0.1)\n{n}")) for n in range(6)]
        caller.send("drain")
        while caller.receive():
            pass
        assert [caller.results[seq].value for seq in seqs] == [str(n) for n in range(6)]
        assert caller.process.wait(DEADLINE_S) == 0


def test_drain_when_idle_ends_at_once() -> None:
    with executor() as caller:
        assert caller.run("1").value == "1"
        caller.send("drain")
        while caller.receive():
            pass
        assert caller.process.wait(DEADLINE_S) == 0


def test_results_larger_than_the_socket_buffer_arrive(one_zygote: Caller) -> None:
    calls = [call("print('x' * (8 << 20))", output_kb=9 << 10) for _ in range(6)]
    seqs = [one_zygote.submit(submitted) for submitted in calls]
    one_zygote.until(lambda: one_zygote.stats.get("running", 1) == 0 and one_zygote.stats["queued"] == 0)
    for seq in seqs:
        assert len(one_zygote.result_of(seq).stdout) == (8 << 20) + 1


@pytest.mark.parametrize(
    "first_frame",
    [
        wire.pack(["calls", []]),
        wire.pack(["configure", {"isolation": "stone"}]),
        wire.pack(["configure", {"python": "/nowhere/python"}]),
        wire.pack(["configure", {"python": "/bin/true"}]),
        wire.pack(["configure", {"unknown": 1}]),
        struct.pack("<I", 2**32 - 1),
        b"\4\0\0\0junk",
    ],
    ids=[
        "not configure",
        "unknown level",
        "missing Python",
        "no Python",
        "unknown setting",
        "too long",
        "not MessagePack",
    ],
)
def test_an_invalid_first_frame_is_refused_with_a_line_of_text(first_frame: bytes) -> None:
    gateway_sock, executor_sock = socket.socketpair()
    gateway_sock.settimeout(DEADLINE_S)
    with gateway_sock, executor_sock:
        argv = [sys.executable, "-m", "sandbox.executor", "--fd", str(executor_sock.fileno())]
        with subprocess.Popen(argv, pass_fds=[executor_sock.fileno()], stderr=subprocess.DEVNULL) as process:
            executor_sock.close()
            gateway_sock.sendall(first_frame)
            unpacker = wire.Unpacker()
            unpacker.feed(_until_end(gateway_sock))
            (failed,) = [frame for frame in unpacker if frame[0] != "stats"]
            assert failed[0] == "failed"
            assert "\n" not in failed[1]
            assert process.wait(DEADLINE_S) == 1


def _until_end(sock: socket.socket) -> bytes:
    data = b""
    while more := sock.recv(1 << 16):
        data += more
    return data


def test_the_result_of_a_small_call_is_encoded_in_under_400_bytes(one_zygote: Caller) -> None:
    result = one_zygote.run("1")
    assert len(wire.pack(["results", [[1, result.encode(binary=True)]]])) < 400


def test_isolation_auto_is_refused() -> None:
    """The server chooses the level once, so that a restarted executor has the same level."""
    gateway_sock, executor_sock = socket.socketpair()
    gateway_sock.settimeout(DEADLINE_S)
    with executor_sock:
        argv = [sys.executable, "-m", "sandbox.executor", "--fd", str(executor_sock.fileno())]
        process = subprocess.Popen(argv, pass_fds=[executor_sock.fileno()], stdin=subprocess.DEVNULL)
    with gateway_sock, process:
        gateway_sock.sendall(wire.pack(["configure", ExecutorConfig(isolation="auto").encode(), True]))
        unpacker = wire.Unpacker()
        unpacker.feed(gateway_sock.recv(1 << 16))
        ((kind, message),) = unpacker
        assert (kind, message.partition(";")[0]) == ("failed", "isolation=auto: expected a level")
        assert process.wait(DEADLINE_S) == 1


@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
@pytest.mark.parametrize("denial", jails.NO_EXECUTABLE_MEMORY)
def test_calls_run_where_memory_cannot_be_made_executable(denial: str, isolation: str) -> None:
    try:
        choose_level(isolation)
    except IsolationError as error:
        pytest.skip(str(error))
    deny = jails.without_executable_memory(denial)
    deny_and_execute = f"{deny}\nimport os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    guest_python = OWN_PYTHON if isolation == "namespaces" else jails.reachable_python(OWN_PYTHON)
    with executor(guest_python, server=(sys.executable, "-c", deny_and_execute), isolation=isolation) as caller:
        calls = [call(f"print(input() * {n})", stdin="x") for n in range(1, 20)]
        assert [result.stdout for result in caller.run_all(calls)] == [f"{'x' * n}\n" for n in range(1, 20)]
        large = call("print(len(input()))", stdin="x" * (1 << 20))
        loop = call("while True: pass", timeout_s=0.3)
        flood = call("print('x' * (1 << 24))", output_kb=16)
        files = call("open('b', 'w').write(open('a').read() * 2)", files={"a": b"12"}, return_files=("b",))
        results = caller.run_all([large, loop, flood, files])
        assert [result.status for result in results] == [Status.OK, Status.TIMEOUT, Status.OUTPUT_LIMIT, Status.OK]
        assert (results[0].stdout, results[3].files) == (f"{1 << 20}\n", {"b": b"1212"})
        assert caller.run("import os; print(os.listdir())").stdout == "[]\n"


def test_the_log_lines_of_an_executor_have_the_format_of_its_gateway() -> None:
    gateway_end, executor_end = socket.socketpair()
    formats: list[str] = []
    with gateway_end:
        # An executor refuses the default isolation "auto", so it ends.
        settings = ExecutorConfig(log_format="json").encode()
        gateway_end.sendall(wire.pack(["configure", settings, False]))
        assert trio.run(serve, executor_end, formats.append) == 1
    assert formats == ["json"]
