"""User namespaces and their id maps (user_namespaces(7)).

Each line of a map is `inside outside count`. An ordinary user may map only its own id. To map a range of ids, a process
must be outside of the new namespace, and must have CAP_SETUID and CAP_SETGID outside. There are two ways:

    if this process has these capabilities    a child of this process writes the maps
    otherwise                                 the programs newuidmap(1) and newgidmap(1) write the maps

The two programs are set-uid: they run as root. They map only ids that /etc/subuid and /etc/subgid list for the user.
In a process with no_new_privs they do not become root, and fail.

A range (`uid_base`, `uid_count`) is a range of uids, and also of gids with the same numbers.
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
"""The usual id of the user nobody, who owns no files."""
ID_MAP_REMEDY = "raise user.max_user_namespaces, or give the container more ids"
JAIL_NAMESPACES = (
    kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)
"""Namespaces of a jail. They are created together with the jail's user namespace, so that the user namespace owns them.
A cgroup namespace is not needed: it changes only /proc and /sys, which a jail does not have. A time namespace is not
needed, because clocks are not secret."""
RANGE_START_INSIDE = 1
"""First id of the range as it is inside the namespace of `enter_as_root`. There, id 0 is the user who started the
process."""
MAPPING_PROGRAMS = {"gid_map": "newgidmap", "uid_map": "newuidmap"}
"""Program that writes each of the two id maps in /proc/PID."""
ID_MAP_FILES = tuple(MAPPING_PROGRAMS)
SUBORDINATE_ID_FILES = "/etc/subuid", "/etc/subgid"


def open_proc_self() -> int:
    """Return a descriptor of this process's directory in /proc.

    The descriptor stays usable when /proc is unmounted. It refers to the directory of this process even in a child
    process, because the link /proc/self is resolved here.
    """
    return os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)


def become_privileged(uid_base: int | None = None, uid_count: int = 0) -> bool:
    """Obtain the right to mount. If this process has CAP_SYS_ADMIN, it has this right already. Otherwise it calls
    `enter_as_root`.

    Returns True in the first case: this process has privileges on the host. The "host" is the user namespace in which
    this process was started. In a container, this may be a namespace with fewer ids than the machine.
    """
    if kernel.CAP_SYS_ADMIN in kernel.effective_capabilities():
        return True
    with isolation_errors("user namespace", "enable unprivileged user namespaces, or start as root"):
        enter_as_root(uid_base, uid_count)
    return False


def enter_as_root(uid_base: int | None = None, uid_count: int = 0) -> None:
    """Create and enter a user namespace in which this process is root and may mount. If a range of ids is given, the
    namespace has these ids as well.

    Without a range, no process in the namespace can change its groups: setgroups(2) fails.
    """
    uid, gid, proc_self = os.geteuid(), os.getegid(), open_proc_self()
    if uid_base is None:
        kernel.unshare(kernel.CLONE_NEWUSER)
        # First `setgroups`: until "deny" is written, an ordinary user may not write gid_map (user_namespaces(7)).
        _write_maps(proc_self, {"setgroups": "deny", "gid_map": f"0 {gid} 1", "uid_map": f"0 {uid} 1"})
    else:
        id_range = f"{RANGE_START_INSIDE} {uid_base} {uid_count}"
        maps = {name: f"0 {own} 1\n{id_range}\n" for name, own in (("gid_map", gid), ("uid_map", uid))}
        _unshare(kernel.CLONE_NEWUSER, lambda: _write_range(proc_self, maps), f"the ids from {uid_base}")
    os.close(proc_self)


def can_map_range(uid_base: int, uid_count: int) -> bool:
    """Return whether `enter_as_root` can map this range, by trying it in a child process."""
    child = os.fork()
    if child == 0:
        try:
            enter_as_root(uid_base, uid_count)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def subordinate_ids() -> tuple[int, int]:
    """Return (first id, last id + 1) of the largest run of ids that this user has both as uids and as gids (subuid(5)).

    Returns (0, 0) if there is none.
    """
    owners = [str(os.geteuid())]
    with suppress(KeyError):
        owners.append(pwd.getpwuid(os.geteuid()).pw_name)
    uids, gids = (_listed_ranges(path, owners) for path in SUBORDINATE_ID_FILES)
    common = [(max(u[0], g[0]), min(u[1], g[1])) for u, g in product(uids, gids)]
    return max(((0, 0), *common), key=lambda run: run[1] - run[0])


def zygote_id_map(uid_base: int | None, uid_count: int, proc_self: int, *, privileged: bool) -> str:
    """Return the id map of the zygote's user namespace.

    If `privileged`, the outside ids of the map are ids of the host. Otherwise they are ids in the namespace of
    `enter_as_root`, where the range starts at `RANGE_START_INSIDE`.
    """
    if uid_base is not None and not privileged:
        uid_base = RANGE_START_INSIDE
    return id_map(uid_base, uid_count, proc_self)


def id_map(uid_base: int | None, uid_count: int, proc_self: int) -> str:
    """Return an id map. With a range, the ids inside are 0 to `uid_count` - 1, and stand for the ids of the range.

    Without a range, the only id inside is 0. It stands for `NOBODY`, and not for the host's root, who owns the host's
    files. In a container that has no id `NOBODY`, it stands for id 0 of the container.
    """
    if uid_base is not None:
        return f"0 {uid_base} {uid_count}"
    for outside in (NOBODY, 0):
        if all(_id_exists(proc_self, file, outside) for file in ID_MAP_FILES):
            return f"0 {outside} 1"
    raise IsolationError("user namespace: expected id 65534 or 0 to exist in this container, but neither does")


def enter_jail_namespaces(uid_base: int | None, uid_count: int, proc_self: int, *, privileged: bool) -> None:
    """Create and enter the zygote's namespaces, and become id 0 of its user namespace.

    `proc_self` is the result of `open_proc_self`. `privileged` is the result of `become_privileged` for the same range.
    """
    with isolation_errors("namespaces and id map", ID_MAP_REMEDY):
        unshare_mapped(JAIL_NAMESPACES, zygote_id_map(uid_base, uid_count, proc_self, privileged=privileged), proc_self)
    with isolation_errors("user ids"):
        become_uid_0(can_change_groups=privileged or uid_base is not None)


def unshare_mapped(flags: int, mapping: str, proc_self: int) -> None:
    """Create and enter a user namespace with this id map, and the namespaces of `flags`, which belong to it."""
    maps = dict.fromkeys(ID_MAP_FILES, mapping)
    _unshare(kernel.CLONE_NEWUSER | flags, lambda: _write_maps(proc_self, maps), repr(mapping))


def become_uid_0(*, can_change_groups: bool) -> None:
    """Become id 0 of a new user namespace, and drop all groups if that is allowed (see `enter_as_root`)."""
    if can_change_groups:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


@contextmanager
def isolation_errors(layer: str, remedy: str = "") -> Iterator[None]:
    """Turn an `OSError` in the block into an `IsolationError` that names the isolation layer and the remedy."""
    try:
        yield
    except OSError as error:
        raise IsolationError(f"{layer}: the kernel refused ({error})" + (f"; {remedy}" if remedy else "")) from None


def _unshare(flags: int, write_maps: Callable[[], None], description: str) -> None:
    """Unshare a user namespace. A child process stays outside, and writes the maps once this process is inside."""
    unshared_r, unshared_w = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(unshared_w)
        # The exit status is the errno: every errno is less than 256. No byte: this process could not unshare.
        os._exit(_errno_of(write_maps) if os.read(unshared_r, 1) else 0)
    os.close(unshared_r)
    try:
        kernel.unshare(flags)
        os.write(unshared_w, b".")
    finally:
        os.close(unshared_w)
        number = kernel.wait_for_exit(mapper)
    if number:
        raise OSError(number, f"writing the id map, {description}: {os.strerror(number)}")


def _errno_of(action: Callable[[], None]) -> int:
    """Return the errno that `action` failed with, as an exit status, or 0."""
    try:
        action()
    except OSError as error:
        return error.errno or 1
    return 0


def _write_maps(proc_self: int, maps: dict[str, str]) -> None:
    for name, text in maps.items():
        _write(proc_self, name, text)


def _write_range(proc_self: int, maps: dict[str, str]) -> None:
    """Write the maps of the parent process, with this process's own privileges or else by newuidmap."""
    if kernel.effective_capabilities() >= {kernel.CAP_SETUID, kernel.CAP_SETGID}:
        _write_maps(proc_self, maps)
        return
    for name, text in maps.items():
        argv = [MAPPING_PROGRAMS[name], str(os.getppid()), *text.split()]
        # The parent process gets only an errno from this process (`_unshare`). newuidmap gives a text and no errno, so
        # EPERM stands for each of its errors.
        if subprocess.run(argv, capture_output=True, check=False).returncode:
            raise PermissionError(errno.EPERM, argv[0])


def _listed_ranges(path: str, owners: list[str]) -> list[tuple[int, int]]:
    """Return the ranges (first, last + 1) that a file of subordinate ids lists for any of these owners."""
    ranges = []
    with suppress(OSError), open(path, encoding="utf-8") as file:
        for line in file:
            owner, _, rest = line.strip().partition(":")
            first, _, count = rest.partition(":")
            if owner in owners and first.isdecimal() and count.isdecimal():
                ranges.append((int(first), int(first) + int(count)))
    return ranges


def _write(proc_self: int, name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY, dir_fd=proc_self)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _id_exists(proc_self: int, map_file: str, number: int) -> bool:
    """Return whether an id exists in the user namespace of this process: whether a line of its map (`inside outside
    count`) has the id among its inside ids."""
    with open(os.open(map_file, os.O_RDONLY, dir_fd=proc_self), encoding="ascii") as lines:
        extents = [tuple(map(int, line.split())) for line in lines]
    return any(first <= number < first + count for first, _, count in extents)
