"""System calls of a zygote and its calls: their numbers, and functions that make them.

Invariants:
- A function of this module does not release the interpreter lock (PyDLL), and ctypes keeps no copy of errno. To release
  the lock or to copy errno would write to memory that a call shares with its zygote, and the first write to a page
  copies the page. No other thread waits for the lock, because the zygote has one thread, and a call has one thread
  while it uses this module.
- Symbols are looked up at import, because a lookup in a call would read the C library's tables into its memory.

The constants are the kernel's numbers on x86-64. On other architectures a constant only identifies a system call, and
`invoke` calls the function of the C library with the same name. There only level `none` is supported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

WRITE, OPEN, CLOSE, SIGPROCMASK, IOCTL, DUP2, SOCKET, CLONE, CHDIR = 1, 2, 3, 14, 16, 33, 41, 56, 80
SETPGID, SETSID, SETNS = 109, 112, 308
SETGROUPS, SETRESUID, SETRESGID, CAPSET, PRCTL, SETRLIMIT, MOUNT = 116, 117, 119, 126, 157, 160, 165
CLOCK_GETTIME, UNSHARE, SECCOMP, CLONE3, CLOSE_RANGE = 228, 272, 317, 435, 436
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_GET_TID_ADDRESS = 1, 24, 36, 38, 40
SECCOMP_SET_MODE_FILTER = 1
SIGSET_BYTES = 8
"""Bytes of the kernel's sigset_t."""

_libc = ctypes.PyDLL(None)
_libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
errno_location = _libc.__errno_location
fork, prctl, capset, syscall, unshare = _libc.fork, _libc.prctl, _libc.capset, _libc.syscall, _libc.unshare
select, signalfd, sigprocmask, mprotect = _libc.select, _libc.signalfd, _libc.sigprocmask, _libc.mprotect
mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

do_nothing = _libc.sched_yield
"""A C function, like `syscall`, that has no effect and returns 0."""
_SIGCHLD_ONLY = (1 << signal.SIGCHLD - 1).to_bytes(128, sys.byteorder)  # sigset_t of the C library
_SIG_BLOCK = 0
_SFD_CLOEXEC = 0o2000000

_raw = _libc["syscall"]  # a second function object, with other argument types than `syscall`
_raw.argtypes, _raw.restype = (ctypes.c_long,) * 7, ctypes.c_long
_IS_X86_64 = os.uname().machine == "x86_64"
_NAMES = {
    **{WRITE: "write", OPEN: "open", CLOSE: "close", SIGPROCMASK: "sigprocmask", DUP2: "dup2", SETPGID: "setpgid"},
    **{PRCTL: "prctl", SETRLIMIT: "setrlimit", CLOCK_GETTIME: "clock_gettime"},
}
_functions = {number: _libc[name] for number, name in _NAMES.items()}
for _function in _functions.values():
    _function.argtypes, _function.restype = (ctypes.c_long,) * 6, ctypes.c_long


def invoke(number: int, *arguments: int) -> int:
    """Make a system call with six arguments. Return its result, or the negative error number.

    A fork without namespaces goes through fork(3), which also updates the thread id that the C library has stored.
    """
    if number == CLONE and arguments[0] == signal.SIGCHLD:
        result = fork()
    elif _IS_X86_64 or number not in _functions:
        result = _raw(number, *arguments)
    else:
        result = _functions[number](*arguments)
    return int(result) if result != -1 else -int(errno_location()[0])


def open_child_signal_fd() -> int:
    """Return a descriptor that is readable when a child has died (signalfd(2)). No signal handler is needed."""
    sigprocmask(_SIG_BLOCK, _SIGCHLD_ONLY, None)
    return check(signalfd(-1, _SIGCHLD_ONLY, _SFD_CLOEXEC), "signalfd")


def check(result: int, name: str) -> int:
    """Return the result of a C function that returns -1 for errors. Raises `OSError` with errno and the name."""
    if result < 0:
        number = errno_location()[0]
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)
