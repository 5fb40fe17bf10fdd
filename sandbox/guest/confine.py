"""The layers around one call, applied between the fork and the first line of its code.

The zygote holds privileges inside its own user namespace only, and just long enough: each layer here is one function,
in an order that matters. The plan (which layers, which numbers) is data made by the executor's side.

A layer that fails raises, and the call does not run: closed, never open.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import os
import resource
import struct

import landlock

# Without the interpreter lock let go and without ctypes' own copy of errno, each of which would write to more pages
# that a call must first copy: the zygote and a call have one thread.
_libc = ctypes.PyDLL(None)
_libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
# Looked up here: looking a symbol up in the call would have it read the C library's tables anew.
_unshare, _mount, _capset = _libc.unshare, _libc.mount, _libc.capset
_prctl, _syscall, _fork = _libc.prctl, _libc.syscall, _libc.fork

_SYS_CLONE, _SYS_CLONE3 = 56, 435
_CLONE_CHILD_SETTID, _CLONE_NEWPID, _CLONE_INTO_CGROUP = 0x01000000, 0x20000000, 0x200000000
_CLONE_ARG_CHILD_TID, _CLONE_ARG_EXIT_SIGNAL, _CLONE_ARG_CGROUP = 2, 4, 10
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_GET_TID_ADDRESS = 1, 24, 38, 40
_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER = 317, 1
_SIGKILL, _SIGCHLD = 9, 17
_CAP_HEADER = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
_NO_CAPS = bytes(24)
_BOUNDED = {
    "memory": resource.RLIMIT_AS,
    "disk": resource.RLIMIT_FSIZE,
    "processes": resource.RLIMIT_NPROC,
    "open_files": resource.RLIMIT_NOFILE,
}


class Confinement:
    """The layers of a plan, made ready once in the zygote so that each call pays for system calls alone."""

    def __init__(self, plan: dict) -> None:
        self._unshare: int = plan["unshare"]
        self.tmpfs: str | None = plan["tmpfs"]
        self._inodes: int = plan["inodes"]
        self._uid_base: int | None = plan["uid_base"]
        self._drop_caps: bool = plan["drop_caps"]
        self._no_new_privs: bool = plan["no_new_privs"]
        self._filter = _Filter(base64.b64decode(plan["seccomp"]), plan["own_pid_at"]) if plan["seccomp"] else None
        self.ground = landlock.Ground(plan["landlock"]) if plan["landlock"] else None
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

    def enter(self, slot: int, limits: dict) -> None:
        """Confine this process for good. Mounts come first (they need privilege), then the identity that had the
        privilege goes, then what it may use, and the filter last, since it forbids most of what came before."""
        if self._unshare:
            _check(_unshare(self._unshare), "unshare(mount)")
        uid = self._uid_base + slot if self._uid_base is not None else None
        if self.tmpfs:
            _mount_scratch(self.tmpfs, limits["disk"], self._inodes, uid)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)  # away from 0: the kernel clears every capability set (capabilities(7))
        elif self._drop_caps:
            _check(_capset(_CAP_HEADER, _NO_CAPS), "capset(none)")
        if self.tmpfs:
            os.chdir(self.tmpfs)  # as the owner: whoever mounted it may not even look inside
        if self.ground:
            self.ground.enter(slot)
        self._bound(limits)
        # After setresuid, which clears it. A zygote that dies takes its calls along.
        _check(_prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl(PDEATHSIG)")
        if self.ground:
            self.ground.leave()
        if self._no_new_privs:
            _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        if self._filter:
            self._filter.load()

    def _bound(self, limits: dict) -> None:
        _setrlimit = resource.setrlimit
        for name, what in _BOUNDED.items():
            if name == "processes" and self.ground is not None and self._uid_base is None:
                continue  # the kernel counts all that a uid has, and this one is the server's
            most = limits[name] + self.address_space if name == "memory" else limits[name]
            _setrlimit(what, (most, most))


def lower_for_good(plan: dict) -> None:
    """What is the same for every call, set once in the zygote and inherited: limits, and most of the filter."""
    for what in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK):
        resource.setrlimit(what, (0, 0))
    if plan["zygote_seccomp"]:
        _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        _Filter(base64.b64decode(plan["zygote_seccomp"]), []).load()


def _mount_scratch(where: str, size: int, inodes: int, uid: int | None) -> None:
    owner = f",uid={uid},gid={uid}" if uid is not None else ""
    options = f"size={size},nr_inodes={inodes},mode=0700{owner}".encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(_mount(b"scratch", where.encode(), b"tmpfs", flags, options), f"mount(tmpfs, {where})")


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
        self._header = struct.pack("HxxxxxxQ", len(program) // 8, address)

    def load(self) -> None:
        for place in self._own_pid_at:
            struct.pack_into("=I", self._program, place, os.getpid())
        _check(_syscall(_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER, 0, self._header), "seccomp(SET_MODE_FILTER)")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = _libc.__errno_location()[0]
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
