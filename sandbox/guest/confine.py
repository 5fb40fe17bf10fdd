"""The layers around one call, applied between the fork and the first line of its code.

The zygote holds privileges inside its own user namespace only, and just long enough: each layer is a few system calls,
in an order that matters. With namespaces they are a list, which `burst` goes through (`steps`); else Python makes them
(`fork`, `join`, `enter`). The plan (which layers, which numbers) is data made by the executor's side.

A layer that fails raises, and the call does not run: closed, never open.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import resource
import struct

import fork_batch
import landlock_slots

# Without the interpreter lock let go and without ctypes' own copy of errno, each of which would write to more pages
# that a call must first copy: the zygote and a call have one thread.
_libc = ctypes.PyDLL(None)
_libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
# Looked up here: looking a symbol up in the call would have it read the C library's tables anew.
_prctl, _capset, _syscall, _fork = _libc.prctl, _libc.capset, _libc.syscall, _libc.fork

_SYS_WRITE, _SYS_OPEN, _SYS_CLOSE, _SYS_SIGPROCMASK, _SYS_DUP2, _SYS_CLONE = 1, 2, 3, 14, 33, 56
_SYS_CHDIR, _SYS_SETPGID, _SYS_SETGROUPS, _SYS_SETRESUID, _SYS_SETRESGID, _SYS_CAPSET = 80, 109, 116, 117, 119, 126
_SYS_PRCTL, _SYS_SETRLIMIT, _SYS_MOUNT, _SYS_CLOCK_GETTIME, _SYS_UNSHARE, _SYS_CLONE3 = 157, 160, 165, 228, 272, 435
_CLONE_CHILD_SETTID, _CLONE_NEWUSER, _CLONE_NEWPID = 0x01000000, 0x10000000, 0x20000000
_CLONE_INTO_CGROUP = 0x200000000
_CLONE_ARG_CHILD_TID, _CLONE_ARG_EXIT_SIGNAL, _CLONE_ARG_CGROUP = 2, 4, 10
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_GET_TID_ADDRESS = 1, 24, 38, 40
_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER = 317, 1
_CLOCK_MONOTONIC, _SIG_SETMASK, _SIGSET_BYTES = 1, 2, 8
_SIGKILL, _SIGCHLD = 9, 17
_CAP_HEADER = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
_NO_CAPS = bytes(24)
_BOUNDED = {
    "memory_bytes": resource.RLIMIT_AS,
    "file_bytes": resource.RLIMIT_FSIZE,
    "processes": resource.RLIMIT_NPROC,
    "open_files": resource.RLIMIT_NOFILE,
}
# Where things lie in a job's room, in words: the time, limits, arguments of clone3, options of the mount.
_TIME, _LIMITS, _CLONE_ARGS, _OPTIONS = 0, 2, 10, 21


class Confinement:
    """The layers of a plan, made ready once in the zygote so that each call pays for system calls alone."""

    def __init__(self, plan: dict) -> None:
        self._unshare: int = plan["unshare"]
        self._unshare_user: bool = plan["unshare_user"]
        self._bounds_processes: bool = plan["bounds_processes"]
        self.tmpfs: str | None = plan["tmpfs"]
        self._inodes: int = plan["inodes"]
        self._uid_base: int | None = plan["uid_base"]
        self._drop_caps: bool = plan["drop_caps"]
        self._no_new_privs: bool = plan["no_new_privs"]
        self._filter = _Filter(base64.b64decode(plan["seccomp"]), plan["own_pid_at"]) if plan["seccomp"] else None
        self.ground = landlock_slots.Ground(plan["landlock"]) if plan["landlock"] else None
        self.address_space = 0  # bytes the zygote itself maps; the executor says so, since there is no /proc here
        if plan["drop_bounding"]:
            _drop_bounding_set()
        self.doors: dict[int, list[int]] = {}  # by slot: where to write to enter its control groups
        self.floors: dict[int, int] = {}  # and its group, to be forked into
        self._clone_flags, self._tid = 0, ctypes.c_void_p()
        if plan["unshare_pid"]:
            self._clone_flags = _CLONE_NEWPID
            # Where the C library has its thread's id, if the kernel can say (CONFIG_CHECKPOINT_RESTORE).
            if _prctl(_PR_GET_TID_ADDRESS, ctypes.byref(self._tid), 0, 0, 0) == 0:
                self._clone_flags |= _CLONE_CHILD_SETTID
        self._clone3 = (ctypes.c_uint64 * 11)()  # struct clone_args: the flags, and by their places
        self._clone3[0] = self._clone_flags | _CLONE_INTO_CGROUP
        self._clone3[_CLONE_ARG_CHILD_TID] = self._tid.value or 0
        self._clone3[_CLONE_ARG_EXIT_SIGNAL] = _SIGCHLD
        self.has_steps: bool = plan["unshare_pid"]
        """Whether `steps` says it all."""
        self._texts = {
            name: ctypes.create_string_buffer(text)
            for name, text in {
                "null": b"/dev/null",
                "no signals": bytes(_SIGSET_BYTES),
                "one": b"0",
                "scratch": b"scratch",
                "tmpfs": b"tmpfs",
                "home": (self.tmpfs or "").encode(),
                "cap header": _CAP_HEADER,
                "no caps": _NO_CAPS,
            }.items()
        }
        self.settle()

    def settle(self) -> None:
        """Once in each zygote that uses the plan."""
        if self.ground:
            self.ground.settle()

    def fork(self, slot: int = -1) -> int:
        """fork(2) into a PID namespace of its own, as PID 1, and into the slot's version 2 control group if there is a
        descriptor of it (clone3(2), CLONE_INTO_CGROUP, Linux 5.7). Raises `OSError`. Clone3 only where it is needed:
        the usual container refuses it. Where it is refused all the same, calls enter by the doors.

        With the interpreter lock held and without Python's own after-fork work (os.fork), nor the C library's: both
        repair what other threads may have left half done, and write to 170 pages to do it. A zygote has one thread
        (asserted), so nothing is half done; of the registered hooks only reseeding matters, and the runner does that.
        """
        if slot in self.floors:
            self._clone3[_CLONE_ARG_CGROUP] = self.floors[slot]
            pid = _syscall(_SYS_CLONE3, self._clone3, ctypes.sizeof(self._clone3))
            if pid >= 0 or _libc.__errno_location()[0] in (errno.EAGAIN, errno.ENOMEM):
                return int(_check(pid, "clone3"))
            self.floors.clear()
        if self._clone_flags:
            pid = _syscall(_SYS_CLONE, self._clone_flags | _SIGCHLD, None, None, self._tid, None)
        else:
            pid = _fork()
        return int(_check(pid, "fork"))

    def join(self, slot: int) -> None:
        """Be counted and bounded with the control groups of the slot, to which we were given descriptors."""
        if slot not in self.floors:
            for door in self.doors.get(slot, ()):
                os.write(door, b"0")

    def leave_groups(self) -> None:
        """Let go of the ways into all groups."""
        for fd in (*self.floors.values(), *(door for doors in self.doors.values() for door in doors)):
            os.close(fd)
        self.floors.clear()
        self.doors.clear()

    def steps(self, slot: int, call: dict, fds: list[tuple[int, int]], room: int) -> tuple[list[int], list[int]]:
        """What a job of `burst` does, and what its room, at that address, holds: the time, the fork, and then in the
        child, which is confined for good, and has `fds` under the names that come with them. These come first, so that
        it can say what failed; then its group, so that every page that it copies counts as its own; then mounts, which
        need privilege; then the identity that had the privilege goes, then what it may use, and the filter last, since
        it forbids most of what came before."""
        at = {name: ctypes.addressof(text) for name, text in self._texts.items()}
        uid = self._uid_base + slot if self._uid_base is not None else None
        limits = self._limits(call)
        options = _scratch_options(call["disk_bytes"], self._inodes, uid)
        clone3 = [*self._clone3]
        steps = [_SYS_CLOCK_GETTIME, _CLOCK_MONOTONIC, room + 8 * _TIME, 0, 0, 0, 0]
        if slot in self.floors:
            clone3[_CLONE_ARG_CGROUP] = self.floors[slot]
            steps += _step(_SYS_CLONE3, room + 8 * _CLONE_ARGS, ctypes.sizeof(self._clone3))
        else:
            steps += _step(_SYS_CLONE, self._clone_flags | _SIGCHLD, 0, 0, self._tid.value or 0)
        for fd, name in fds:
            steps += _step(_SYS_DUP2, fd, name)
        if slot not in self.floors:
            for door in self.doors.get(slot, ()):
                steps += _step(_SYS_WRITE, door, at["one"], 1)
        if not call["blobs"][1]:  # its own: flags of an open file are shared by all who hold it
            steps += _step(_SYS_CLOSE, 0)
            steps += _step(_SYS_OPEN, at["null"], os.O_RDONLY)
        steps += _step(_SYS_SIGPROCMASK, _SIG_SETMASK, at["no signals"], 0, _SIGSET_BYTES)
        steps += _step(_SYS_SETPGID, 0, 0)  # else it could signal the zygote's group
        steps += _step(_SYS_UNSHARE, self._unshare)
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        steps += _step(_SYS_MOUNT, at["scratch"], at["home"], at["tmpfs"], flags, room + 8 * _OPTIONS)
        if uid is not None:
            steps += _step(_SYS_SETGROUPS, 0, 0)
            steps += _step(_SYS_SETRESGID, uid, uid, uid)
            steps += _step(_SYS_SETRESUID, uid, uid, uid)  # away from 0: no capability is left (capabilities(7))
        else:
            if self._unshare_user:  # before limits: the one of processes would be that of all namespaces below, too
                steps += _step(_SYS_UNSHARE, _CLONE_NEWUSER)
            steps += _step(_SYS_CAPSET, at["cap header"], at["no caps"])
        steps += _step(_SYS_CHDIR, at["home"])  # as the owner: whoever mounted it may not even look inside
        for number, (what, _most) in enumerate(limits):
            steps += _step(_SYS_SETRLIMIT, what, room + 8 * (_LIMITS + 2 * number))
        # After setresuid, which clears it. A zygote that dies takes its calls along.
        steps += _step(_SYS_PRCTL, _PR_SET_PDEATHSIG, _SIGKILL)
        steps += _step(_SYS_PRCTL, _PR_SET_NO_NEW_PRIVS, 1)
        if self._filter:
            steps += _step(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, 0, self._filter.address)
        words = [most for _, most in limits for _ in range(2)]
        words += [0] * (_CLONE_ARGS - _LIMITS - len(words))  # not every plan has every limit
        return steps, [0, 0, *words, *clone3, *options]

    def enter(self, slot: int, limits: dict) -> None:
        """Without namespaces: confine this process for good, the identity first."""
        uid = self._uid_base + slot if self._uid_base is not None else None
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)  # away from 0: the kernel clears every capability set (capabilities(7))
        elif self._drop_caps:
            _check(_capset(_CAP_HEADER, _NO_CAPS), "capset(none)")
        if self.ground:
            self.ground.enter(slot)
        for what, most in self._limits(limits):
            resource.setrlimit(what, (most, most))
        # After setresuid, which clears it. A zygote that dies takes its calls along.
        _check(_prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl(PDEATHSIG)")
        if self.ground:
            self.ground.leave()
        if self._no_new_privs:
            _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        if self._filter:
            self._filter.load()

    def _limits(self, call: dict) -> list[tuple[int, int]]:
        limits = [(_BOUNDED[name], call[name]) for name in ("file_bytes", "open_files")]
        limits.append((_BOUNDED["memory_bytes"], call["memory_bytes"] + self.address_space))
        if self._bounds_processes:
            limits.append((_BOUNDED["processes"], call["processes"]))
        return limits


def lower_for_good(plan: dict) -> None:
    """What is the same for every call, set once in the zygote and inherited: limits, and most of the filter."""
    for what in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK):
        resource.setrlimit(what, (0, 0))
    if plan["zygote_seccomp"]:
        _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        _Filter(base64.b64decode(plan["zygote_seccomp"]), []).load()


def _step(number: int, *arguments: int) -> tuple[int, ...]:
    return (number, *arguments, *(0,) * (fork_batch.STEP - 1 - len(arguments)))


def _scratch_options(size: int, inodes: int, uid: int | None) -> memoryview:
    """Of the mount of a scratch folder, in words."""
    owner = f",uid={uid},gid={uid}" if uid is not None else ""
    text = f"size={size},nr_inodes={inodes},mode=0700{owner}".encode()
    return memoryview(text + bytes(8 - len(text) % 8)).cast("q")


def _drop_bounding_set() -> None:
    """No program that a call executes can gain a capability, whoever owns its file."""
    cap = 0
    while _prctl(_PR_CAPBSET_DROP, cap, 0, 0, 0) == 0:
        cap += 1
    if _libc.__errno_location()[0] != errno.EINVAL:  # which is: past the last capability this kernel knows
        _check(-1, f"prctl(CAPBSET_DROP, {cap})")


class _Filter:
    """A seccomp program (struct sock_fprog) in memory, ready to load."""

    def __init__(self, program: bytes, own_pid_at: list) -> None:
        self._program = ctypes.create_string_buffer(program, len(program))
        self._own_pid_at = own_pid_at
        address = ctypes.addressof(self._program)
        self._header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, address))
        self.address = ctypes.addressof(self._header)

    def load(self) -> None:
        for place in self._own_pid_at:
            struct.pack_into("=I", self._program, place, os.getpid())
        _check(_syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, 0, self._header), "seccomp(SET_MODE_FILTER)")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = _libc.__errno_location()[0]
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
