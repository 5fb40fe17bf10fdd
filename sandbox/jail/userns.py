"""User namespaces and their id maps: one id for anyone, a range for those whom the kernel lets write one.

A map is one line, `inside outside count`. The single map of an ordinary user may be written from within; a range only
from outside, by a process with CAP_SETUID and CAP_SETGID there.
"""

from __future__ import annotations

import os

from sandbox.errors import IsolationError
from sandbox.jail import kernel

NOBODY = 65_534


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
        number = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1])
    if number:
        raise OSError(number, f"writing the id map {mapped!r}: {os.strerror(number)}")


def become_first_id(*, privileged: bool) -> None:
    """Be id 0 of the new namespace. Groups first: without the host's privileges they stay, as the kernel wants it."""
    if privileged:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


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
