"""Level `namespaces`: the launcher, which turns itself into a jail around the guest. Started by `plan.command`.

    server ── launcher ── init (PID 1 inside) ── guest (the zygote) ── calls
              waits       reaps orphans

- The kernel kills everything inside when init ends; init ends with the guest, and dies with the launcher.
- The launcher gives up its own privileges and its view of the host too, once the jail stands.
- The root is made *before* the user namespace of the guest: its mounts then belong to a more privileged namespace and
  are locked, so that even the guest's CAP_SYS_ADMIN can neither remount them writable nor take them off.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from sandbox.errors import IsolationError
from sandbox.jail import kernel, launcher, root_fs, userns
from sandbox.jail.spec import JailSpec
from sandbox.jail.userns import layer_errors

# What the guest needs to set up a call: mounts and namespaces, the slot's uid, the bounding set, and ending calls.
ZYGOTE_CAPABILITIES = frozenset(
    {kernel.CAP_SYS_ADMIN, kernel.CAP_SETUID, kernel.CAP_SETGID, kernel.CAP_SETPCAP, kernel.CAP_KILL}
)


def main() -> NoReturn:
    spec, fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    parent = launcher.detach_from_server()
    try:
        enter_jail(spec)
    except IsolationError as why:
        print(f"jail: {why}", file=sys.stderr, flush=True)
        os._exit(launcher.EXIT_LAYER_REFUSED)
    # Only the holder of the other end keeps this pipe open: init sees its launcher's death even if it came first.
    launcher_alive_r, launcher_alive_w = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(launcher_alive_w)
        os._exit(_run_init(spec, fd, launcher_alive_r))
    os.close(fd)  # so that the guest's end of the socket is the only one
    launcher.drop_privileges()
    os._exit(launcher.wait_or_kill(parent, init))


def enter_jail(spec: JailSpec) -> None:
    """Put this process into the jail, all but its PID, which only children can change.

    The order: no_new_privs as soon as it can be, it costs nothing and holds for all that follows. The root is built
    with the host's rights. The inner namespaces come after it (locked mounts, see above), and ids last, because they
    end those rights.
    """
    proc = userns.open_proc_self()  # while there is a /proc: the id maps are written through it when there is none
    privileged = launcher.prepare_root(spec)
    with layer_errors("pivot_root", "let the container mount (CAP_SYS_ADMIN, seccomp, AppArmor)"):
        root_fs.pivot()
    userns.enter_guests(spec.uid_base, spec.uid_count, proc, privileged=privileged)
    os.close(proc)
    with layer_errors("hostname"):
        kernel.set_hostname(launcher.HOSTNAME)
    with layer_errors("capabilities"):
        kernel.limit_bounding_set(ZYGOTE_CAPABILITIES)


def _run_init(spec: JailSpec, fd: int, launcher_alive_r: int) -> int:
    """PID 1: start the guest, reap whatever is orphaned, and end with the guest, which ends everything."""
    kernel.set_parent_death_signal()
    os.set_blocking(launcher_alive_r, False)
    try:
        os.read(launcher_alive_r, 1)  # end of file: the launcher is gone already, and its death signal with it
        return 1
    except BlockingIOError:
        pass
    guest = os.fork()
    if guest == 0:
        launcher.exec_guest(spec, fd)
    launcher.close_fds_except()
    launcher.drop_privileges()
    return launcher.reap_until(guest)


if __name__ == "__main__":
    main()
