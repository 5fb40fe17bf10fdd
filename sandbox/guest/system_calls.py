"""System calls of a zygote and its calls: their numbers, and functions that make them.

Invariants:
- A function of this module does not release the interpreter lock (PyDLL), and ctypes keeps no copy of errno. Each of
  them would write to memory that a call shares with its zygote, and the first write to a page copies the page. No other
  thread waits for the lock, because a zygote has one thread, and a call has one thread while it uses this module.
- Symbols are looked up at import, because a lookup in a call would read the C library's tables into its memory.

The constants are the kernel's numbers on x86_64 and on aarch64. On other machines a constant only identifies a system
call, and `invoke` calls the function of the C library with the same name. There only level `none` is supported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator

_MACHINE = os.uname().machine


def _number(x86_64: int, aarch64: int) -> int:
    return aarch64 if _MACHINE == "aarch64" else x86_64


READ = _number(0, 63)
WRITE = _number(1, 64)
CLOSE = _number(3, 57)
SIGPROCMASK = _number(14, 135)
IOCTL = _number(16, 29)
MADVISE = _number(28, 233)
SOCKET = _number(41, 198)
CLONE = _number(56, 220)
CHDIR = _number(80, 49)
FCHDIR = _number(81, 50)
SETPGID = _number(109, 154)
SETSID = _number(112, 157)
SETGROUPS = _number(116, 159)
SETRESUID = _number(117, 147)
SETRESGID = _number(119, 149)
CAPSET = _number(126, 91)
PRCTL = _number(157, 167)
SETRLIMIT = _number(160, 164)
MOUNT = _number(165, 40)
CLOCK_GETTIME = _number(228, 113)
OPENAT = _number(257, 56)
UNSHARE = _number(272, 97)
DUP3 = _number(292, 24)
SETNS = _number(308, 268)
SECCOMP = _number(317, 277)
# From 424 on, numbers are the same on all machines.
CLONE3 = 435
CLOSE_RANGE = 436
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_GET_TID_ADDRESS = 40
SECCOMP_SET_MODE_FILTER = 1
SIGSET_BYTES = 8
"""Bytes of the kernel's sigset_t."""

_libc = ctypes.PyDLL(None)
_libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
errno_location = _libc.__errno_location
fork, prctl, select, syscall, unshare = _libc.fork, _libc.prctl, _libc.select, _libc.syscall, _libc.unshare
mprotect, signalfd, sigprocmask = _libc.mprotect, _libc.signalfd, _libc.sigprocmask
mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

do_nothing = _libc.sched_yield
"""A C function, as `syscall` is one, that has no effect and returns 0."""
_SIGCHLD_ONLY = (1 << signal.SIGCHLD - 1).to_bytes(128, sys.byteorder)  # sigset_t of the C library
_SFD_CLOEXEC = 0o2000000

_raw = _libc["syscall"]  # a second function object, with other argument types than `syscall`
_raw.argtypes, _raw.restype = (ctypes.c_long,) * 7, ctypes.c_long
_HAS_NUMBERS = _MACHINE in ("x86_64", "aarch64")
_functions = {
    WRITE: _libc["write"],
    OPENAT: _libc["openat"],
    CLOSE: _libc["close"],
    SIGPROCMASK: _libc["sigprocmask"],
    DUP3: _libc["dup3"],
    FCHDIR: _libc["fchdir"],
    SETPGID: _libc["setpgid"],
    PRCTL: _libc["prctl"],
    SETRLIMIT: _libc["setrlimit"],
    CLOCK_GETTIME: _libc["clock_gettime"],
}
"""Functions of the C library for the system calls that level `none` needs. Machines without numbers use them."""
for _function in _functions.values():
    _function.argtypes, _function.restype = (ctypes.c_long,) * 6, ctypes.c_long


def invoke(number: int, *arguments: int) -> int:
    """Make a system call with six arguments. Return its result, or the negative error number.

    A fork without namespaces goes through fork(3), which also updates the thread id that the C library has stored.
    """
    if number == CLONE and arguments[0] == signal.SIGCHLD:
        result = fork()
    elif _HAS_NUMBERS or number not in _functions:
        result = _raw(number, *arguments)
    else:
        result = _functions[number](*arguments)
    return int(result) if result != -1 else -int(errno_location()[0])


def open_child_signal_fd() -> int:
    """Return a descriptor that is readable when a child has died (signalfd(2)). No signal handler is needed."""
    sigprocmask(signal.SIG_BLOCK, _SIGCHLD_ONLY, None)
    return check(signalfd(-1, _SIGCHLD_ONLY, _SFD_CLOEXEC), "signalfd")


def ended_children() -> Iterator[tuple[int, int, resource.struct_rusage]]:
    """Collect all children that have ended. Yield pid, wait status and usage of each."""
    with contextlib.suppress(ChildProcessError):
        while (child := os.wait4(-1, os.WNOHANG))[0]:
            yield child


def check(result: int, name: str) -> int:
    """Return the result of a C function that returns -1 for errors. Raises `OSError` with errno and the name."""
    if result < 0:
        number = errno_location()[0]
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)
