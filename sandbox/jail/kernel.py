"""System calls that Python's `os` does not offer, called through the C library.

- Each function makes one or a few system calls, and raises `OSError` with the name of the system call that failed.
- The callers decide which functions are called, and in what order. They are mainly the launchers (`launch_*.py`), the
  programs that build a jail.
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

SIOCGSKNS = 0x894C
"""ioctl(2) that returns a descriptor of a socket's network namespace (linux/sockios.h)."""
CAP_CHOWN = 0
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SETPCAP = 8
CAP_NET_ADMIN = 12
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
# Numbers of system calls. They are the same on x86-64 and on arm64.
_OPEN_TREE = 428
_CLONE3 = 435
_CLOSE_RANGE = 436
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
# Arguments of these system calls.
_LANDLOCK_RULE_PATH_BENEATH = 1
_OPEN_TREE_CLONE = 1
_AT_FDCWD = -100
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)
"""First argument of capset(2) and capget(2): version 3 of the structs, and pid 0 for the caller."""
_CapabilitySets = ctypes.c_uint32 * 6
"""Second argument: two structs, each with the effective, permitted and inheritable bits. The first struct is for
capabilities 0 to 31, the second for capabilities 32 to 63."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


class _SockFprog(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def open_detached_mount(path: str) -> int:
    """Return a descriptor of a directory. Through this descriptor, the path `..` does not lead to the parent.

    The descriptor refers to a clone of the directory's mount (open_tree(2)). The clone belongs to no mount namespace.
    The caller closes the descriptor.
    """
    fd = int(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC))
    _check(fd, "open_tree", path)
    return fd


def has_clone3() -> bool:
    """Return whether clone3(2) exists. Linux has it since 5.3, but the seccomp filters of many containers refuse it."""
    # The size 0 is invalid, so the kernel creates no process and fails with EINVAL. Any other error is a refusal.
    _libc.syscall(_CLONE3, None, ctypes.c_size_t(0))
    return ctypes.get_errno() == errno.EINVAL


def close_range(first: int, last: int) -> None:
    """Close the descriptors from `first` to `last`.

    os.closerange does not suffice: it calls close_range(2) only if Python was built with a C library that has the call.
    Before Linux 5.9 the descriptors are closed in turn, up to the size of the process's descriptor table.
    """
    if _libc.syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0) != 0:
        os.closerange(first, min(last + 1, _fd_table_size()))


def _fd_table_size() -> int:
    """Return a number above all open descriptors. /proc is not used, because a process in a jail does not have it.

    select(2) tells whether a closed descriptor is within the kernel's descriptor table. Within the table it fails with
    EBADF. Beyond the table it ignores the descriptor. `size` is doubled until select ignores descriptor `size`.
    """
    size, no_wait = 64, bytes(16)  # the smallest table (NR_OPEN_DEFAULT), and an empty struct timeval
    while size <= MAX_FD:
        fd_set = bytearray(size // 8 + 8)
        # Set the bit of descriptor `size`: bit 0 of byte `size // 8`, since 8 divides `size`. The kernel reads whole
        # 8-byte words, so this byte and the 7 bytes after it are needed.
        fd_set[-8] = 1
        is_open = _libc.fcntl(size, fcntl.F_GETFD) >= 0
        if not is_open and _libc.select(size + 1, bytes(fd_set), None, None, no_wait) == 0:
            break
        size *= 2
    return size


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace of a descriptor. `kind` is the CLONE_NEW* flag of this type of namespace."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, fs_type: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (os.fsencode(source), os.fsencode(target), fs_type.encode(), flags, options.encode())
    _check(_libc.mount(*arguments), "mount", target)


def unmount_lazily(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), "umount2", target)


def pivot_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), "pivot_root", new)


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def make_executable(pages: mmap.mmap) -> None:
    """Change `pages` from writable to executable.

    Fails if a policy denies the process executable memory (PR_SET_MDWE, systemd's MemoryDenyWriteExecute, SELinux).
    """
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
    result = _libc.mprotect(start, ctypes.c_size_t(len(pages)), mmap.PROT_READ | mmap.PROT_EXEC)
    _check(result, "mprotect(PROT_EXEC)")


def wait_for_exit(child: int) -> int:
    """Wait for a child process and return its exit status. Raises EAGAIN if a signal killed it.

    A signal is no refusal by the kernel. `probe` takes EAGAIN for a transient failure and tries again.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        raise OSError(errno.EAGAIN, f"a child process was killed by signal {-code}")
    return code


def set_parent_death_signal() -> None:
    """Let the kernel kill this process when the thread that forked it ends. If the process later changes its ids, the
    kernel clears this setting."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def set_child_subreaper() -> None:
    """Adopt all descendants of this process whose parents end (PR_SET_CHILD_SUBREAPER)."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def set_no_new_privs() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def set_not_dumpable() -> None:
    """Forbid other processes to trace this process or to read its memory. Exec undoes this."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def limit_bounding_set(kept: frozenset[int]) -> None:
    """Drop all capabilities but `kept` from the bounding set, so that exec as uid 0 grants no others."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        if capability not in kept:
            _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
        capability += 1


def drop_capabilities() -> None:
    """Clear the effective, permitted and inheritable capabilities of this process."""
    _check(_libc.capset(_CAPABILITY_HEADER, _CapabilitySets()), "capset")


def effective_capabilities() -> frozenset[int]:
    sets = _CapabilitySets()
    _check(_libc.capget(_CAPABILITY_HEADER, sets), "capget")
    mask = sets[0] | sets[3] << 32  # the effective sets of both structs
    return frozenset(bit for bit in range(64) if mask >> bit & 1)


def can_restore_priority() -> bool:
    """Return whether this process may set other processes from SCHED_IDLE back to SCHED_OTHER (sched(7)).

    The kernel requires CAP_SYS_NICE in the initial user namespace, whose id map covers all ids.
    """
    with open("/proc/self/uid_map", encoding="ascii") as file:
        is_initial = file.read().split() == ["0", "0", str((1 << 32) - 1)]
    return is_initial and CAP_SYS_NICE in effective_capabilities()


def load_seccomp(program: bytes) -> None:
    """Install a classic BPF program (8-byte instructions) as this thread's seccomp filter."""
    header = _SockFprog(len(program) // 8, program)
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)
    _check(result, "prctl(PR_SET_SECCOMP)")


def landlock_abi() -> int:
    """Return the kernel's Landlock ABI version, 1 or higher."""
    query_version = 1  # LANDLOCK_CREATE_RULESET_VERSION: creates no ruleset
    abi = int(_libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), query_version))
    _check(abi, "landlock_create_ruleset")
    return abi


def restrict_with_landlock(handled: Sequence[int], rules: Iterable[tuple[str, int]], flags: int) -> None:
    """Deny this process and its children all rights in `handled`, except the rights that `rules` grant. Each rule is a
    path and the rights on all files beneath the path.

    `handled` are the fields of struct landlock_ruleset_attr: files, network, scopes. Requires no_new_privs.
    """
    attributes = struct.pack("<QQQ", *handled)
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(ruleset, "landlock_create_ruleset")
    try:
        for path, access in rules:
            path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("<Qi", access, path_fd)
                _check(
                    _libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0),
                    "landlock_add_rule",
                    path,
                )
            finally:
                os.close(path_fd)
        _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, flags), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _check(result: int, call: str, path: str = "") -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", *([path] if path else []))
