"""User namespaces and their id maps: one id for anyone, a range for those whom the kernel lets write one.

A map is one line, `inside outside count`. The single map of an ordinary user may be written from within; a range only
from outside, by a process with CAP_SETUID and CAP_SETGID there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sandbox.errors import IsolationError
from sandbox.jail import kernel

NOBODY = 65_534
ID_MAP_REMEDY = "raise user.max_user_namespaces, or give the container more ids"
# The user namespace comes with the others, so that it owns them. No cgroup namespace: it only changes what /proc and
# /sys show, and neither is there. No time namespace: clocks are not secret.
INNER = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def own_proc() -> int:
    """A handle on this process's folder in /proc, good for as long as it is held, mounted or not."""
    return os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)


def become_root() -> None:
    """As an ordinary user: a user namespace in which we may mount. Groups cannot be changed in it, by kernel rule."""
    uid, gid, proc = os.geteuid(), os.getegid(), own_proc()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("gid_map", f"0 {gid} 1"), ("uid_map", f"0 {uid} 1")):
        _write(proc, name, text)
    os.close(proc)


def id_map(uid_base: int | None, uid_count: int, proc: int) -> str:
    """The range, or one id: nobody's where it exists, so that not even the owner of the host's files is inside."""
    if uid_base is not None:
        return f"0 {uid_base} {uid_count}"
    for outside in (NOBODY, 0):
        if all(_exists(proc, name, outside) for name in ("uid_map", "gid_map")):
            return f"0 {outside} 1"
    raise IsolationError("user namespace: expected id 65534 or 0 to exist in this container, but neither does")


def enter(flags: int, mapped: str, proc: int) -> None:
    """Unshare a user namespace, mapped as said, and all of `flags` in it. `proc` is from `own_proc`."""
    entered, enter = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(enter)
        os._exit(_write_maps(proc, mapped) if os.read(entered, 1) else 0)
    os.close(entered)
    try:
        kernel.unshare(kernel.CLONE_NEWUSER | flags)
        os.write(enter, b".")
    finally:
        os.close(enter)
        number = kernel.exit_status(mapper)
    if number:
        raise OSError(number, f"writing the id map {mapped!r}: {os.strerror(number)}")


def become_first_id(*, privileged: bool) -> None:
    """Be id 0 of the new namespace. Groups first: without the host's privileges they stay, as the kernel wants it."""
    if privileged:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def become_privileged() -> bool:
    """Have the rights to mount: those that this process has on the host, or those of a user namespace of its own.
    Returns whether they are the host's. A "host" may itself be a user namespace, with fewer ids and rights."""
    if kernel.CAP_SYS_ADMIN in kernel.effective_capabilities():
        return True
    with layer("user namespace", "enable unprivileged user namespaces, or start as root"):
        become_root()
    return False


def enter_guests(uid_base: int | None, uid_count: int, proc: int, *, privileged: bool) -> None:
    """Enter the guest's namespaces and be their first id. `proc` is from `own_proc`, `privileged` from
    `become_privileged`."""
    with layer("namespaces and id map", ID_MAP_REMEDY):
        enter(INNER, id_map(uid_base, uid_count, proc), proc)
    with layer("user ids"):
        become_first_id(privileged=privileged)


@contextmanager
def layer(name: str, remedy: str = "") -> Iterator[None]:
    """What the kernel refuses in here is refused by this name."""
    try:
        yield
    except OSError as why:
        raise IsolationError(f"{name}: the kernel refused ({why})" + (f"; {remedy}" if remedy else "")) from None


def _write_maps(proc: int, mapped: str) -> int:
    """0, or the error's number, as an exit status."""
    try:
        for name in ("gid_map", "uid_map"):
            _write(proc, name, mapped)
    except OSError as why:
        return why.errno or 1
    return 0


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
