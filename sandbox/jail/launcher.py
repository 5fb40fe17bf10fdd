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

from sandbox.errors import IsolationError
from sandbox.jail import kernel, root_fs, userns
from sandbox.jail.spec import JailSpec
from sandbox.jail.userns import layer_errors

HOSTNAME = "sandbox"
EXIT_LAYER_REFUSED = 78
"""Exit status of a launcher if the machine does not grant a layer (EX_CONFIG); its stderr names the layer."""

NO_CORE_DUMP = (1, 1)
"""Not 0: then a dump still goes where kernel.core_pattern is a pipe, to a program of the host's root. At exactly 1 the
kernel drops that too (fs/coredump.c), and no file is so small."""
FIRST_TO_GO = "1000"
"""The oom_score_adj of all in a jail (proc_pid_oom_score_adj(5)), which they cannot lower without CAP_SYS_RESOURCE:
when the machine is out of memory, the kernel kills the largest process in a jail and none of the server's."""
EXIT_CANNOT_START = 127
"""Exit status when the guest's program could not be run at all, as shells have it."""


def detach_from_server() -> int:
    """Leave the caller's session and habits behind. Returns a pidfd of the process that started us."""
    parent = os.pidfd_open(os.getppid())
    if os.getsid(0) != os.getpid():
        os.setsid()  # so that a Ctrl-C on the server's terminal leaves draining to the server
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, NO_CORE_DUMP)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST_TO_GO)
    return parent


def wait_or_kill(parent: int, child: int) -> int:
    """Wait for `child` and return its exit status; if `parent` (a pidfd) ends first, kill the child."""
    ends = select.poll()
    ends.register(parent, select.POLLIN)
    ends.register(os.pidfd_open(child), select.POLLIN)
    if any(fd == parent for fd, _ in ends.poll()):
        os.kill(child, signal.SIGKILL)
    return reap_until(child)


def reap_until(child: int) -> int:
    """Reap until `child` has ended, orphans included. 128 + n for a death by signal n, as shells have it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def exec_guest(spec: JailSpec, fd: int) -> NoReturn:
    """Exec the guest with `spec`'s environment and nothing inherited but `fd` and stderr."""
    kernel.set_parent_death_signal()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    close_fds_except(fd)
    os.set_inheritable(fd, True)
    argv = spec.guest_argv(fd)
    try:
        os.execve(argv[0], argv, spec.guest_env())
    except OSError as why:
        print(f"jail: cannot start {argv[0]}: {why.strerror}", file=sys.stderr, flush=True)
    os._exit(EXIT_CANNOT_START)


def close_fds_except(*kept: int) -> None:
    """Close every descriptor above stderr that is not among `kept`."""
    for below, above in pairwise([2, *sorted(kept), kernel.MAX_FD + 1]):
        if above > below + 1:
            kernel.close_range(below + 1, above - 1)


def prepare_root(spec: JailSpec) -> bool:
    """The first half of `enter_jail`, up to a root that is ready in an own mount namespace. Returns whether the host's
    rights were there for it; without them it is in a user namespace of its own, which has the range of ids."""
    privileged = userns.become_privileged(spec.uid_base, spec.uid_count)
    with layer_errors("no_new_privs"):  # not before newuidmap has run, which is set-uid
        kernel.set_no_new_privs()
    if (privileged or spec.uid_base is not None) and (hidden := root_fs.first_unreadable(spec.python)):
        raise IsolationError(f"files: calls run as other users and cannot read {hidden}; chmod -R o+rX it")
    with layer_errors("mount namespace", "grant CAP_SYS_ADMIN"):
        kernel.unshare(kernel.CLONE_NEWNS)
    with layer_errors("read-only root", "let the container mount (CAP_SYS_ADMIN, seccomp, AppArmor)"):
        root_fs.build(spec)
    return privileged


def drop_privileges() -> None:
    """From here on this process only waits. Its memory still holds the environment that the server gave it."""
    kernel.drop_capabilities()
    kernel.set_not_dumpable()
