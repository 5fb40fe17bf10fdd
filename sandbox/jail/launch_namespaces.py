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
from sandbox.jail.userns import layer

HOSTNAME = "sandbox"
REFUSED = 78
"""Exit status when the machine does not grant a layer (EX_CONFIG); stderr says which."""
# What the guest needs to set up a call: mounts and namespaces, the slot's uid, the bounding set, and ending calls.
KEPT = frozenset({kernel.CAP_SYS_ADMIN, kernel.CAP_SETUID, kernel.CAP_SETGID, kernel.CAP_SETPCAP, kernel.CAP_KILL})


def main() -> NoReturn:
    spec, fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    parent = launcher.begin()
    try:
        enter(spec)
    except IsolationError as why:
        print(f"jail: {why}", file=sys.stderr, flush=True)
        os._exit(REFUSED)
    # Only the holder of the other end keeps this pipe open: init sees its launcher's death even if it came first.
    alive, held = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(held)
        os._exit(_be_init(spec, fd, alive))
    os.close(fd)  # so that the guest's end of the socket is the only one
    retire()
    os._exit(launcher.watch(parent, init))


def enter(spec: JailSpec) -> None:
    """Put this process into the jail, all but its PID, which only children can change.

    The order: no_new_privs as soon as it can be, it costs nothing and holds for all that follows. The root is built
    with the host's rights. The inner namespaces come after it (locked mounts, see above), and ids last, because they
    end those rights.
    """
    proc = userns.own_proc()  # while there is a /proc: the id maps are written through it when there is none
    privileged = lay_out_root(spec)
    with layer("pivot_root", "let the container mount (CAP_SYS_ADMIN, seccomp, AppArmor)"):
        root_fs.enter()
    userns.enter_guests(spec.uid_base, spec.uid_count, proc, privileged=privileged)
    os.close(proc)
    with layer("hostname"):
        kernel.set_hostname(HOSTNAME)
    with layer("capabilities"):
        kernel.bound_capabilities(KEPT)


def lay_out_root(spec: JailSpec) -> bool:
    """The first half of `enter`, up to a root that is ready in an own mount namespace. Returns whether the host's
    rights were there for it; without them it is in a user namespace of its own, which has the range of ids."""
    privileged = userns.become_privileged(spec.uid_base, spec.uid_count)
    with layer("no_new_privs"):  # not before newuidmap has run, which is set-uid
        kernel.no_new_privileges()
    if (privileged or spec.uid_base is not None) and (hidden := root_fs.unreadable(spec.python)):
        raise IsolationError(f"files: calls run as other users and cannot read {hidden}; chmod -R o+rX it")
    with layer("mount namespace", "grant CAP_SYS_ADMIN"):
        kernel.unshare(kernel.CLONE_NEWNS)
    with layer("read-only root", "let the container mount (CAP_SYS_ADMIN, seccomp, AppArmor)"):
        root_fs.lay_out(spec)
    return privileged


def _be_init(spec: JailSpec, fd: int, alive: int) -> int:
    """PID 1: start the guest, reap whatever is orphaned, and end with the guest, which ends everything."""
    kernel.die_with_parent()
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)  # end of file: the launcher is gone already, and its death signal with it
        return 1
    except BlockingIOError:
        pass
    guest = os.fork()
    if guest == 0:
        launcher.become_guest(spec, fd)
    launcher.close_all_but()
    retire()
    return launcher.reap(guest)


def retire() -> None:
    """From here on this process only waits. Its memory still holds the environment that the server gave it."""
    kernel.drop_capabilities()
    kernel.hide_memory()


if __name__ == "__main__":
    main()
