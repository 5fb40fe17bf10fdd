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
_unshare, _setns, _mount, _capset = _libc.unshare, _libc.setns, _libc.mount, _libc.capset
_prctl, _syscall = _libc.prctl, _libc.syscall

_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_SYS_SECCOMP, _SECCOMP_SET_MODE_FILTER = 317, 1
_SIGKILL = 9
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
        self._unshare_pid: bool = plan["unshare_pid"]
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
        self.doors: dict[int, list[int]] = {}  # by slot
        self._home = -1
        self.settle()

    def settle(self) -> None:
        """Once in each zygote that uses the plan: its pidfd stands for its PID namespace (setns(2), Linux 5.8)."""
        if self._home >= 0:
            os.close(self._home)
        self._home = os.pidfd_open(os.getpid()) if self._unshare_pid else -1
        if self.ground:
            self.ground.settle()

    def before_fork(self) -> None:
        """From here on, the next child is PID 1 of a namespace of its own."""
        if self._unshare_pid:
            _check(_unshare(_CLONE_NEWPID), "unshare(CLONE_NEWPID)")

    def after_fork(self) -> None:
        """Undo `before_fork` in the zygote: a process may have only one namespace waiting for its children."""
        if self._unshare_pid:
            _check(_setns(self._home, _CLONE_NEWPID), "setns(own PID namespace)")

    def join(self, slot: int) -> None:
        """Be counted and bounded with the control groups of the slot, to which we were given descriptors."""
        for door in self.doors.get(slot, ()):
            os.write(door, b"0")

    def rehearse(self) -> None:
        """Walk through `enter` in the zygote itself, to no effect, so that no call has to warm its bytecode in memory
        that it must first copy: system calls that would change something are another one, and numbers are as they
        are (an id of -1 leaves ids alone)."""
        global _unshare, _mount, _capset, _prctl, _syscall
        kept, address_space, folder = (_unshare, _mount, _capset, _prctl, _syscall), self.address_space, os.getcwd()
        ground, self.ground = self.ground, None
        _unshare = _mount = _capset = _prctl = _syscall = _libc.getpid
        self.address_space = 0
        here = {name: resource.getrlimit(what)[1] for name, what in _BOUNDED.items()}
        try:
            for _ in range(20):
                self.enter(-1 - (self._uid_base or 0), here)
        finally:
            _unshare, _mount, _capset, _prctl, _syscall = kept
            self.address_space, self.ground = address_space, ground
            os.chdir(folder)

    def enter(self, slot: int, limits: dict) -> None:
        """Confine this process for good. Mounts come first (they need privilege), then the identity that had the
        privilege goes, then what it may use, and the filter last, since it forbids most of what came before."""
        if self._unshare:
            _check(_unshare(self._unshare), "unshare(mount, IPC, UTS)")
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


def lower_for_good() -> None:
    """Limits that are the same for every call, set once in the zygote and inherited."""
    for what in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK):
        resource.setrlimit(what, (0, 0))


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


def _check(result: int, what: str) -> None:
    if result < 0:
        number = _libc.__errno_location()[0]
        raise OSError(number, f"{what}: {os.strerror(number)}")
