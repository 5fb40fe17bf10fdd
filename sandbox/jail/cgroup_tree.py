"""The cgroups of one zygote pool: created below the server's own cgroup, and removed with the pool.

    the server's cgroup
        rstar-sandbox-PID-RANDOM        the pool's top directory
            0, 1, 2 ...                 one cgroup per slot, created once and reused by many calls
            zygotes                     version 2: the zygotes
        rstar-sandbox                   version 2: the server, and all other processes that were in its cgroup
        rstar-sandbox-PID-RANDOM        version 1, hierarchy cpu: threads that run only on idle cores (`IdleCgroup`)

- Version 1 has several hierarchies (memory, pids, and cpuacct if mounted), version 2 has one. `CgroupTree` hides this
  difference.
- The executor holds a lock (flock(2)) on its tree. A tree without a lock is left over from an executor that was killed,
  and is removed when the next tree is created.
- The cgroups are below the server's own, so that the operator's limits on the server apply to its calls.
- Version 2 allows no processes in a cgroup whose children have limits. So all processes of the server's cgroup are
  moved to a child cgroup. This is done only in a container, or if systemd has delegated the cgroup to the server.
- A jail has no cgroup file system. A call enters its cgroup by a file that was opened outside of the jail
  (`open_procs_files`). This works because the kernel checks the permissions of the process that opened the file.
- In version 2, a process that enters a cgroup waits until all forks that are in progress on the machine have ended. So
  a zygote (the interpreter in the jail that forks the calls) forks a call directly into the cgroup (clone3(2)) where
  this is possible.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from sandbox import machine
from sandbox.errors import IsolationError
from sandbox.jail import kernel
from sandbox.jail.cgroup import V1, V2, CgroupVersion, SlotCgroup, kill_processes, write_file

log = logging.getLogger(__name__)

PREFIX = "rstar-sandbox-"
SERVER_LEAF, ZYGOTES_LEAF = "rstar-sandbox", "zygotes"
KILL_TIMEOUT_S = 5.0
"""Seconds to wait for killed processes to leave a cgroup. They take milliseconds if the machine is not overloaded."""
FDS_PER_SLOT = 8
"""Descriptors that a process needs for each slot. An executor opens the files of the slot's cgroup; a zygote opens the
cgroup's `enter_file` and the files of the call."""
RESERVED_FDS = 256
"""Descriptors that a process needs for all other purposes."""
SYSTEMCTL_TIMEOUT_S = 10.0
"""Seconds to wait for the user's systemd, which answers in milliseconds if the machine is not overloaded."""
MAX_TRIES = 5
"""Maximum number of tries of an operation that other processes can disturb."""
_V2_CONTROLLERS = {"memory", "pids"}
"""Controllers that version 2 must have. CPU time is counted without a controller."""


def max_slots_for_fds() -> int:
    """Return the number of slots, of all pools of an executor, that its descriptor limit allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else max(0, hard - RESERVED_FDS) // FDS_PER_SLOT


def fds_for_slots(slots: int) -> int:
    """Return the number of descriptors that an executor needs for this number of slots."""
    return FDS_PER_SLOT * slots + RESERVED_FDS


def raise_fd_limit_for(slots: int) -> None:
    """Raise the descriptor limit of this process, which its zygotes inherit. Raises `IsolationError` if the hard limit
    is too low for the slots."""
    limit = machine.raise_fd_limit(fds_for_slots(slots))
    # `RESERVED_FDS` is not required here: if the hard limit is very low, `plan_pools` still plans one slot.
    if limit < (needed := FDS_PER_SLOT * slots):
        raise IsolationError(f"cgroups: {slots} slots need {needed} descriptors, got {limit}; raise ulimit -n")


class CgroupTree:
    """The cgroups of one pool. Raises `IsolationError` if this process may not create any."""

    def __init__(self) -> None:
        self._dirs: dict[str, str] = {}  # hierarchy -> directory
        # Top directory -> descriptor that holds its lock. Hierarchies that are mounted together have one top directory.
        self._top_locks: dict[str, int] = {}
        self._cgroups: dict[int, SlotCgroup] = {}
        self.idle: IdleCgroup | None = None
        self._zygote_uid, self._can_clone_into = -1, False  # until `allow_clone_into`
        try:
            self._version, parents = _find_version()
            for name, parent in parents.items():
                self._dirs[name] = self._create_in(parent)
            self.cgroup(0)  # fail now rather than at the first call
            if self._version is V1:
                self.idle = IdleCgroup.create(parents)
        except OSError as error:
            self.close()
            raise IsolationError(f"cgroups: {error}") from None

    def __str__(self) -> str:
        return f"{self._version.name}, {', '.join(self._top_locks)}"

    def cgroup(self, slot: int) -> SlotCgroup:
        """Return the cgroup of a slot. It is created on first use, since most slots are rarely used. Raises
        `OSError`."""
        if slot not in self._cgroups:
            self._cgroups[slot] = self._create_slot_cgroup(slot)
        return self._cgroups[slot]

    def allow_clone_into(self, pid: int, uid: int) -> None:
        """Allow a zygote and its forks to fork directly into the cgroups (clone3(2)), if the kernel supports it.

        `pid` and `uid` are the ids of the zygote outside of the jail. The kernel requires that the zygote may write to
        the file cgroup.procs of two cgroups: of the target, and of the common ancestor of the target and the zygote's
        own cgroup.
        """
        self._zygote_uid, self._can_clone_into = -1, False
        if self._version is not V2 or not kernel.has_clone3():
            return
        (top,) = self._top_locks  # version 2 has one hierarchy
        try:
            for directory in (top, *(f"{top}/{slot}" for slot in self._cgroups)):
                _chown_procs_file(directory, uid)
            os.makedirs(f"{top}/{ZYGOTES_LEAF}", exist_ok=True)
            write_file(f"{top}/{ZYGOTES_LEAF}/{V2.enter_file}", str(pid))
            os.close(kernel.open_detached_mount(f"{top}/0"))  # fails here if the kernel or a container refuses it
        except OSError as error:
            log.info("cannot clone into cgroups, entering them is slower: %s", error)
        else:
            self._zygote_uid, self._can_clone_into = uid, True

    def open_directories(self, slot: int) -> Iterator[int]:
        """Yield a descriptor of a slot's cgroup for clone3(2), or nothing if zygotes may not use clone3. The caller
        closes the descriptor. As an iterator, it can be sent in the same loop as `open_procs_files`."""
        self.cgroup(slot)
        if self._can_clone_into:
            (top,) = self._top_locks
            yield kernel.open_detached_mount(f"{top}/{slot}")

    def open_procs_files(self, slot: int) -> Iterator[int]:
        """Yield descriptors to which a process writes "0" to enter the cgroup of a slot. The caller closes them."""
        self.cgroup(slot)
        for top in self._top_locks:
            yield _open(f"{top}/{slot}/{self._version.enter_file}", os.O_WRONLY)

    def close(self) -> None:
        """Kill all processes in the cgroups, and remove the cgroups. Idempotent. The next tree removes those that could
        not be removed."""
        for cgroup in self._cgroups.values():
            cgroup.close()
        if self.idle is not None:
            self.idle.close()
            self.idle = None
        for top, lock in self._top_locks.items():
            _remove(top)
            os.close(lock)
        self._cgroups = {}
        self._top_locks = {}

    def _create_in(self, parent: str) -> str:
        for top in self._top_locks:
            if os.path.dirname(top) == parent:
                return top
        _remove_stale(parent)
        top, lock = _create_locked(parent)
        self._top_locks[top] = lock
        if self._version is V2:
            _enable_controllers(top)
        return top

    def _create_slot_cgroup(self, slot: int) -> SlotCgroup:
        for top in self._top_locks:
            os.makedirs(f"{top}/{slot}", exist_ok=True)  # it exists if an earlier try failed half-way
            if self._can_clone_into:
                _chown_procs_file(f"{top}/{slot}", self._zygote_uid)
        return SlotCgroup(self._version, {name: f"{top}/{slot}" for name, top in self._dirs.items()})


class IdleCgroup:
    """A cgroup for demoted threads. They run only on cores that no other thread in the server's cgroup (`parent`) uses.

    Outside of containers, the policy SCHED_IDLE alone is not enough: the kernel first divides the cores among sessions
    (sched_autogroup_enabled). A jail is a session of its own, and calls can start more sessions.
    """

    def __init__(self, parent: str) -> None:
        _remove_stale(parent)
        self._dir, self._lock = _create_locked(parent)
        try:
            write_file(f"{self._dir}/cpu.idle", "1")
        except OSError:  # Linux before 5.15
            write_file(f"{self._dir}/cpu.shares", "2")  # the smallest share
        self._enter_fd = _open(f"{self._dir}/{V1.enter_file}", os.O_WRONLY)
        self._leave_fd = _open(f"{parent}/{V1.enter_file}", os.O_WRONLY)

    @classmethod
    def create(cls, parents: dict[str, str]) -> IdleCgroup | None:
        """Create an idle cgroup. Returns None if there is no cpu hierarchy to which this process may write, or if this
        hierarchy has the cgroups of the slots."""
        parent = own_cgroup_dirs().get("cpu")
        if parent is None or parent in parents.values():
            return None
        try:
            return cls(parent)
        except OSError as error:
            log.info("no idle cgroup: %s", error)
            return None

    def move(self, tid: int, *, inside: bool) -> None:
        """Move a thread into the cgroup or back. A thread starts in the cgroup of its parent. Raises `OSError`."""
        os.write(self._enter_fd if inside else self._leave_fd, str(tid).encode())

    def close(self) -> None:
        os.close(self._enter_fd)
        os.close(self._leave_fd)
        _remove(self._dir)
        os.close(self._lock)


def _chown_procs_file(directory: str, uid: int) -> None:
    os.chown(f"{directory}/{V2.enter_file}", uid, -1)


def own_cgroup_dirs() -> dict[str, str]:
    """Return the directories of this process's cgroups, by controller for version 1 and under "" for version 2."""
    dirs: dict[str, str] = {}
    for name, _mount_point, directory in machine.own_cgroups():
        dirs.setdefault(name, str(directory))
    return dirs


def _find_version() -> tuple[CgroupVersion, dict[str, str]]:
    """Return the version to use, and for each hierarchy the directory in which to create cgroups."""
    own_dirs = own_cgroup_dirs()
    try:
        return V2, {"": _find_v2_parent(own_dirs)}
    except OSError as error:
        v2_problem = f"{V2.name}: {error}"
    required = (V1.memory_hierarchy, V1.pids_hierarchy)
    missing = [name for name in required if name not in own_dirs]
    if missing:
        v1_problem = f"{V1.name}: no hierarchy of {' or '.join(missing)} is mounted"
        raise IsolationError(f"cgroups: {v2_problem}; {v1_problem}")
    return V1, {name: own_dirs[name] for name in (*required, V1.cpu_hierarchy) if name in own_dirs}


def _find_v2_parent(own_dirs: dict[str, str]) -> str:
    """Return the cgroup of version 2 in which to create cgroups with limits. Raises `OSError`."""
    if "" not in own_dirs:
        raise OSError("it is not mounted")
    parent = own_dirs[""]
    if os.path.basename(parent) == SERVER_LEAF:
        parent = os.path.dirname(parent)
    if missing := sorted(_V2_CONTROLLERS.difference(_read(f"{parent}/cgroup.controllers").split())):
        raise OSError(f"{parent} has no {' or '.join(missing)}")
    if _V2_CONTROLLERS.difference(_read(f"{parent}/cgroup.subtree_control").split()):
        try:
            _enable_controllers(parent)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _move_processes_to_leaf(parent)
            _enable_controllers(parent)
    return parent


def _enable_controllers(directory: str) -> None:
    """Allow limits on the children of a cgroup."""
    write_file(f"{directory}/cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(_V2_CONTROLLERS)))


def _move_processes_to_leaf(parent: str) -> None:
    """Move all processes of a cgroup to its child `SERVER_LEAF`. Raises `OSError` if other programs manage the cgroup.

    The server may manage the cgroup if it is the root of the cgroup namespace, or if systemd has delegated it
    (systemd.resource-control(5), Delegate=).
    """
    if machine.cgroup_paths().get("") != "/" and not _is_delegated(parent):
        raise OSError(
            f"{parent} has processes that are not the server's; run in a container, or under systemd with Delegate=yes"
        )
    os.makedirs(f"{parent}/{SERVER_LEAF}", exist_ok=True)
    for _ in range(MAX_TRIES):  # processes that are forked during one round are moved in the next
        # 0 stands for a process of another PID namespace.
        pids = [pid for pid in _read(f"{parent}/cgroup.procs").split() if pid != "0"]
        for pid in pids:
            with suppress(ProcessLookupError):
                write_file(f"{parent}/{SERVER_LEAF}/cgroup.procs", pid)
        if not pids:
            return


def _is_delegated(directory: str) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(directory, name) == b"1":
                return True
    return f"/user@{os.geteuid()}.service/" in directory and _is_delegated_unit(os.path.basename(directory))


def _is_delegated_unit(unit: str) -> bool:
    """Ask the systemd of this user whether its unit has Delegate=yes. Unlike the systemd of the machine, it sets no
    attribute on the unit's cgroup."""
    command = ["systemctl", "--user", "show", "--property=Delegate", "--value", "--", unit]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SYSTEMCTL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.stdout.strip() == "yes"


def _create_locked(parent: str) -> tuple[str, int]:
    """Create a cgroup and lock it. Returns its directory and the descriptor that holds the lock."""
    for _ in range(MAX_TRIES):
        directory = f"{parent}/{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        os.mkdir(directory)
        with suppress(FileNotFoundError):
            lock = _open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(directory):
                return directory, lock
            os.close(lock)  # another executor removed it as stale before it was locked
    raise OSError(errno.EAGAIN, "other executors remove the new cgroup as stale", parent)


def _remove_stale(parent: str) -> None:
    """Remove the cgroups of executors that were killed."""
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        with suppress(FileNotFoundError):
            lock = _open(f"{parent}/{name}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(f"{parent}/{name}")
            except BlockingIOError:
                pass  # its executor is alive
            finally:
                os.close(lock)


def _remove(top: str) -> None:
    """Kill all processes in a cgroup and in the cgroups below it, and remove all these cgroups. Gives up after
    `KILL_TIMEOUT_S`."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    for directory, _, _ in os.walk(top, topdown=False):
        while True:
            try:
                os.rmdir(directory)
                break
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    return  # the cgroup belongs to another user, or one of its processes does not die
                kill_processes(directory)
                time.sleep(0.005)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)
