"""The few system calls that Python does not offer, by name and through glibc's own wrappers.

Each raises `OSError` with the call's name. Nothing here decides anything; the order of layers is in `namespaces`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Iterable, Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

MAX_FD = (1 << 31) - 1

CAP_CHOWN = 0
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SETPCAP = 8
CAP_SYS_ADMIN = 21
CAP_SYS_NICE = 23

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_OPEN_TREE, _AT_FDCWD = 428, -100
_CLONE3, _CLOSE_RANGE = 435, 436  # on every architecture
_CAPABILITY_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def open_detached(path: str) -> int:
    """A descriptor of a folder from which no way leads up: a mount of its own, in no namespace (open_tree(2))."""
    clone = 1  # OPEN_TREE_CLONE
    fd = int(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), clone | os.O_CLOEXEC))
    _check(fd, "open_tree", path)
    return fd


def has_clone3() -> bool:
    """The kernel has it from Linux 5.3; the filters of many containers say that it has not."""
    _libc.syscall(_CLONE3, None, ctypes.c_size_t(0))
    return ctypes.get_errno() == errno.EINVAL


def close_range(first: int, last: int) -> None:
    """Close the descriptors from `first` to `last`. os.closerange does it in one system call only if Python was built
    with a C library that has close_range(2). Before Linux 5.9 the loop ends where the table of descriptors does."""
    if _libc.syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0) != 0:
        os.closerange(first, min(last + 1, _table_size()))


def _table_size() -> int:
    """A number that no open descriptor reaches: select(2) fails on a closed one in the kernel's table (EBADF) and
    ignores one beyond it. A process in a jail has no /proc that would list them."""
    size = 64
    while size <= MAX_FD:
        asked = bytearray(size // 8 + 8)
        asked[-8] = 1  # the bit of `size`, which is a power of two
        is_open = _libc.fcntl(size, fcntl.F_GETFD) >= 0
        if not is_open and _libc.select(size + 1, bytes(asked), None, None, bytes(16)) == 0:
            break
        size *= 2
    return size


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode())
    _check(_libc.mount(*arguments), "mount", target)


def detach(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), "umount2", target)


def pivot_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), "pivot_root", new)


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def make_executable(pages: mmap.mmap) -> None:
    """Take the right to write to `pages` and give that to execute them, which the process may have been denied
    (PR_SET_MDWE, systemd's MemoryDenyWriteExecute, SELinux)."""
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
    done = _libc.mprotect(start, ctypes.c_size_t(len(pages)), mmap.PROT_READ | mmap.PROT_EXEC)
    _check(done, "mprotect(PROT_EXEC)")


def exit_status(child: int) -> int:
    """The exit status of a child, once it has ended. Raises EAGAIN if a signal killed it: then it has not answered."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        raise OSError(errno.EAGAIN, f"a child process was killed by signal {-code}")
    return code


def set_parent_death_signal() -> None:
    """SIGKILL when the thread that forked us ends. Any change of ids undoes it: call it after those."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def set_child_subreaper() -> None:
    """Whatever below this process loses its parent becomes its child (PR_SET_CHILD_SUBREAPER)."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def set_no_new_privs() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def set_not_dumpable() -> None:
    """No other process may trace this one or read its memory. Exec undoes it."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def limit_bounding_set(kept: frozenset[int]) -> None:
    """Drop every capability but `kept` from the bounding set, which is all that exec as uid 0 can then grant."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        if capability not in kept:
            _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
        capability += 1


def drop_capabilities() -> None:
    """No effective, permitted or inheritable capability is left to this process."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_V3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def effective_capabilities() -> frozenset[int]:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_V3, 0)
    data = (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, data), "capget")
    mask = data[0] | data[3] << 32
    return frozenset(bit for bit in range(64) if mask >> bit & 1)


def can_restore_priority() -> bool:
    """Whether this process may make others' more eager for a core again than it has made them (sched(7)). The kernel
    wants the capability in the first user namespace, where ids are those of the machine."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        is_first = file.read().split() == ["0", "0", str((1 << 32) - 1)]
    return is_first and CAP_SYS_NICE in effective_capabilities()


def load_seccomp(program: bytes) -> None:
    """Install a classic BPF program (8-byte instructions) as this thread's seccomp filter."""
    described = _Program(len(program) // 8, program)
    done = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described), 0, 0)
    _check(done, "prctl(PR_SET_SECCOMP)")


def landlock_abi() -> int:
    """The kernel's Landlock ABI, from 1 up. Its number is the same on every architecture."""
    version = 1  # LANDLOCK_CREATE_RULESET_VERSION: ask, create nothing
    abi = int(_libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), version))
    _check(abi, "landlock_create_ruleset")
    return abi


def restrict_with_landlock(handled: Sequence[int], rules: Iterable[tuple[str, int]], flags: int) -> None:
    """Refuse this process for good all of `handled` (struct landlock_ruleset_attr: files, network, scopes), but for the
    rights that `rules` give beneath paths. Needs no_new_privs."""
    attributes = struct.pack("<QQQ", *handled)
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(ruleset, "landlock_create_ruleset")
    try:
        for path, access in rules:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("<Qi", access, beneath)
                _check(
                    _libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0),
                    "landlock_add_rule",
                    path,
                )
            finally:
                os.close(beneath)
        _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, flags), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _check(result: int, call: str, path: str = "") -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", *([path] if path else []))
