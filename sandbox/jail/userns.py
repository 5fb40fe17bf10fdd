"""User namespaces and their id maps: one id for anyone, a range for those whom the kernel lets write one.

A map has lines `inside outside count`. The single map of an ordinary user may be written from within; a range only from
outside, by a process with CAP_SETUID and CAP_SETGID there: us, or newuidmap(1), which is set-uid and gives ordinary
users the ids that /etc/subuid and /etc/subgid list for them. With no_new_privs it gives nothing.
"""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product

from sandbox.errors import IsolationError
from sandbox.jail import kernel

NOBODY = 65_534
ID_MAP_REMEDY = "raise user.max_user_namespaces, or give the container more ids"
# The user namespace comes with the others, so that it owns them. No cgroup namespace: it only changes what /proc and
# /sys show, and neither is there. No time namespace: clocks are not secret.
JAIL_NAMESPACES = (
    kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)
RANGE = 1
"""Where a range begins in the namespace of `become_root`; id 0 is who we were."""
MAPPERS = {"gid_map": "newgidmap", "uid_map": "newuidmap"}
SUBORDINATE = "/etc/subuid", "/etc/subgid"


def open_proc_self() -> int:
    """A handle on this process's folder in /proc, good for as long as it is held, mounted or not."""
    return os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)


def enter_as_root(uid_base: int | None = None, uid_count: int = 0) -> None:
    """As an ordinary user: a user namespace in which we may mount. It has the range if there is one; without one,
    groups cannot be changed in it, by kernel rule."""
    uid, gid, proc = os.geteuid(), os.getegid(), open_proc_self()
    if uid_base is None:
        kernel.unshare(kernel.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("gid_map", f"0 {gid} 1"), ("uid_map", f"0 {uid} 1")):
            _write(proc, name, text)
    else:
        maps = {
            name: f"0 {own} 1\n{RANGE} {uid_base} {uid_count}\n" for name, own in (("gid_map", gid), ("uid_map", uid))
        }
        _unshare(kernel.CLONE_NEWUSER, lambda: _write_range(proc, maps), f"the ids from {uid_base}")
    os.close(proc)


def may_have(uid_base: int, uid_count: int) -> bool:
    """Whether `become_root` gets this range, tried in a child."""
    child = os.fork()
    if child == 0:
        try:
            enter_as_root(uid_base, uid_count)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def subordinate() -> tuple[int, int]:
    """The largest run of ids that belong to this user as uids and as gids (subuid(5)): first, and one past the last.
    Empty if there is none."""
    owners = [str(os.geteuid())]
    with suppress(KeyError):
        owners.append(pwd.getpwuid(os.geteuid()).pw_name)
    uids, gids = (_ranges_of(owners, path) for path in SUBORDINATE)
    common = [(max(u[0], g[0]), min(u[1], g[1])) for u, g in product(uids, gids)]
    return max(((0, 0), *common), key=lambda run: run[1] - run[0])


def id_map(uid_base: int | None, uid_count: int, proc: int) -> str:
    """The range, or one id: nobody's where it exists, so that not even the owner of the host's files is inside."""
    if uid_base is not None:
        return f"0 {uid_base} {uid_count}"
    for outside in (NOBODY, 0):
        if all(_exists(proc, name, outside) for name in ("uid_map", "gid_map")):
            return f"0 {outside} 1"
    raise IsolationError("user namespace: expected id 65534 or 0 to exist in this container, but neither does")


def unshare_mapped(flags: int, mapped: str, proc: int) -> None:
    """Unshare a user namespace, mapped as said, and all of `flags` in it. `proc` is from `own_proc`."""
    _unshare(kernel.CLONE_NEWUSER | flags, lambda: _write_maps(proc, dict.fromkeys(MAPPERS, mapped)), repr(mapped))


def _unshare(flags: int, write: Callable[[], None], what: str) -> None:
    """Unshare a user namespace whose maps a child, forked before, writes from outside."""
    unshared_r, unshared_w = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(unshared_w)
        os._exit(_error_of(write) if os.read(unshared_r, 1) else 0)
    os.close(unshared_r)
    try:
        kernel.unshare(flags)
        os.write(unshared_w, b".")
    finally:
        os.close(unshared_w)
        number = kernel.exit_status(mapper)
    if number:
        raise OSError(number, f"writing the id map, {what}: {os.strerror(number)}")


def become_uid_0(*, privileged: bool) -> None:
    """Be id 0 of the new namespace. Groups first: without the host's privileges they stay, as the kernel wants it."""
    if privileged:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def become_privileged(uid_base: int | None = None, uid_count: int = 0) -> bool:
    """Have the rights to mount: those that this process has on the host, or those of a user namespace of its own, which
    has the range of ids. Returns whether they are the host's. A "host" may itself be a user namespace, with fewer ids
    and rights."""
    if kernel.CAP_SYS_ADMIN in kernel.effective_capabilities():
        return True
    with layer_errors("user namespace", "enable unprivileged user namespaces, or start as root"):
        enter_as_root(uid_base, uid_count)
    return False


def inner_map(uid_base: int | None, uid_count: int, proc: int, *, privileged: bool) -> str:
    """The id map of the guest's user namespace. The range is there under the host's numbers or, in a namespace that has
    no more ids than ours and the range, from `RANGE` on."""
    return id_map(uid_base if privileged or uid_base is None else RANGE, uid_count, proc)


def enter_guests(uid_base: int | None, uid_count: int, proc: int, *, privileged: bool) -> None:
    """Enter the guest's namespaces and be their first id. `proc` is from `own_proc`, `privileged` from
    `become_privileged` with the same range."""
    with layer_errors("namespaces and id map", ID_MAP_REMEDY):
        unshare_mapped(JAIL_NAMESPACES, inner_map(uid_base, uid_count, proc, privileged=privileged), proc)
    with layer_errors("user ids"):
        become_uid_0(privileged=privileged or uid_base is not None)


@contextmanager
def layer_errors(name: str, remedy: str = "") -> Iterator[None]:
    """What the kernel refuses in here is refused by this name."""
    try:
        yield
    except OSError as why:
        raise IsolationError(f"{name}: the kernel refused ({why})" + (f"; {remedy}" if remedy else "")) from None


def _error_of(write: Callable[[], None]) -> int:
    """0, or the error's number, as an exit status."""
    try:
        write()
    except OSError as why:
        return why.errno or 1
    return 0


def _write_maps(proc: int, maps: dict[str, str]) -> None:
    for name, text in maps.items():
        _write(proc, name, text)


def _write_range(proc: int, maps: dict[str, str]) -> None:
    """Of our parent, by our own privilege or by newuidmap."""
    if kernel.effective_capabilities() >= {kernel.CAP_SETUID, kernel.CAP_SETGID}:
        _write_maps(proc, maps)
        return
    for name, text in maps.items():
        argv = [MAPPERS[name], str(os.getppid()), *text.split()]
        if subprocess.run(argv, capture_output=True, check=False).returncode:
            raise PermissionError(errno.EPERM, argv[0])


def _ranges_of(owners: list[str], path: str) -> list[tuple[int, int]]:
    """What a file of subordinate ids lists for a user: first, and one past the last."""
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                owner, _, rest = line.strip().partition(":")
                first, _, count = rest.partition(":")
                if owner in owners and first.isdecimal() and count.isdecimal():
                    found.append((int(first), int(first) + int(count)))
    except OSError:
        return []
    return found


def _write(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _exists(proc: int, name: str, number: int) -> bool:
    with open(os.open(name, os.O_RDONLY, dir_fd=proc), encoding="ascii") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    return any(first <= number < first + count for first, _, count in extents)
