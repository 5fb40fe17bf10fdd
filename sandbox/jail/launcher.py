"""Who dies with whom, and how the guest is started: the ends that every level of jail has in common.

- The launcher watches the process that started it by pidfd. PR_SET_PDEATHSIG would not do there: it fires when the
  *thread* that forked us ends, and Trio starts processes from worker threads that end when idle.
- Everything below the launcher is forked by a process with one thread, so there PR_SET_PDEATHSIG means what it says.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from typing import NoReturn

from sandbox.jail import kernel
from sandbox.jail.spec import JailSpec

NO_CORE = (1, 1)
"""Not 0: then a dump still goes where kernel.core_pattern is a pipe, to a program of the host's root. At exactly 1 the
kernel drops that too (fs/coredump.c), and no file is so small."""
FIRST_TO_GO = "1000"
"""The oom_score_adj of all in a jail (proc_pid_oom_score_adj(5)), which they cannot lower without CAP_SYS_RESOURCE:
when the machine is out of memory, the kernel kills the largest process in a jail and none of the server's."""
CANNOT_START = 127
"""Exit status when the guest's program could not be run at all, as shells have it."""


def begin() -> int:
    """Leave the caller's session and habits behind. Returns a pidfd of the process that started us."""
    parent = os.pidfd_open(os.getppid())
    if os.getsid(0) != os.getpid():
        os.setsid()  # so that a Ctrl-C on the server's terminal leaves draining to the server
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, NO_CORE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST_TO_GO)
    return parent


def watch(parent: int, child: int) -> int:
    """Wait for `child` and return its exit status; if `parent` (a pidfd) ends first, kill the child."""
    ends = select.poll()
    ends.register(parent, select.POLLIN)
    ends.register(os.pidfd_open(child), select.POLLIN)
    if any(fd == parent for fd, _ in ends.poll()):
        os.kill(child, signal.SIGKILL)
    return reap(child)


def reap(child: int) -> int:
    """Reap until `child` has ended, orphans included. 128 + n for a death by signal n, as shells have it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def become_guest(spec: JailSpec, fd: int) -> NoReturn:
    """Exec the guest with `spec`'s environment and nothing inherited but `fd` and stderr."""
    kernel.die_with_parent()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    close_all_but(fd)
    os.set_inheritable(fd, True)
    argv = spec.guest_argv(fd)
    try:
        os.execve(argv[0], argv, spec.guest_env())
    except OSError as why:
        print(f"jail: cannot start {argv[0]}: {why.strerror}", file=sys.stderr, flush=True)
    os._exit(CANNOT_START)


def close_all_but(*kept: int) -> None:
    """Close every descriptor above stderr that is not among `kept`."""
    for below, above in pairwise([2, *sorted(kept), kernel.MAX_FD + 1]):
        if above > below + 1:
            kernel.close_range(below + 1, above - 1)
