"""Attacks through resources that calls share: one call leaves a message there, and another call receives it at the same
time or later."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.escape.targets import (
    DEADLINE_S,
    Host,
    Target,
    canary,
    check_resisted,
    skip_under_seccomp,
    succeeds_without_jail,
)
from tests.executor.calling import OWN_PYTHON

SHARED_MEMORY = """
import mmap
def shared():
    # Return the addresses of all shared pages, mapped writable. mremap(2) of 0 bytes maps a page a second time, and
    # works for shared memory only. Without /proc, mincore(2) distinguishes mapped pages from holes.
    libc.mremap.restype, libc.mincore.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    libc.mprotect.argtypes, libc.sbrk.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_void_p
    vector, seen, found = ctypes.create_string_buffer(1), set(), []
    anchors = [id(sys), id(int), ctypes.addressof(ctypes.c_char_p.in_dll(libc, "environ")),
               ctypes.cast(libc.malloc, ctypes.c_void_p).value, ctypes.addressof(ctypes.create_string_buffer(1 << 20))]
    for anchor in anchors:
        for step in (1, -1):
            page, hole = anchor >> 12, 0
            while hole < 4096 and page > 16:
                hole += 1
                if page not in seen and libc.mincore(page << 12, 4096, vector) == 0:
                    seen.add(page); hole = 0
                    twin = libc.mremap(page << 12, 0, 4096, 1)
                    if twin != 2**64 - 1 and libc.mprotect(twin, 4096, 3) == 0: found.append(twin)
                elif page in seen: hole = 0
                page += step
    return found
"""
MESSAGES: dict[str, tuple[str, str]] = {
    "files": (
        """
for path in DIRS:
    try: open(path + "/message", "w").write(MESSAGE)
    except OSError: pass
""",
        "for path in DIRS: scan(read(path + '/message'))",
    ),
    "files under any name": (
        "open(MESSAGE.replace('/', ''), 'w').close()",
        """
for directory in DIRS:
    for name in names(directory): scan(name.encode())
""",
    ),
    "times, modes and attributes of shared files": (
        """
for path in PROTECTED_PATHS:
    attempt(os.utime, path, (7e8, 7e8)), attempt(os.setxattr, path, "user.message", MESSAGE.encode())
    if os.path.isdir(path): attempt(os.chmod, path, 0o1753)
""",
        """
for path in PROTECTED_PATHS:
    about = attempt(os.stat, path)
    if not isinstance(about, OSError) and about.st_mtime == 7e8: breach(MESSAGE)
    got = attempt(os.getxattr, path, "user.message")
    if not isinstance(got, OSError): scan(got)
""",
    ),
    "System V shared memory": (
        """
libc.shmat.restype = ctypes.c_void_p
area = libc.shmat(libc.shmget(0x1e77e4, 4096, 0o1666), None, 0)
if 0 < area < 2**63: ctypes.memmove(area, MESSAGE.encode(), len(MESSAGE))
""",
        """
libc.shmat.restype = ctypes.c_void_p
number = libc.shmget(0x1e77e4, 0, 0)
area = libc.shmat(number, None, 0)
if 0 < area < 2**63: scan(ctypes.string_at(area, 4096)); libc.shmctl(number, 0, None)
""",
    ),
    "System V messages": (
        "libc.msgsnd(libc.msgget(0x1e77e4, 0o1666), struct.pack('q', 1) + MESSAGE.encode(), len(MESSAGE), 0o4000)",
        """
number, buffer = libc.msgget(0x1e77e4, 0), ctypes.create_string_buffer(200)
if libc.msgrcv(number, buffer, 100, ctypes.c_long(0), 0o4000) > 0: scan(buffer.raw)
if number >= 0: libc.msgctl(number, 0, None)
""",
    ),
    "POSIX message queues": (
        "number = libc.mq_open(b'/message', 0o102, 0o600, None); libc.mq_send(number, MESSAGE.encode(), len(MESSAGE), 1)",
        """
number, buffer = libc.mq_open(b'/message', 0o4000), ctypes.create_string_buffer(8192)
if libc.mq_receive(number, buffer, 8192, None) > 0: scan(buffer.raw)
libc.mq_unlink(b'/message')
""",
    ),
    "keyrings": (
        "raw('add_key', b'user', b'message', MESSAGE.encode(), len(MESSAGE), -4)  # KEY_SPEC_USER_KEYRING",
        """
# keyctl(2): KEYCTL_SEARCH, KEYCTL_READ and KEYCTL_UNLINK
key, buffer = raw('keyctl', 10, -4, b"user", b"message", 0), ctypes.create_string_buffer(200)
if key >= 0 and raw('keyctl', 11, key, buffer, 200) > 0: scan(buffer.raw)
raw('keyctl', 9, key, -4)
""",
    ),
    "an abstract socket": (
        "kept = []\nattempt(lambda: (kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)), kept[0].bind('\\0message' + MESSAGE[-8:])))",
        "got = attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect('\\0message' + MESSAGE[-8:]))\n"
        "if not isinstance(got, OSError) and got is None: breach(MESSAGE)",
    ),
    "a socket with a path": (
        "kept = []\nfor path in DIRS:\n    own = socket.socket(socket.AF_UNIX); attempt(own.bind, path + '/s'); attempt(own.listen); kept.append(own)",
        "for path in DIRS:\n    if works(socket.socket(socket.AF_UNIX).connect, path + '/s'): breach(MESSAGE)",
    ),
    "flags of standard input": (
        "attempt(fcntl.fcntl, 0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)",
        "if fcntl.fcntl(0, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND): breach(MESSAGE)",
    ),
    "flags of standard input by ioctl": (
        "attempt(fcntl.ioctl, 0, 0x5421, struct.pack('i', 1))  # FIONBIO",
        "if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_NONBLOCK: breach(MESSAGE)",
    ),
    "the owner of standard input": (
        "attempt(fcntl.fcntl, 0, fcntl.F_SETOWN, os.getpid()), attempt(fcntl.fcntl, 0, 10, 41)  # F_SETSIG",
        "if attempt(fcntl.fcntl, 0, 11) == 41: breach(MESSAGE)  # F_GETSIG",
    ),
    # In a jail PROTECTED_PATHS has many files, and this code uses the second. A control has only one file.
    "a lock on a file": (
        "kept = open(PROTECTED_PATHS[:2][-1]); attempt(fcntl.flock, kept, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "got = attempt(fcntl.flock, open(PROTECTED_PATHS[:2][-1]), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "if isinstance(got, BlockingIOError): breach(MESSAGE)",
    ),
    "a lock on a device": (
        "kept = open(DEVICE, 'r+b', buffering=0); attempt(fcntl.lockf, kept, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "got = attempt(fcntl.lockf, open(DEVICE, 'r+b', buffering=0), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "if isinstance(got, OSError): breach(MESSAGE)",
    ),
    "a lock on a file by the system call itself": (
        "kept = open(PROTECTED_PATHS[:2][-1]); raw('flock', kept.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "kept = open(PROTECTED_PATHS[:2][-1])\n"
        "if raw('flock', kept.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) == -errno.EAGAIN: breach(MESSAGE)",
    ),
    "a record lock on a file, seen without setting one": (
        "kept = open(PROTECTED_PATHS[:2][-1])\n"
        "for command in (6, 37): raw('fcntl', kept.fileno(), command, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))  # F_RDLCK",
        "kept, lock = open(PROTECTED_PATHS[:2][-1]), ctypes.create_string_buffer(struct.pack('hhqqi4x', 1, 0, 0, 0, 0))  # F_WRLCK\n"
        "if raw('fcntl', kept.fileno(), 36, lock) == 0 and lock.raw[:2] == b'\\0\\0': breach(MESSAGE)",
    ),
    "inherited shared memory": (
        SHARED_MEMORY + "for address in shared(): ctypes.memmove(address, MESSAGE.encode(), len(MESSAGE))",
        SHARED_MEMORY + "for address in shared(): scan(ctypes.string_at(address, 4096))",
    ),
}
"""By medium: the code that leaves the message, and the code that receives it."""


def program_with_message(host: Host, code: str, message: str) -> str:
    """Return an attack that knows the message, but not in one piece. An attack that searches its own memory must not
    find the message there."""
    return host.attack_program(f"MESSAGE = 'CANARY-' + {message[7:]!r}\n{code}")


@pytest.mark.parametrize("kind", MESSAGES)
def test_no_message_reaches_a_later_call(kind: str, target: Target) -> None:
    send, receive = MESSAGES[kind]
    message = canary()
    target.caller.run(program_with_message(target.host, send, message))
    for _ in range(3):
        check_resisted(target.caller.run(program_with_message(target.host, receive, message)))


@pytest.mark.parametrize("kind", MESSAGES)
def test_no_message_reaches_a_concurrent_call(kind: str, target: Target) -> None:
    send, receive = MESSAGES[kind]
    message = canary()
    with target.sleeping_call(program_with_message(target.host, send, message)):
        check_resisted(target.caller.run(program_with_message(target.host, receive, message)))


@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if "inherited" not in kind])
def test_message_arrives_without_a_jail(kind: str, host: Host, tmp_path: Path) -> None:
    skip_under_seccomp()
    send, receive = MESSAGES[kind]
    message = canary()
    with open(os.devnull) as stdin:
        code = program_with_message(host, send + "\nos.write(1, b'LEFT\\n'); time.sleep(1000)", message)
        with subprocess.Popen([OWN_PYTHON, "-c", code], stdin=stdin, stdout=subprocess.PIPE, cwd=tmp_path) as sender:
            assert sender.stdout is not None
            assert sender.stdout.readline() == b"LEFT\n"
            try:
                argv = [OWN_PYTHON, "-c", program_with_message(host, receive, message)]
                done = subprocess.run(argv, stdin=stdin, stdout=-1, cwd=tmp_path, timeout=DEADLINE_S, check=False)
            finally:
                sender.kill()
    assert message.encode() in done.stdout


SEND_FROM_A_FORK = """
import mmap
kept = mmap.mmap(-1, 4096)
if os.fork() == 0: exec(SEND); os._exit(0)
os.wait()
exec(RECEIVE)
"""


def test_message_in_shared_memory_arrives_without_a_jail(host: Host, tmp_path: Path) -> None:
    send, receive = MESSAGES["inherited shared memory"]
    code = program_with_message(host, f"SEND, RECEIVE = {send!r}, {receive!r}\n{SEND_FROM_A_FORK}", message := canary())
    done = subprocess.run([OWN_PYTHON, "-c", code], capture_output=True, cwd=tmp_path, timeout=DEADLINE_S, check=False)
    assert message.encode() in done.stdout


KERNEL_CONTROLS = """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger", "/proc/self/oom_score_adj",
             "/proc/self/attr/current", "/proc/self/uid_map", "/proc/self/mem", "/proc/1/mem", "/proc/self/loginuid",
             "/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs",
             "/sys/kernel/mm/ksm/run", "/dev/kmsg", "/dev/mem", "/dev/tty", "/dev/console", "/dev/ptmx", "/dev/fuse",
             "/dev/kvm", "/dev/net/tun", "/dev/loop-control", "/dev/shm/../null/../tty"):
    got = attempt(os.open, path, os.O_WRONLY | os.O_CLOEXEC)
    if not isinstance(got, OSError): breach(path); os.close(got)
"""


def test_kernel_controls_cannot_be_opened(target: Target) -> None:
    target.resists(KERNEL_CONTROLS)


def test_opening_kernel_controls_succeeds_without_a_jail(host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, KERNEL_CONTROLS, tmp_path)


TAMPER = """
import json, random, math, builtins, decimal, threading, tempfile, warnings, locale, gc, itertools
json.dumps = random.random = math.sqrt = builtins.len = print = lambda *_: MESSAGE
builtins.MESSAGE = sys.MESSAGE = os.environ["MESSAGE"] = MESSAGE
sys.path.insert(0, "/" + MESSAGE); sys.modules[MESSAGE] = sys; sys.argv.append(MESSAGE); sys.setrecursionlimit(77)
signal.signal(signal.SIGUSR1, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); os.umask(0o077)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 60)); resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
decimal.getcontext().prec = 3; warnings.simplefilter("error"); gc.disable(); gc.set_threshold(1); sys.setswitchinterval(9)
sys.dont_write_bytecode = False; sys.excepthook = sys.displayhook = None; os.chdir("/"); signal.setitimer(signal.ITIMER_REAL, 100)
tempfile.tempdir = "/" + MESSAGE; os.putenv("LC_ALL", MESSAGE); sys.setprofile(lambda *_: None); sys.set_int_max_str_digits(0)
object.__init_subclass__; ctypes.memset(id(257), 0, 0); random.seed(5)
"""
STATE = """
import sys
print([sorted(k for k in sys.modules if not k.startswith("encodings")), sys.path, sys.argv, sys.getrecursionlimit(),
       sys.getswitchinterval(), sys.dont_write_bytecode, sys.flags])
import builtins, decimal, gc, json, locale, math, os, random, resource, signal, tempfile, threading, warnings
print([sorted(dir(builtins)), sorted(os.environ.items()), os.getcwd() if CWD else 0, os.umask(0), math.sqrt(4), json.dumps([1])])
print([signal.getsignal(n) for n in range(1, 64) if n not in (32, 33)], signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print([str(attempt(resource.getrlimit, n)) for n in range(16)], signal.getitimer(signal.ITIMER_REAL), decimal.getcontext(), gc.isenabled())
print(gc.get_threshold(), warnings.filters, sys.excepthook, sys.displayhook, tempfile.tempdir, locale.setlocale(locale.LC_ALL))
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), threading.active_count(), os.sched_getaffinity(0))
print(os.listdir("."), [fd for fd in range(256) if works(os.fstat, fd)])
"""


def test_state_of_the_interpreter_does_not_persist(target: Target) -> None:
    """Changes by a call to its interpreter and its process are invisible to the next calls."""
    report_state = f"def attempt(f, *a):\n    try: return f(*a)\n    except OSError as error: return error\ndef works(f, *a): return not isinstance(attempt(f, *a), OSError)\nCWD = {target.level != 'landlock'}\n{STATE}"
    before = target.caller.run(report_state)
    assert before.status == "ok", before
    message = canary()
    poisoned = target.caller.run(program_with_message(target.host, TAMPER, message), timeout_s=30.0)
    assert poisoned.stdout == "END\n", poisoned
    for _ in range(3):
        after = target.caller.run(report_state)
        assert (after.stdout, after.stderr) == (before.stdout, before.stderr)
