"""The executor as a gateway meets it, with real jails: it outlives whatever is killed below it, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import wire
from sandbox.config import ExecutorConfig
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.types import Status
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, Caller, call, executor, wait_gone
from tests.jail import jails
from tests.jail.jails import children, host_uid

SLEEP = "import time\ntime.sleep(1000)"


@pytest.fixture(scope="module")
def lean() -> Iterator[Caller]:
    with executor() as caller:
        yield caller


@pytest.fixture
def two() -> Iterator[Caller]:
    """A family of two zygotes; the guest's Python lacks what the second would import, and serves none the less."""
    with executor(profiles=("bare", "numeric")) as caller:
        yield caller


def jail_of(caller: Caller) -> tuple[int, int, int]:
    """Launcher, init and the leanest zygote."""
    (launcher,) = children(caller.process.pid)
    (init,) = children(launcher)
    (zygote,) = children(init)
    return launcher, init, zygote


def calls_of(zygote: int) -> list[int]:
    return [child for child in children(zygote) if host_uid(child) != host_uid(zygote)]


def start_sleeper(caller: Caller, **more: object) -> tuple[int, int]:
    """A call that will not end: its number, and its process."""
    known = set(_all_calls(caller))
    seq = caller.submit(call(SLEEP, **more))
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:  # it has no way to tell us but to be there
        new = set(_all_calls(caller)) - known
        if new:
            return seq, new.pop()
        time.sleep(0.01)
    pytest.fail("the call did not start")


def _all_calls(caller: Caller) -> list[int]:
    found = []
    for pid in caller.processes():
        try:
            found += calls_of(pid) if pid != caller.process.pid else []
        except FileNotFoundError:
            continue
    return [pid for pid in found if "zygote" in _command(pid) or "python" in _command(pid)]


def host_parent(pid: int) -> int:
    """Who forked a process, as the host counts them."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_it_says_what_it_is(lean: Caller) -> None:
    assert lean.ready["slots"] == 4
    assert lean.ready["python"] == ".".join(map(str, sys.version_info[:3]))
    lean.until(lambda: lean.stats.get("zygotes") == {"bare": 1})  # the first stats are older than the zygote
    assert lean.stats["slots"] == 4


def test_it_names_what_its_python_lacks(two: Caller) -> None:
    has_numpy = subprocess.run([OWN_PYTHON, "-I", "-c", "import numpy"], capture_output=True).returncode == 0
    assert two.ready["missing_modules"] == ([] if has_numpy else ["numpy"])
    two.until(lambda: two.stats.get("zygotes") == {"bare": 1, "numeric": 1})


def test_many_calls_are_answered_each_with_its_own(lean: Caller) -> None:
    results = lean.run_all([call(f"print({n})\n{n}", id=f"c{n}") for n in range(200)])
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(200)]
    assert [result.value for result in results] == [f"{n}" for n in range(200)]
    assert [result.id for result in results] == [f"c{n}" for n in range(200)]


def test_calls_that_run_at_once_have_different_users(lean: Caller) -> None:
    gate = "import os, time\nprint(os.getuid())\ntime.sleep(0.3)"
    uids = [result.stdout for result in lean.run_all([call(gate)] * 4)]
    assert len(set(uids)) == len(uids) or lean.run("import os\nos.getuid()").value == "0"


def test_imports_that_a_zygote_lacks_are_counted(lean: Caller) -> None:
    lean.run("try:\n    import nowhere_at_all\nexcept ImportError: pass")
    lean.until(lambda: lean.stats.get("missed_imports", {}).get("nowhere_at_all") == 1)


def test_a_sleeper_is_timed_out_at_its_limit_and_not_before(lean: Caller) -> None:
    result = lean.run(SLEEP, timeout_s=0.5)
    assert result.status is Status.TIMEOUT
    assert 500 <= result.usage.run_ms < 5000


@pytest.mark.slow
def test_a_busy_neighbour_on_its_core_costs_a_call_no_time_of_its_own(lean: Caller) -> None:
    """Pinned to one core with three that never pause, it waits three quarters of the time, and gets to its end."""
    zygote = jail_of(lean)[2]
    cores = os.sched_getaffinity(zygote)
    core = min(cores)
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for process in spin:
            os.sched_setaffinity(process.pid, {core})
        code = "import time\nwhile time.process_time() < 0.8: pass\n'through'"
        os.sched_setaffinity(zygote, {core})  # its calls inherit that
        result = lean.run(code, timeout_s=1.0)
    finally:
        os.sched_setaffinity(zygote, cores)
        for process in spin:
            process.kill()
            process.wait()
    assert (result.status, result.value) == (Status.OK, "'through'")
    assert result.usage.run_ms > 1000, "or this has shown nothing"


def test_absurd_limits_are_survived(lean: Caller) -> None:
    most = {"timeout_s": 1e9, "memory_mb": 10**9, "output_kb": 10**6, "processes": 10**9, "disk_mb": 10**6}
    assert lean.run("print(1)\n2", **most).value == "2"
    least = {"timeout_s": 0.01, "memory_mb": 16, "output_kb": 1, "processes": 1, "disk_mb": 1}
    assert lean.run("2", **{**least, "timeout_s": 20.0}).value == "2"
    assert lean.run(SLEEP, **least).status is Status.TIMEOUT


def test_a_cancelled_call_ends_and_frees_its_slot(lean: Caller) -> None:
    sleepers = [start_sleeper(lean) for _ in range(4)]
    queued = [lean.submit(call("print('never')")) for _ in range(3)]
    lean.send("cancel", queued)
    lean.send("cancel", [seq for seq, _ in sleepers])
    wait_gone([pid for _, pid in sleepers])
    assert [result.status for result in lean.run_all([call("1")] * 8)] == [Status.OK] * 8
    assert not {*queued, *(seq for seq, _ in sleepers)} & {*lean.answers}
    lean.send("cancel", [10**9, -1, *queued])
    assert lean.run("1").status is Status.OK


def test_a_zygote_killed_under_its_calls_costs_them_a_retry(two: Caller) -> None:
    _, bystander = start_sleeper(two, profile="bare")
    lean_zygote = jail_of(two)[2]
    (rich,) = [pid for pid in children(lean_zygote) if pid not in calls_of(lean_zygote)]
    code = "import os\nos.read(0, 1)\nprint('answered')"
    wanted, pid = start_sleeper(two, profile="numeric", timeout_s=2.0)
    os.kill(rich, signal.SIGKILL)
    wait_gone([rich, pid])
    result = two.answer(wanted)
    assert (result.status, result.attempts) == (Status.TIMEOUT, 2)
    assert os.path.exists(f"/proc/{bystander}"), "others are undisturbed"
    assert two.run(code, profile="numeric", stdin="x").stdout == "answered\n"
    two.until(lambda: two.stats.get("zygote_restarts_total") == 1)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["launcher", "init", "zygote"])
def test_a_jail_killed_under_its_calls_costs_them_a_retry(which: int, two: Caller) -> None:
    before = two.processes()
    wanted = [start_sleeper(two, profile=profile, timeout_s=2.0)[0] for profile in ("bare", "numeric")]
    os.kill(jail_of(two)[which], signal.SIGKILL)
    for seq in wanted:
        result = two.answer(seq)
        # A retry may meet another interpreter of the same jail, just before that is gone as well.
        assert (result.status, result.attempts in (2, 3)) == (Status.TIMEOUT, True)
    wait_gone([pid for pid in before if pid != two.process.pid])
    assert [result.status for result in two.run_all([call("1"), call("1", profile="numeric")])] == [Status.OK] * 2


def test_a_call_whose_zygote_is_killed_each_time_gets_no_verdict() -> None:
    with executor(attempts=2) as caller:
        seq, first = start_sleeper(caller)
        os.kill(host_parent(first), signal.SIGKILL)
        wait_gone([first])
        while not (again := _all_calls(caller)):
            assert caller.receive()
        os.kill(host_parent(again[0]), signal.SIGKILL)
        result = caller.answer(seq)
        assert (result.status, result.attempts) == (Status.UNAVAILABLE, 2)
        assert result.error is not None
        assert result.error.type == "NodeError"
        assert caller.run("1").status is Status.OK


@pytest.mark.parametrize("end", ["close", "shutdown", "SIGTERM", "SIGKILL", "SIGINT and close"])
def test_its_end_is_the_end_of_all_below(end: str) -> None:
    with executor(zygote_pools=2) as caller:
        start_sleeper(caller)
        caller.submit(call("import os\nos.setsid() if os.fork() else None\nimport time\ntime.sleep(1000)"))
        start_sleeper(caller)
        everyone = caller.processes()
        assert len(everyone) > 8
        if end == "close":
            caller.link.close()
        elif end == "shutdown":
            caller.link.shutdown(socket.SHUT_WR)
        elif end == "SIGINT and close":
            os.kill(caller.process.pid, signal.SIGINT)
            assert caller.run("1").status is Status.OK, "Ctrl-C is the gateway's to handle"
            caller.link.close()
        else:
            os.kill(caller.process.pid, signal.Signals[end])
        code = caller.process.wait(DEADLINE_S)
        wait_gone(everyone)
        caller.process.returncode = 0 if end.startswith("SIG") else code


def test_drain_answers_what_is_there_and_ends() -> None:
    with executor(slots=2) as caller:
        seqs = [caller.submit(call(f"import time\ntime.sleep(0.1)\n{n}")) for n in range(6)]
        caller.send("drain")
        while caller.receive():
            pass
        assert [caller.answers[seq].value for seq in seqs] == [str(n) for n in range(6)]
        assert caller.process.wait(DEADLINE_S) == 0


def test_drain_when_idle_ends_at_once() -> None:
    with executor() as caller:
        assert caller.run("1").value == "1"
        caller.send("drain")
        while caller.receive():
            pass
        assert caller.process.wait(DEADLINE_S) == 0


def test_results_larger_than_the_socket_takes_arrive(lean: Caller) -> None:
    calls = [call("print('x' * (8 << 20))", output_kb=9 << 10) for _ in range(6)]
    seqs = [lean.submit(one) for one in calls]
    lean.until(lambda: lean.stats.get("running", 1) == 0 and lean.stats["queued"] == 0)
    for seq in seqs:
        assert len(lean.answer(seq).stdout) == (8 << 20) + 1


@pytest.mark.parametrize(
    "said",
    [
        wire.pack(["calls", []]),
        wire.pack(["configure", {"isolation": "stone"}]),
        wire.pack(["configure", {"python": "/nowhere/python"}]),
        wire.pack(["configure", {"python": "/bin/true"}]),
        wire.pack(["configure", {"unknown": 1}]),
        struct.pack("<I", 2**32 - 1),
        b"\4\0\0\0junk",
    ],
)
def test_a_start_that_makes_no_sense_is_refused_in_a_line(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    with ours, theirs:
        argv = [sys.executable, "-m", "sandbox.executor", "--fd", str(theirs.fileno())]
        with subprocess.Popen(argv, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL) as process:
            theirs.close()
            ours.sendall(said)
            unpacker = wire.Unpacker()
            unpacker.feed(_until_end(ours))
            (failed,) = [frame for frame in unpacker if frame[0] != "stats"]
            assert failed[0] == "failed"
            assert "\n" not in failed[1]
            assert process.wait(DEADLINE_S) == 1


def _until_end(sock: socket.socket) -> bytes:
    data = b""
    while more := sock.recv(1 << 16):
        data += more
    return data


def test_results_are_small_for_small_calls(lean: Caller) -> None:
    result = lean.run("1")
    assert len(wire.pack(["results", [[1, result.encode(binary=True)]]])) < 400


def test_it_does_not_choose_a_level_itself() -> None:
    """What it chose when it is started again might be another one."""
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    with theirs:
        argv = [sys.executable, "-m", "sandbox.executor", "--fd", str(theirs.fileno())]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    with ours, process:
        ours.sendall(wire.pack(["configure", ExecutorConfig(isolation="auto").encode(), True]))
        unpacker = wire.Unpacker()
        unpacker.feed(ours.recv(1 << 16))
        ((kind, why),) = unpacker
        assert (kind, why.partition(";")[0]) == ("failed", "isolation=auto: expected a level")
        assert process.wait(DEADLINE_S) == 1


@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
@pytest.mark.parametrize("denial", jails.NO_EXECUTABLE_MEMORY)
def test_calls_run_where_memory_cannot_be_made_executable(denial: str, isolation: str) -> None:
    try:
        choose_level(isolation)
    except IsolationError as why:
        pytest.skip(str(why))
    code = jails.without_executable_memory(denial)
    become = f"{code}\nimport os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    guest = OWN_PYTHON if isolation == "namespaces" else jails.reachable_python(OWN_PYTHON)
    with executor(guest, server=(sys.executable, "-c", become), isolation=isolation) as caller:
        calls = [call(f"print(input() * {n})", stdin="x") for n in range(1, 20)]
        assert [result.stdout for result in caller.run_all(calls)] == [f"{'x' * n}\n" for n in range(1, 20)]
        large = call("print(len(input()))", stdin="x" * (1 << 20))
        loop, flood = call("while True: pass", timeout_s=0.3), call("print('x' * (1 << 24))", output_kb=16)
        files = call("open('b', 'w').write(open('a').read() * 2)", files={"a": b"12"}, return_files=("b",))
        results = caller.run_all([large, loop, flood, files])
        assert [result.status for result in results] == [Status.OK, Status.TIMEOUT, Status.OUTPUT_LIMIT, Status.OK]
        assert (results[0].stdout, results[3].files) == (f"{1 << 20}\n", {"b": b"1212"})
        assert caller.run("import os; print(os.listdir())").stdout == "[]\n"
