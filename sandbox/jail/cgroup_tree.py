"""Control groups: the kernel counts and bounds what a whole call uses, however many processes it starts.

    where the server runs / rstar-sandbox-PID-RANDOM / 0, 1, 2 ...      a group per slot, made once, used by many calls
                                                     / zygotes          version 2: those that fork into them

- Version 1 is three hierarchies (memory, pids, and cpuacct where there is one), version 2 is one; `CgroupTree` hides
  it.
- A tree belongs to one family of one executor, which holds a lock on it (flock(2)) for as long as it lives. A tree that
  nobody has locked is left over from an executor that was killed, and whoever plants the next tree removes it.
- Groups are made below the one the server runs in, so that the operator's limits on the server hold for its calls.
- Where version 1 divides the cores, a tree has one group more, `Idle`, for threads of calls that shall have only the
  cores that nobody else wants. SCHED_IDLE alone does not say that much: outside of containers the kernel divides the
  cores between sessions first (sched_autogroup_enabled), of which a jail is one, and a call may begin others.
- Version 2 has no processes beside groups that are bounded, so there the server and all others in its group move to one
  beside the tree (`OWN`): in a container, or where systemd has left the group to us, and nowhere else.
- A call enters by a file that was opened out here (`CgroupTree.doors`): the kernel goes by the rights of the opener. In
  version 2 that would have it wait for every fork on the machine, so there a zygote forks straight into the group
  (clone3(2)) where it can. Nothing in a jail sees a file system of groups.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from sandbox.errors import IsolationError
from sandbox.jail import kernel
from sandbox.jail.cgroup import V1, V2, CgroupVersion, SlotCgroup, kill_members

log = logging.getLogger(__name__)

PREFIX = "rstar-sandbox-"
SERVER_LEAF = "rstar-sandbox"
ZYGOTES = "zygotes"
KILL_TIMEOUT_S = 5.0
"""For killed processes to be gone from a group; they need milliseconds, and more only on a swamped machine."""
MOST_DOORS = 3
FDS_PER_SLOT = 8
"""Descriptors that a slot takes, but for rare calls: of an executor those of its group, of a zygote its doors and the
files of the call in it."""
RESERVED_FDS = 256
"""Descriptors that a process needs for all else."""
_TRIES = 5
_NEEDED = {"memory", "pids"}
"""Of version 2. It counts CPU time in every group."""


def max_slots_for_fds() -> int:
    """For how many slots, of all families, an executor has descriptors."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if most == resource.RLIM_INFINITY else max(0, most - RESERVED_FDS) // FDS_PER_SLOT


def fds_for_slots(slots: int) -> int:
    """How many descriptors an executor needs for so many slots."""
    return FDS_PER_SLOT * slots + RESERVED_FDS


def raise_fd_limit_for(slots: int) -> None:
    """Raise this process's limit, which its zygotes inherit, to what so many slots take. Raises `IsolationError` where
    that is more than it may be."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FDS_PER_SLOT * slots
    if most != resource.RLIM_INFINITY and wanted > most:
        raise IsolationError(f"cgroups: {slots} slots need {wanted} descriptors, got {most}; raise ulimit -n")
    wanted += RESERVED_FDS
    if soft != resource.RLIM_INFINITY and wanted > soft:
        wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class CgroupTree:
    """The groups of one family. Raises `IsolationError` where this process may not make any."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}  # by the name of the hierarchy
        self._locks: dict[str, int] = {}  # by folder: hierarchies may be mounted together
        self._cgroups: dict[int, SlotCgroup] = {}
        self.idle: IdleCgroup | None = None
        self._zygote_uid = -1
        self._can_clone_into = False
        try:
            self._version, homes = _find_version()
            for name, home in homes.items():
                self._folders[name] = self._create_in(home)
            self.cgroup(0)  # if one can be had, others can
            if self._version is V1:
                self.idle = IdleCgroup.create(homes)
        except OSError as why:
            self.close()
            raise IsolationError(f"cgroups: {why}") from None

    def __str__(self) -> str:
        return f"{self._version.name}, {', '.join(self._locks)}"

    def cgroup(self, number: int) -> SlotCgroup:
        """That of a slot, made when it is first asked for: most slots are there for storms. Raises `OSError`."""
        if number not in self._cgroups:
            self._cgroups[number] = self._create_slot_cgroup(number)
        return self._cgroups[number]

    def allow_clone_into(self, pid: int, uid: int) -> None:
        """Let a zygote (as processes and users are numbered out here), and those forked from it, fork straight into the
        groups, where that is possible.

        The kernel has it write to the files of the target and of what that has in common with its own group.
        """
        self._can_clone_into = False
        if self._version is not V2 or not kernel.has_clone3():
            return
        (folder,) = self._locks
        try:
            self._zygote_uid = uid
            for place in (folder, *(f"{folder}/{number}" for number in self._cgroups)):
                self._chown_procs_file(place)
            os.makedirs(f"{folder}/{ZYGOTES}", exist_ok=True)
            _write(f"{folder}/{ZYGOTES}/{V2.door}", str(pid))
            os.close(kernel.open_detached(f"{folder}/0"))
        except OSError as why:
            log.info("no clone3 into groups, which costs calls time: %s", why)
        else:
            self._can_clone_into = True

    def open_directories(self, number: int) -> Iterator[int]:
        """A descriptor of the group of a slot for clone3(2), if zygotes may fork into it. The caller closes it."""
        self.cgroup(number)
        if self._can_clone_into:
            (folder,) = self._locks
            yield kernel.open_detached(f"{folder}/{number}")

    def open_procs_files(self, number: int) -> Iterator[int]:
        """Descriptors to which a process writes "0" to enter the group of a slot. The caller closes them."""
        self.cgroup(number)
        for folder in self._locks:
            yield _open(f"{folder}/{number}/{self._version.door}", os.O_WRONLY)

    def close(self) -> None:
        """Kill what is left in the groups, and remove them. Idempotent; what cannot be removed now, the next tree
        sweeps up."""
        for cgroup in self._cgroups.values():
            cgroup.close()
        if self.idle is not None:
            self.idle.close()
            self.idle = None
        for folder, lock in self._locks.items():
            _remove(folder)
            os.close(lock)
        self._cgroups = {}
        self._locks = {}

    def _create_in(self, home: str) -> str:
        for folder in self._locks:
            if os.path.dirname(folder) == home:
                return folder
        _remove_stale(home)
        folder, lock = _create_locked(home)
        self._locks[folder] = lock
        if self._version is V2:
            _enable_controllers(folder)
        return folder

    def _create_slot_cgroup(self, number: int) -> SlotCgroup:
        for folder in self._locks:
            os.makedirs(f"{folder}/{number}", exist_ok=True)  # should this fail half-way, it is tried again
            if self._zygote_uid >= 0:
                self._chown_procs_file(f"{folder}/{number}")
        return SlotCgroup(self._version, {name: f"{folder}/{number}" for name, folder in self._folders.items()})

    def _chown_procs_file(self, place: str) -> None:
        os.chown(f"{place}/{V2.door}", self._zygote_uid, -1)


class IdleCgroup:
    """A group whose threads give way to all others of the group around it, `home`, where the server is."""

    def __init__(self, home: str) -> None:
        _remove_stale(home)
        self._folder, self._lock = _create_locked(home)
        try:
            _write(f"{self._folder}/cpu.idle", "1")
        except OSError:  # before Linux 5.15
            _write(f"{self._folder}/cpu.shares", "2")
        self._inside = _open(f"{self._folder}/{V1.door}", os.O_WRONLY)
        self._outside = _open(f"{home}/{V1.door}", os.O_WRONLY)

    @classmethod
    def create(cls, homes: dict[str, str]) -> IdleCgroup | None:
        """None where there is no such hierarchy, it may not be written to, or slots have their groups in it."""
        home = own_cgroup_dirs().get("cpu")
        if home is None or home in homes.values():
            return None
        try:
            return cls(home)
        except OSError as why:
            log.info("no group for what may wait: %s", why)
            return None

    def move(self, tid: int, *, inside: bool) -> None:
        """A thread, and what it starts from now on. Raises `OSError`."""
        os.write(self._inside if inside else self._outside, str(tid).encode())

    def close(self) -> None:
        os.close(self._inside)
        os.close(self._outside)
        _remove(self._folder)
        os.close(self._lock)


def _find_version() -> tuple[CgroupVersion, dict[str, str]]:
    """The dialect, and where this process may make groups in each hierarchy."""
    homes = own_cgroup_dirs()
    lacking = []
    try:
        return V2, {"": _find_v2_parent(homes)}
    except OSError as why:
        lacking.append(f"{V2.name}: {why}")
    missing = [name for name in (V1.memory, V1.pids) if name not in homes]
    if not missing:
        return V1, {name: homes[name] for name in (V1.memory, V1.pids, V1.cpu_time) if name in homes}
    lacking.append(f"{V1.name}: no hierarchy of {' or '.join(missing)} is mounted")
    raise IsolationError(f"cgroups: {'; '.join(lacking)}")


def _find_v2_parent(homes: dict[str, str]) -> str:
    """The group of version 2 in which bounded ones may be made; made so if need be. Raises `OSError`."""
    if "" not in homes:
        raise OSError("it is not mounted")
    home = homes[""]
    if os.path.basename(home) == SERVER_LEAF:
        home = os.path.dirname(home)
    if missing := sorted(_NEEDED.difference(_read(f"{home}/cgroup.controllers").split())):
        raise OSError(f"{home} has no {' or '.join(missing)}")
    if _NEEDED.difference(_read(f"{home}/cgroup.subtree_control").split()):
        try:
            _enable_controllers(home)
        except OSError as why:
            if why.errno != errno.EBUSY:
                raise
            _move_processes_to_leaf(home)
            _enable_controllers(home)
    return home


def _enable_controllers(folder: str) -> None:
    """Let groups in it be bounded."""
    _write(f"{folder}/cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(_NEEDED)))


def _move_processes_to_leaf(home: str) -> None:
    """Move whoever is in a group to one below. Only where all of it is ours: it is the whole of what our namespace of
    groups shows, or systemd says so (systemd.resource-control(5), Delegate=)."""
    if ("", "/") not in _own_paths() and not _is_delegated(home):
        raise OSError(f"{home} is not ours to divide; run in a container, or under systemd with Delegate=yes")
    os.makedirs(f"{home}/{SERVER_LEAF}", exist_ok=True)
    for _ in range(_TRIES):  # whoever is just being forked is there the next time
        members = [pid for pid in _read(f"{home}/cgroup.procs").split() if pid != "0"]  # 0: of another PID namespace
        for pid in members:
            with suppress(ProcessLookupError):
                _write(f"{home}/{SERVER_LEAF}/cgroup.procs", pid)
        if not members:
            return


def _is_delegated(folder: str) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def own_cgroup_dirs() -> dict[str, str]:
    """The folder of the group this process is in, for each controller of version 1, and for version 2 under ""."""
    folders: dict[str, str] = {}
    paths = dict(_own_paths())
    for root, place, kind, options in _mounts():
        names = [""] if kind == "cgroup2" else [name for name in options.split(",") if name in paths]
        for name in names if kind in ("cgroup", "cgroup2") else []:
            below = os.path.relpath(paths.get(name, "/"), root)
            inside = not below.startswith("..")  # else what is mounted is another part of the hierarchy than ours
            folders.setdefault(name, os.path.normpath(f"{place}/{below}") if inside else place)
    return folders


def _own_paths() -> Iterator[tuple[str, str]]:
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _number, names, path = line.rstrip("\n").split(":", 2)
            for name in names.split(","):
                yield name, path


def _mounts() -> Iterator[tuple[str, str, str, str]]:
    """Root, mount point, type and the file system's options, of every mount (proc_pid_mountinfo(5))."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            mount, _, system = line.partition(" - ")
            root, place = mount.split()[3:5]
            kind, _source, options = system.split()[:3]
            yield root, place, kind, options


def _create_locked(home: str) -> tuple[str, int]:
    """A new group and a lock on it, both ours."""
    for _ in range(_TRIES):
        folder = f"{home}/{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        os.mkdir(folder)
        with suppress(FileNotFoundError):
            lock = _open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(folder):
                return folder, lock
            os.close(lock)  # a sweep came between the making and the lock
    raise OSError(errno.EAGAIN, "others remove what is made here", home)


def _remove_stale(home: str) -> None:
    """Remove the trees of executors that have ended without doing so."""
    for name in os.listdir(home):
        if not name.startswith(PREFIX):
            continue
        with suppress(FileNotFoundError):
            lock = _open(f"{home}/{name}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(f"{home}/{name}")
            except BlockingIOError:
                pass  # its executor lives
            finally:
                os.close(lock)


def _remove(folder: str) -> None:
    """A tree with all in it, as far as that is possible in a little while."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    for place, _, _ in os.walk(folder, topdown=False):
        while True:
            try:
                os.rmdir(place)
                break
            except FileNotFoundError:
                break
            except OSError as why:
                if why.errno != errno.EBUSY or time.monotonic() > deadline:
                    return  # another user's, or somebody in it will not die
                kill_members(place)
                time.sleep(0.005)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    fd = _open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)
