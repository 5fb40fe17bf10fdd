"""Functions that launchers use: for lifetimes of processes, the read-only root, and the start of the guest.

A launcher is the process that builds a jail and waits for it. The guest is the code inside the jail. A layer is one
kernel mechanism that isolates the jail, such as a user namespace.

    server ── launcher ── (init) ── guest (the zygote) ── calls

- The process that starts a launcher is called the server here; usually it is an executor. The launcher watches the
  server by a pidfd. PR_SET_PDEATHSIG does not suffice: it fires when the *thread* that forked a process ends, and any
  thread may start a launcher.
- The processes below the launcher use PR_SET_PDEATHSIG, since each of their parents has a single thread.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import NoReturn

from sandbox.errors import IsolationError
from sandbox.jail import kernel, root_fs, userns
from sandbox.jail.spec import JailSpec
from sandbox.jail.userns import isolation_errors

HOSTNAME = "sandbox"
EXIT_LAYER_REFUSED = 78
"""Exit status of a launcher if the kernel refuses a layer (EX_CONFIG of sysexits.h). Its stderr names the layer."""
EXIT_CANNOT_START = 127
"""Exit status of a launcher if the guest's program cannot be executed, as in shells."""
ZYGOTE_CAPABILITIES: Mapping[str, int] = {
    name: getattr(kernel, name)
    for name in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_NET_ADMIN")
}
"""Capabilities that the zygote keeps inside its user namespace. With them it confines calls: it mounts, creates
namespaces, changes uids, drops capabilities from the bounding set and sets up networks. CAP_KILL lets it kill calls."""
NO_CORE_DUMP = (1, 1)
"""RLIMIT_CORE of a jail: 1 disables core dumps. 0 does not suffice: if kernel.core_pattern names a program, the kernel
still runs this program as the host's root and sends it the dump (fs/coredump.c)."""
OOM_SCORE = "1000"
"""oom_score_adj of all processes in a jail. If the machine is out of memory, the kernel kills a process in a jail
before a process of the server (proc_pid_oom_score_adj(5)). Without CAP_SYS_RESOURCE, a process cannot lower its
value."""


def leave_server_session() -> int:
    """Leave the server's session and reset what is inherited from it. Return a pidfd of the server, with which the
    launcher notices the server's end.

    If the server has already ended, the pidfd is that of the process that has adopted the launcher. The jail ends
    nevertheless, because a zygote ends when the server's end of its socket is closed.
    """
    server_pidfd = os.pidfd_open(os.getppid())
    if os.getsid(0) != os.getpid():
        os.setsid()  # Ctrl-C on the server's terminal must reach the server alone, which then stops gracefully
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, NO_CORE_DUMP)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)
    return server_pidfd


def wait_or_kill(server_pidfd: int, child: int) -> int:
    """Wait for `child` and return its exit status. Kill the child if the server ends first."""
    if wait_for_first(server_pidfd, os.pidfd_open(child)) == server_pidfd:
        os.kill(child, signal.SIGKILL)
    return reap_until(child)


def wait_for_first(*fds: int) -> int:
    """Wait until a descriptor is readable or at its end, and return it. If several are, return the first of `fds`."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    return next(fd for fd in fds if fd in ready)


def reap_until(child: int) -> int:
    """Reap all children, adopted ones included, until `child` has ended. Returns its `shell_exit_status`."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return shell_exit_status(status)


def shell_exit_status(wait_status: int) -> int:
    """Return the exit status of a process, or 128 + n if signal n killed it, as a shell does."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def prepare_root(spec: JailSpec) -> bool:
    """Enter a mount namespace and build the jail's root in it.

    Returns whether this process has the host's privileges. A process without them enters a user namespace first, in
    which it may mount. The ids of `spec.uid_base` and `spec.uid_count` are mapped into this namespace.
    """
    privileged = userns.become_privileged(spec.uid_base, spec.uid_count)
    with isolation_errors("no_new_privs"):  # only now, because it disables set-uid programs such as newuidmap
        kernel.set_no_new_privs()
    # In any other case, calls run with the server's own uid, which can read the files that the server can read.
    if (privileged or spec.uid_base is not None) and (hidden := root_fs.first_unreadable(spec.python)):
        raise IsolationError(f"files: calls run as other users and cannot read {hidden}; chmod -R o+rX it")
    with isolation_errors("mount namespace", "grant CAP_SYS_ADMIN"):
        kernel.unshare(kernel.CLONE_NEWNS)
    with isolation_errors("read-only root", "let the container mount (CAP_SYS_ADMIN, seccomp, AppArmor)"):
        root_fs.build(spec)
    return privileged


def drop_privileges() -> None:
    """Drop all capabilities of a process that only waits from now on, and hide its memory.

    The memory still holds the server's environment.
    """
    kernel.drop_capabilities()
    kernel.set_not_dumpable()


def exec_guest(spec: JailSpec, socket_fd: int) -> NoReturn:
    """Execute the guest with the spec's environment. The guest inherits only stderr and `socket_fd`."""
    kernel.set_parent_death_signal()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    close_fds_except(socket_fd)
    os.set_inheritable(socket_fd, True)
    argv = spec.guest_argv(socket_fd)
    try:
        os.execve(argv[0], argv, spec.guest_env())
    except OSError as error:
        print_error(f"cannot start {argv[0]}: {error.strerror}")
    os._exit(EXIT_CANNOT_START)


def close_fds_except(*kept: int) -> None:
    """Close all descriptors above stderr but `kept`."""
    # Close each range of descriptors that lies between two neighbours of this sorted list.
    for below, above in pairwise([2, *sorted(kept), kernel.MAX_FD + 1]):
        if above > below + 1:
            kernel.close_range(below + 1, above - 1)


def print_error(message: object) -> None:
    """Write a message to stderr, which the server has passed to the launcher."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with suppress(BrokenPipeError):  # the reader of stderr has ended
        print(f"jail: {message}", file=sys.stderr, flush=True)
