"""Level `namespaces`: a program that builds a jail with namespaces around the guest. `plan.launch_argv` starts it.

    server ── launcher ── init (PID 1 inside) ── guest (the zygote) ── calls
              waits       reaps orphans

- When init ends, the kernel kills all processes inside. Init ends with the guest, and dies with the launcher.
- Once the jail is complete, the launcher drops its privileges. It then sees only the jail's files.
- The root is built *before* the guest's user namespace. So its mounts belong to a more privileged namespace, which
  locks them: even with CAP_SYS_ADMIN the guest can neither make them writable nor unmount them (mount_namespaces(7)).
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from sandbox.errors import IsolationError
from sandbox.jail import kernel, launcher, root_fs, userns
from sandbox.jail.spec import JailSpec
from sandbox.jail.userns import isolation_errors


def main() -> NoReturn:
    spec, socket_fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    server_pidfd = launcher.leave_server_session()
    try:
        enter_jail(spec)
    except IsolationError as error:
        launcher.print_error(error)
        os._exit(launcher.EXIT_LAYER_REFUSED)
    # Only the launcher holds the write end. So init reads end of file if the launcher died before init had set its
    # parent-death signal.
    launcher_alive_r, launcher_alive_w = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(launcher_alive_w)
        os._exit(_run_init(spec, socket_fd, launcher_alive_r))
    os.close(socket_fd)  # only the guest may hold it, so that the connection ends with the guest
    launcher.drop_privileges()
    os._exit(launcher.wait_or_kill(server_pidfd, init))


def enter_jail(spec: JailSpec) -> None:
    """Move this process into the jail. Only its children enter the PID namespace.

    | step | reason for its place |
    |---|---|
    | no_new_privs, root | the root needs the host's privileges, and its mounts must be locked for the guest |
    | namespaces, ids | changing ids ends the host's privileges |
    | hostname, bounding set | they belong to the new namespaces |
    """
    proc_self = userns.open_proc_self()  # to write the id maps, when /proc is gone
    privileged = launcher.prepare_root(spec)
    with isolation_errors("pivot_root", "let the container mount (CAP_SYS_ADMIN, seccomp, AppArmor)"):
        root_fs.pivot()
    userns.enter_jail_namespaces(spec.uid_base, spec.uid_count, proc_self, privileged=privileged)
    os.close(proc_self)
    with isolation_errors("hostname"):
        kernel.set_hostname(launcher.HOSTNAME)
    with isolation_errors("capabilities"):
        kernel.limit_bounding_set(frozenset(launcher.ZYGOTE_CAPABILITIES.values()))


def _run_init(spec: JailSpec, socket_fd: int, launcher_alive_r: int) -> int:
    """Run as PID 1: start the guest, reap orphans, and end with the guest, which ends all other processes inside."""
    kernel.set_parent_death_signal()
    os.set_blocking(launcher_alive_r, False)
    try:
        os.read(launcher_alive_r, 1)  # end of file: the launcher has ended
        return 1
    except BlockingIOError:
        pass
    guest = os.fork()
    if guest == 0:
        launcher.exec_guest(spec, socket_fd)
    launcher.close_fds_except()
    launcher.drop_privileges()
    return launcher.reap_until(guest)


if __name__ == "__main__":
    main()
