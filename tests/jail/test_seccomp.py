"""Tests of the seccomp filters of a jail. Compiled programs equal their policies, hostile system calls are refused, and
Python works under the filters."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.guest.protocol import MAX_BACKLOG
from sandbox.jail import bpf, seccomp
from sandbox.jail.seccomp import FilterKind
from sandbox.jail.syscalls import NUMBERS
from tests.jail.jails import find_python_minor

MACHINE = os.uname().machine
pytestmark = pytest.mark.skipif(MACHINE not in NUMBERS, reason=f"the policy is written for {', '.join(NUMBERS)}")
OWN_NUMBERS = NUMBERS.get(MACHINE, {})
every_machine = pytest.mark.parametrize("machine", NUMBERS)

# 1031: F_SETPIPE_SZ, with sizes around its bound
checked_values = {1031, seccomp.PIPE_BYTES, seccomp.PIPE_BYTES + 1, MAX_BACKLOG, MAX_BACKLOG + 1} | {
    value
    for policy in (seccomp._CHECKED_ARGUMENTS, seccomp.NAMED_SOCKETS, seccomp.LOOPBACK_SOCKETS)
    for rule in policy.values()
    if isinstance(rule, tuple)
    for check in rule
    for value in (*check.values, *check.fake_success_values)
}
words = st.one_of(
    st.sampled_from(sorted(checked_values)), st.sampled_from([1 << bit for bit in range(64)]), st.integers(0, 2**64 - 1)
)
registers = st.lists(words, min_size=6, max_size=6)


def evaluate(
    number: int, arguments: Sequence[int], machine: str = MACHINE, kind: FilterKind = FilterKind.NAMESPACED
) -> int:
    """Return the policy's result for a system call with these six registers of 64 bits, in the simplest way."""
    return evaluate_rule(seccomp.rule_for(number, machine, kind), arguments)


def evaluate_rule(rule: seccomp.SyscallRule, arguments: Sequence[int]) -> int:
    if isinstance(rule, int):
        return rule
    for check in rule:
        value = arguments[check.index] & check.mask
        if check.maximum is not None and value <= check.maximum:
            continue
        if value in check.fake_success_values:
            return seccomp.FAKE_SUCCESS
        if check.bounded_value is not None and value == check.bounded_value[0]:
            _, index, maximum = check.bounded_value
            if arguments[index] & 0xFFFFFFFF <= maximum:
                continue
        if value not in check.values:
            return seccomp.EPERM
    return seccomp.ALLOW


def emulate(
    program: bytes, number: int, arguments: Sequence[int], machine: str = MACHINE, arch: int | None = None
) -> tuple[int, int]:
    """Run a program as the kernel's BPF machine does. Returns its result and the number of instructions run."""
    arch = seccomp.AUDIT_ARCHS[machine] if arch is None else arch
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)  # struct seccomp_data
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, index, steps = 0, 0, 0
    while True:
        operation, yes, no, k = instructions[index]
        index, steps = index + 1, steps + 1
        match operation:
            case bpf.LOAD:
                (accumulator,) = struct.unpack_from("<I", data, k)
            case bpf.AND:
                accumulator &= k
            case bpf.IF_EQUAL:
                index += yes if accumulator == k else no
            case bpf.IF_AT_LEAST:
                index += yes if accumulator >= k else no
            case bpf.RETURN:
                return k, steps
            case _:
                raise AssertionError(f"instruction {operation:#x} is not one of sandbox.jail.bpf")


@every_machine
@given(arguments=registers)
def test_program_equals_the_policy_for_every_number(machine: str, arguments: list[int]) -> None:
    program = seccomp.compile_program(FilterKind.NAMESPACED, machine)
    for number in range(1024):
        assert emulate(program, number, arguments, machine)[0] == evaluate(number, arguments, machine), number


@every_machine
@given(name=st.sampled_from(sorted(seccomp._CHECKED_ARGUMENTS)), arguments=registers)
def test_program_equals_the_policy_for_checked_arguments(machine: str, name: str, arguments: list[int]) -> None:
    number = NUMBERS[machine][name]
    program = seccomp.compile_program(FilterKind.NAMESPACED, machine)
    assert emulate(program, number, arguments, machine)[0] == evaluate(number, arguments, machine)


@every_machine
@pytest.mark.parametrize("kind", list(FilterKind))
@given(arguments=registers)
@settings(max_examples=20)
def test_every_program_equals_its_policy(machine: str, kind: FilterKind, arguments: list[int]) -> None:
    program = seccomp.compile_program(kind, machine)
    for number in range(512):
        result = emulate(program, number, arguments, machine)[0]
        assert result == evaluate(number, arguments, machine, kind), number


@pytest.mark.parametrize("kind", list(FilterKind))
@given(arguments=registers)
@settings(max_examples=20)
def test_the_programs_of_all_machines_give_a_system_call_the_same_result(
    kind: FilterKind, arguments: list[int]
) -> None:
    """No machine has a weaker policy. The policy of a machine without fork(2) has no rule for its number."""
    for name in NUMBERS["x86_64"].keys() & NUMBERS["aarch64"].keys():
        results = {
            machine: emulate(seccomp.compile_program(kind, machine), numbers[name], arguments, machine)[0]
            for machine, numbers in NUMBERS.items()
        }
        assert len({*results.values()}) == 1, (name, results)


@every_machine
@pytest.mark.parametrize("kind", seccomp.ON_TOP)
@given(arguments=registers)
def test_zygote_filter_and_call_filter_together_equal_the_policy(
    machine: str, kind: FilterKind, arguments: list[int]
) -> None:
    names = {number: name for name, number in NUMBERS[machine].items()}
    policy = {**seccomp.CALL_POLICY, **seccomp.ON_TOP[kind]}
    for number in range(512):
        zygote_result = evaluate(number, arguments, machine, FilterKind.ZYGOTE)
        call_result = evaluate(number, arguments, machine, kind)
        result = min(zygote_result, call_result)  # the kernel takes the lower one: all refusals are below ALLOW
        if {zygote_result, call_result} == {seccomp.ENOSYS, seccomp.EPERM}:
            result = (
                call_result  # both refuse with an errno: the kernel takes the errno of the filter that was loaded last
            )
        expected = policy.get(names.get(number, ""), seccomp.rule_for(number, machine))
        assert result == evaluate_rule(expected, arguments), number


@pytest.mark.parametrize("kind", seccomp.ON_TOP)
def test_the_filter_that_each_call_loads_is_small(kind: FilterKind) -> None:
    assert len(seccomp.program(kind)) < len(seccomp.program()) / 2


@every_machine
@pytest.mark.parametrize("kind", [FilterKind.NAMESPACED, FilterKind.ZYGOTE])
def test_ipc_and_uts_calls_are_refused(machine: str, kind: FilterKind) -> None:
    """A call must not leave a message for another call in the IPC namespace or the UTS namespace."""
    names = [
        name
        for name in NUMBERS[machine]
        if name.startswith(("shm", "sem", "msg", "mq_", "sethostname", "setdomainname"))
    ]
    assert len(names) == 20  # fails if a prefix no longer matches
    for name in names:
        program = seccomp.compile_program(kind, machine)
        assert emulate(program, NUMBERS[machine][name], [0] * 6, machine)[0] == seccomp.EPERM


OWN_PID, OTHER_PID = seccomp.OWN_PID, 1
OWN_GROUP, ALL_PROCESSES = 0, -1
SHARED_UID_RULES: list[tuple[str, tuple[int, ...], bool]] = [
    ("kill", (OWN_PID, signal.SIGKILL), True),
    ("kill", (OWN_GROUP, signal.SIGKILL), False),
    ("kill", (ALL_PROCESSES, signal.SIGKILL), False),
    ("kill", (OTHER_PID, signal.SIGKILL), False),
    ("tgkill", (OWN_PID, 5, signal.SIGABRT), True),  # thread 5
    ("tgkill", (OTHER_PID, 1, signal.SIGABRT), False),
    ("tkill", (OWN_PID, signal.SIGKILL), False),
    ("prlimit64", (0, resource.RLIMIT_NOFILE), True),  # 0: the calling process
    ("prlimit64", (OTHER_PID, resource.RLIMIT_NOFILE), False),
    ("clone", (0x3D0F00,), True),  # the flags of pthread_create
    ("clone", (signal.SIGCHLD,), False),
    ("clone", (0x10000 | 0x10000000,), False),  # CLONE_THREAD | CLONE_NEWUSER
    *((name, (), False) for name in "fork vfork execve execveat pidfd_open pidfd_send_signal".split()),  # noqa: SIM905
    *((name, (), False) for name in "chmod fchmod fchownat utimensat setxattr fsetxattr".split()),  # noqa: SIM905
]


@pytest.mark.parametrize(
    ("machine", "name", "arguments", "is_allowed"),
    [(machine, *rule) for machine in NUMBERS for rule in SHARED_UID_RULES if rule[0] in NUMBERS[machine]],
)
def test_a_call_with_the_servers_uid_reaches_only_itself(
    machine: str, name: str, arguments: tuple[int, ...], is_allowed: bool
) -> None:
    registers = [argument & 2**64 - 1 for argument in (*arguments, *(0,) * 6)][:6]
    result = evaluate(NUMBERS[machine][name], registers, machine, FilterKind.SHARED_UID)
    assert result == (seccomp.ALLOW if is_allowed else seccomp.EPERM)


OTHER_ENTRIES = (0x40000003, 0x40000028, *seccomp.AUDIT_ARCHS.values())
"""AUDIT_ARCH_I386 and AUDIT_ARCH_ARM, the entries of 32-bit programs, and the 64-bit entries of both machines."""


@every_machine
@given(
    number=st.integers(0, 2**32 - 1),
    arch=st.sampled_from(OTHER_ENTRIES) | st.integers(0, 2**32 - 1),
    arguments=registers,
)
def test_other_architectures_and_x32_fail_with_enosys(
    machine: str, number: int, arch: int, arguments: list[int]
) -> None:
    program = seccomp.compile_program(FilterKind.NAMESPACED, machine)
    assert emulate(program, number | seccomp.X32_BIT, arguments, machine)[0] == seccomp.ENOSYS
    if arch != seccomp.AUDIT_ARCHS[machine]:
        assert emulate(program, number, arguments, machine, arch)[0] == seccomp.ENOSYS


@every_machine
def test_the_filter_program_decides_in_few_instructions_for_every_system_call(machine: str) -> None:
    program = seccomp.compile_program(FilterKind.NAMESPACED, machine)
    steps = [emulate(program, number, (0,) * 6, machine)[1] for number in range(512)]
    # The start takes 3 instructions, the search in at most 112 ranges at most 7, and the longest check of arguments 9.
    assert max(steps) <= 3 + 7 + 9


def test_policy_names_existing_system_calls_only() -> None:
    assert seccomp.CALL_POLICY.keys() <= NUMBERS["x86_64"].keys()


DANGEROUS = """
    ptrace process_vm_readv process_vm_writev mount umount2 unshare setns pivot_root chroot bpf perf_event_open
    userfaultfd io_uring_setup io_uring_enter keyctl add_key request_key kexec_load init_module finit_module
    connect bind listen accept accept4 setsockopt memfd_create memfd_secret pidfd_getfd open_by_handle_at shmget
    semget msgget mq_open setfsuid setgroups capset fanotify_init inotify_init1 clock_settime splice vmsplice tee
    sendfile sync syncfs move_mount open_tree fsopen mount_setattr seccomp personality modify_ldt kcmp syslog
    quotactl swapon reboot sched_setscheduler setpriority process_madvise iopl io_submit
"""


@pytest.mark.parametrize(
    ("machine", "name"),
    [(machine, name) for machine in NUMBERS for name in DANGEROUS.split() if name in NUMBERS[machine]],
)
def test_dangerous_system_call_is_refused(machine: str, name: str) -> None:
    assert seccomp.rule_for(NUMBERS[machine][name], machine) == seccomp.EPERM


def run_under_filter(python: str | Path, code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in `directory` by a Python that has loaded the filter.

    The code can call `raw(number, *arguments)`, which makes a system call and returns its errno.
    """
    program = b64encode(seccomp.program()).decode()
    load_filter = f"""
import base64, ctypes
program = base64.b64decode({program!r})
class Program(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
header = Program(len(program) // 8, program)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0  # PR_SET_SECCOMP
def raw(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return ctypes.get_errno()
"""
    path = directory / "under_filter.py"  # a file, since children of multiprocessing import the main module
    path.write_text(load_filter + code)
    environ = {"TMPDIR": str(directory)}
    return subprocess.run(
        [python, path], capture_output=True, text=True, check=False, timeout=60, cwd=directory, env=environ
    )


FEATURES = {
    "threads": """
import threading
done = []
workers = [threading.Thread(target=done.append, args=(n,)) for n in range(8)]
[worker.start() for worker in workers], [worker.join() for worker in workers]
assert sorted(done) == list(range(8))""",
    "thread pool": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: assert sum(pool.map(abs, range(-9, 0))) == 45""",
    "process pool": """
import multiprocessing
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]""",
    "process and queue": """
import multiprocessing
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=queue.put, args=(7,))
process.start(); assert queue.get(timeout=20) == 7; process.join(); assert process.exitcode == 0""",
    "executor of processes": """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool: assert list(pool.map(abs, [-1])) == [1]""",
    "shared memory": """
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
memory.buf[0] = 1; memory.close(); memory.unlink()""",
    "subprocess": """
import subprocess, sys
assert subprocess.run([sys.executable, "-c", "print(6*7)"], capture_output=True, text=True).stdout == "42\\n"
assert subprocess.run("exit 3", shell=True).returncode == 3""",
    "fork and wait": """
import os
child = os.fork()
if child == 0: os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5""",
    "asyncio": """
import asyncio, sys
async def main():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0] == b"1\\n"
    assert await asyncio.to_thread(lambda: 2) == 2
asyncio.run(main())""",
    "temporary files": """
import os, shutil, tempfile
with tempfile.TemporaryDirectory() as top:
    open(f"{top}/a", "w").write("x" * 100000)
    shutil.copy2(f"{top}/a", f"{top}/b"), os.rename(f"{top}/b", f"{top}/c"), os.chmod(f"{top}/c", 0o600)
    os.mkfifo(f"{top}/pipe"), os.symlink("a", f"{top}/link"), os.truncate(f"{top}/a", 5)
    assert os.path.getsize(f"{top}/c") == 100000 and len(os.listdir(top)) == 4
    shutil.copytree(top, f"{top}/tree", ignore=lambda *_: ["tree", "pipe"])
with tempfile.NamedTemporaryFile() as file: file.write(b"x")""",
    "sqlite": """
import sqlite3
for name in (":memory:", "test.db"):
    database = sqlite3.connect(name)
    database.execute("create table t (n)"), database.execute("insert into t values (4)"), database.commit()
    assert database.execute("select n from t").fetchone() == (4,); database.close()""",
    "mmap and locks": """
import fcntl, mmap
with open("mapped", "wb+") as file:
    file.write(bytes(8192)); file.flush()
    fcntl.lockf(file, fcntl.LOCK_EX)
    with mmap.mmap(file.fileno(), 0) as area: area[0] = 1; area.flush(); area.resize(16384)
mmap.mmap(-1, 1 << 20).close()""",
    "signals": """
import signal, time
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001); signal.pause(); signal.alarm(1); signal.alarm(0)
assert hits and signal.sigtimedwait([signal.SIGUSR1], 0.001) is None
time.sleep(0.001); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); signal.raise_signal(signal.SIGUSR2)
assert signal.sigpending() == {signal.SIGUSR2}""",
    "limits and times": """
import os, resource, time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
resource.getrusage(resource.RUSAGE_CHILDREN), os.times(), time.process_time(), time.thread_time()
os.cpu_count(), os.sched_getaffinity(0), os.sysconf("SC_PHYS_PAGES"), os.getpriority(os.PRIO_PROCESS, 0)""",
    "sockets of a pair": """
import select, socket
ours, theirs = socket.socketpair()
theirs.sendall(b"x"); assert ours.recv(1) == b"x"; ours.setblocking(False); ours.shutdown(socket.SHUT_RDWR)
poll = select.epoll(); poll.register(theirs); poll.poll(0)""",
    "checks for a terminal": "import os, sys; assert not os.isatty(0) and not sys.stdout.isatty()",
    "random and hashes": """
import hashlib, os, random, secrets, uuid
assert len(os.urandom(8)) == 8 and secrets.token_hex(4) and uuid.uuid4() and hashlib.sha256(b"x").hexdigest()""",
    "names of threads": "import threading; threading.current_thread().name = 'x'; threading.Thread(name='y').start()",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_python_works_under_the_filter(feature: str, tmp_path: Path) -> None:
    run = run_under_filter(sys.executable, FEATURES[feature], tmp_path)
    assert run.returncode == 0, run.stderr


LIBRARIES = {
    "numpy": "import numpy; assert numpy.linalg.inv(numpy.eye(200) * 2)[0, 0] == .5; numpy.random.default_rng()",
    "scipy": """
import scipy.integrate, scipy.optimize, scipy.sparse.linalg
assert abs(scipy.integrate.quad(lambda x: x, 0, 1)[0] - .5) < 1e-9
assert abs(scipy.optimize.brentq(lambda x: x - 1, 0, 3) - 1) < 1e-9""",
    "sympy": "import sympy; x = sympy.Symbol('x'); assert sympy.solve(x**2 - 4) == [-2, 2]",
    "networkx": "import networkx; assert networkx.shortest_path_length(networkx.path_graph(9), 0, 8) == 8",
    "pandas": """
import pandas
frame = pandas.DataFrame({"a": [1, 2], "b": pandas.to_datetime(["2020-01-01", "2021-01-01"])})
frame.to_csv("x.csv"); assert pandas.read_csv("x.csv").a.sum() == 3 and "2020" in frame.to_string()""",
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_works_under_the_filter(name: str, guest_python: Path, tmp_path: Path) -> None:
    run = run_under_filter(guest_python, LIBRARIES[name], tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("minor", [9, 10, 12, 13])
def test_other_python_versions_work_under_the_filter(minor: int, tmp_path: Path) -> None:
    path = find_python_minor(minor)
    if path is None:
        pytest.skip(f"needs a Python 3.{minor} on PATH or from pyenv")
    for feature in ("process and queue", "subprocess", "asyncio", "temporary files"):
        run = run_under_filter(path, FEATURES[feature], tmp_path)
        assert run.returncode == 0, (feature, run.stderr)


ATTACKS = {
    "internet socket": "import socket; socket.socket()",
    "naming a unix socket": "import socket; socket.socket(socket.AF_UNIX).bind('name')",
    "connecting a unix socket": "import socket; socket.socket(socket.AF_UNIX).connect('name')",
    "unix datagrams": "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "datagram pair, which could be sent to by name": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "binding an end of a pair": "import socket; socket.socketpair()[0].bind('\\0name')",
    "option that names a socket": "import socket; socket.socketpair()[0].setsockopt(1, socket.SO_PASSCRED, 1)",
    "memory without a limit": "import os; os.memfd_create('x')",
    "higher priority": "import os; os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "typing into a terminal": "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_refused_by_the_filter(attack: str, tmp_path: Path) -> None:
    run = run_under_filter(sys.executable, ATTACKS[attack], tmp_path)
    assert "PermissionError" in run.stderr, run.stderr


def test_new_user_namespaces_are_refused_by_every_system_call(tmp_path: Path) -> None:
    new_user, child_signal = 0x10000000, 17  # CLONE_NEWUSER, SIGCHLD; clone ignores the bit 1 << 40
    code = f"""
import errno
assert raw({OWN_NUMBERS["unshare"]}, {new_user}) == errno.EPERM
assert raw({OWN_NUMBERS["clone"]}, {new_user | child_signal}, 0, 0, 0, 0) == errno.EPERM
assert raw({OWN_NUMBERS["clone"]}, {1 << 40 | new_user | child_signal}, 0, 0, 0, 0) == errno.EPERM
assert raw({OWN_NUMBERS["clone3"]}, 0, 0) == errno.ENOSYS
"""
    run = run_under_filter(sys.executable, code, tmp_path)
    assert run.returncode == 0, run.stderr


def test_x32_system_call_fails_with_enosys(tmp_path: Path) -> None:
    code = f"import errno; assert raw({seccomp.X32_BIT | OWN_NUMBERS['getpid']}) == errno.ENOSYS"
    run = run_under_filter(sys.executable, code, tmp_path)
    assert run.returncode == 0, run.stderr


def test_filter_cannot_be_replaced(tmp_path: Path) -> None:
    code = "assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == -1  # PR_SET_SECCOMP"
    run = run_under_filter(sys.executable, code, tmp_path)
    assert run.returncode == 0, run.stderr


ADVICE_OF_READS: list[tuple[str, int, int, int]] = [
    *(("preadv2", 5, flags, seccomp.ALLOW) for flags in (0, os.RWF_HIPRI, os.RWF_SYNC | os.RWF_DSYNC)),
    *(("pwritev2", 5, flags, seccomp.ALLOW) for flags in (0, os.RWF_SYNC, os.RWF_APPEND)),
    *((name, 5, flags, seccomp.EPERM) for name in ("preadv2", "pwritev2") for flags in (os.RWF_NOWAIT, 0x80, 0x81)),
    *(("fadvise64", 3, advice, seccomp.ALLOW) for advice in (os.POSIX_FADV_NORMAL, os.POSIX_FADV_WILLNEED)),
    ("fadvise64", 3, os.POSIX_FADV_DONTNEED, seccomp.FAKE_SUCCESS),
    ("fadvise64", 3, 6, seccomp.EPERM),
]


@pytest.mark.parametrize(("name", "index", "value", "expected"), ADVICE_OF_READS)
def test_no_call_learns_or_changes_what_is_in_the_page_cache(name: str, index: int, value: int, expected: int) -> None:
    registers = [0] * 6
    registers[index] = value
    assert emulate(seccomp.program(), OWN_NUMBERS[name], registers)[0] == expected


@pytest.mark.parametrize("command", [6, 7, 37, 38])  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
def test_the_filter_refuses_every_call_that_locks_a_file(command: int) -> None:
    assert emulate(seccomp.program(), OWN_NUMBERS["fcntl"], [0, command, 0, 0, 0, 0])[0] != seccomp.ALLOW
    assert emulate(seccomp.program(), OWN_NUMBERS["flock"], [0] * 6)[0] == seccomp.ENOSYS


@pytest.mark.parametrize(
    ("size", "is_allowed"), [(4096, True), (1 << 16, True), ((1 << 16) + 1, False), (1 << 20, False)]
)
def test_a_pipe_can_shrink_and_not_grow(size: int, is_allowed: bool) -> None:
    result = emulate(seccomp.program(), OWN_NUMBERS["fcntl"], [0, 1031, size, 0, 0, 0])[0]  # F_SETPIPE_SZ
    assert result == (seccomp.ALLOW if is_allowed else seccomp.EPERM)
