"""The system calls that a call may make: an allow-list by name, and its compilation to classic BPF programs.

- `CALL_POLICY` is the policy for all machines, and `compile_program` compiles it for one of them. Names of system calls
  that this machine does not have are left out. All checked arguments mean the same on x86_64 and on aarch64. Tests
  compare the programs with the policy for every number.
- A system call that the policy does not name fails with EPERM. The kernel's other entries (32-bit programs, x32) fail
  with ENOSYS. The process is not killed, because the kernel would then write a line to the host's audit log at each
  attempt.
- Each call loads a filter, so loading must be fast. When a filter is loaded, the kernel runs its program once for each
  system call number, to find the numbers that are always allowed. For these it never runs the program again. A program
  is a balanced search tree over ranges of numbers:

      number >= n2?  -- no --> number >= n1?  -- no --> allow
            |                        +-- yes -> refuse
            +-- yes -> number >= n3? ...      -> check of arguments -> allow or refuse

- At the levels with namespaces there are two programs. A zygote (an interpreter that forks once per call) loads the
  first program, and its calls inherit it. Each call adds a small second program. The kernel runs both programs, and the
  stricter result holds (seccomp(2)). Both together are equal to `CALL_POLICY`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import groupby

from sandbox.errors import IsolationError
from sandbox.guest.protocol import MAX_BACKLOG
from sandbox.jail import bpf
from sandbox.jail.syscalls import NUMBERS, X86_64

# SECCOMP_RET_ALLOW, and SECCOMP_RET_ERRNO with an errno in the low 16 bits
ALLOW = 0x7FFF0000
EPERM = 0x00050001
ENOSYS = 0x00050026
FAKE_SUCCESS = 0x00050000
"""The system call is skipped and returns 0 (SECCOMP_RET_ERRNO with 0). This is for requests that have no effect on the
results of a call."""
AUDIT_ARCHS: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""For each machine: the value of `seccomp_data.arch` for its 64-bit system calls (AUDIT_ARCH_* in linux/audit.h)."""
X32_BIT = 0x40000000  # __X32_SYSCALL_BIT, part of the numbers of the x32 ABI; aarch64 has no such numbers


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """A condition: the low 32 bits of argument `index`, ANDed with `mask`, are among `values`. Of all arguments that
    are checked here, the kernel itself reads only the low 32 bits."""

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    fake_success_values: tuple[int, ...] = ()
    """Further values, for which the result is `FAKE_SUCCESS`."""
    bounded_value: tuple[int, int, int] | None = None
    """A further value that is allowed, the index of another argument, and a maximum. If the checked argument has this
    value, the low 32 bits of the other argument must not exceed the maximum."""
    maximum: int | None = None
    """Numbers from 0 to `maximum` are allowed too. The argument is compared as an unsigned number."""


SyscallRule = int | tuple[ArgumentCheck, ...]
"""Either a result, or conditions: the result is ALLOW if all of them hold, else EPERM."""

_FILES = """
    read write open close stat fstat lstat poll lseek pread64 pwrite64 readv writev access pipe select dup dup2
    fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink
    symlink readlink chmod fchmod chown fchown lchown umask utime mknod statfs fstatfs setxattr lsetxattr
    fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
    getdents64 utimes openat mkdirat mknodat fchownat futimesat newfstatat unlinkat renameat linkat
    symlinkat readlinkat fchmodat faccessat pselect6 ppoll utimensat fallocate dup3 pipe2 preadv pwritev renameat2
    copy_file_range statx close_range openat2 faccessat2 fchmodat2
"""
# mlock is limited by RLIMIT_MEMLOCK. mincore reports only on files that the caller may write.
_MEMORY = """
    mmap mprotect munmap brk mremap msync mincore madvise mlock munlock mlockall munlockall mlock2 pkey_mprotect
    pkey_alloc pkey_free
"""
# Signals and limits affect only the call's own PID namespace and uid. A hard limit can only be lowered.
_PROCESSES = """
    fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal getpid gettid
    getppid getpgrp getpgid setpgid getsid setsid getuid geteuid getgid getegid getgroups getresuid getresgid capget
    uname sysinfo times getrusage getrlimit getpriority getcpu arch_prctl set_tid_address
    restart_syscall sched_yield sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
    sched_rr_get_interval sched_getaffinity sched_getattr set_robust_list get_robust_list futex futex_waitv rseq
    getrandom
"""
_SIGNALS_AND_TIME = """
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
    rt_sigsuspend sigaltstack signalfd signalfd4 pause nanosleep getitimer alarm setitimer gettimeofday time
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete clock_gettime clock_getres clock_nanosleep
    timerfd_create timerfd_settime timerfd_gettime
"""
_EVENTS = " epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 "
# A call without a network namespace of its own can connect sockets only in pairs. setsockopt is missing, because
# SO_ATTACH_FILTER loads BPF, and SO_PASSCRED gives the socket a name to which other calls could send.
_SOCKETPAIRS = "shutdown getsockname getpeername"
# A process without capabilities can only take ids that it has already, so these calls change nothing.
_OWN_IDS = "setuid setgid setreuid setregid setresuid setresgid"

# For these system calls the result is ENOSYS. After ENOSYS of clone3, the C library uses clone; after EPERM it would
# give up. System calls that are newer than this policy, from map_shadow_stack on, also get ENOSYS, for the same reason.
# flock is refused because a lock on a shared file would make other calls wait. A library that locks files only if it
# can takes ENOSYS of flock for a file system without locks.
_NOT_IMPLEMENTED = "clone3 flock"
FIRST_UNKNOWN_NUMBER = X86_64["map_shadow_stack"]

_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags of clone
_CLONE_PARENT = 0x8000
_LIMITS = (0, 1, 2, 3, *range(5, 16))  # all RLIMIT_* but RLIMIT_CORE (4)
PIPE_BYTES = 1 << 16  # the size of a new pipe
_READ_WRITE_FLAGS = 0x1 | 0x2 | 0x4 | 0x10
_OUT_OF_BAND = 0x1  # MSG_OOB, which Python code does not need and an exploit has used (CVE-2025-38236)
_FASTOPEN_ZEROCOPY = 0x20000000 | 0x4000000  # MSG_FASTOPEN, MSG_ZEROCOPY
_SOCKET_TYPE = ~0x80800 & 0xFFFFFFFF  # without SOCK_CLOEXEC and SOCK_NONBLOCK
_UNIX_STREAM = (ArgumentCheck(0, (1,)), ArgumentCheck(1, (1,), mask=_SOCKET_TYPE))
_CHECKED_ARGUMENTS: dict[str, tuple[ArgumentCheck, ...]] = {
    "clone": (ArgumentCheck(0, (0,), mask=_NAMESPACES | _CLONE_PARENT),),
    # Only AF_UNIX streams. Where calls share a network namespace, others could send to a datagram socket by its name. A
    # single socket can do nothing: bind, connect and listen are refused. Libraries create one to see what the system
    # has.
    "socket": _UNIX_STREAM,
    "socketpair": _UNIX_STREAM,
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": (ArgumentCheck(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_NO_NEW_PRIVS
    "prctl": (ArgumentCheck(0, (3, 15, 16, 39)),),
    # Allowed are F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_OFD_GETLK, F_DUPFD_CLOEXEC, F_SETPIPE_SZ and
    # F_GETPIPE_SZ. A pipe cannot be made larger than a new one: all pipes of a user share 64 MiB.
    # Refused are leases (other calls would wait to open the file), F_NOTIFY (it reports what other calls read), owners
    # and signals, and hints (they would stay on files that all calls share). Setting a record lock only seems to
    # succeed: no limit counts the kernel's memory for locks (docs/isolation.md), and each lock on a shared file delays
    # all other calls that close the file, and passes a bit to them. So sqlite works in one process of a call, but
    # several processes do not exclude each other; `guest/file_locks.py` makes Python's own functions raise an error.
    # Setting an open file description lock fails.
    "fcntl": (
        ArgumentCheck(
            1, (0, 1, 2, 3, 4, 5, 36, 1030, 1032), fake_success_values=(6, 7), bounded_value=(1031, 2, PIPE_BYTES)
        ),
    ),
    # RWF_HIPRI, RWF_DSYNC, RWF_SYNC and RWF_APPEND. RWF_NOWAIT would reveal which files other calls have read recently,
    # and RWF_DONTCACHE would make the next call wait for the disk.
    "preadv2": (ArgumentCheck(5, (0,), mask=~_READ_WRITE_FLAGS & 0xFFFFFFFF),),
    "pwritev2": (ArgumentCheck(5, (0,), mask=~_READ_WRITE_FLAGS & 0xFFFFFFFF),),
    # POSIX_FADV_NORMAL, RANDOM, SEQUENTIAL and NOREUSE change only the caller's own open file; WILLNEED reads ahead.
    # DONTNEED would remove pages that other calls use; a kernel may ignore this advice, as the filter does.
    "fadvise64": (ArgumentCheck(3, (0, 1, 2, 3, 5), fake_success_values=(4,)),),
    # All limits but RLIMIT_CORE: see launcher.NO_CORE_DUMP.
    "setrlimit": (ArgumentCheck(0, _LIMITS),),
    "prlimit64": (ArgumentCheck(1, _LIMITS),),
    "sendto": (ArgumentCheck(3, (0,), mask=_OUT_OF_BAND | _FASTOPEN_ZEROCOPY),),
    # At both levels, SOL_SOCKET and IPPROTO_TCP, the options up to 21, 30, 38 and 39 have no dangerous meaning. Refused
    # are 57 (SO_COOKIE, which counts the sockets of the whole machine), 71 (SO_NETNS_COOKIE), 26 (SO_GET_FILTER), and
    # 35 (TCP_ZEROCOPY_RECEIVE).
    "getsockopt": (ArgumentCheck(1, (1, 6)), ArgumentCheck(2, (30, 38, 39), maximum=21)),
    "recvfrom": (ArgumentCheck(3, (0,), mask=_OUT_OF_BAND),),
    "recvmsg": (ArgumentCheck(2, (0,), mask=_OUT_OF_BAND),),
    "recvmmsg": (ArgumentCheck(3, (0,), mask=_OUT_OF_BAND),),
}

# System calls that are refused for a reason that is not obvious:
#   memfd_create, shm*, sem*, msg*, mq_*  memory that neither an rlimit nor the size of a tmpfs limits
#   bind, connect, listen, inotify_*      a call could reach or watch another call (`NAMED_SOCKETS` are an exception)
#   sendmsg, sendmmsg                     can queue descriptors (SCM_RIGHTS), which then count towards no limit of the
#                                         call and need the garbage collector of AF_UNIX. For data there are sendto
#                                         and write
#   splice, tee, vmsplice, sendfile       put page cache of shared files into pipes (Dirty Pipe); Python falls back
#   readahead                             changes the page cache, which all calls share
#   sync, syncfs                          would flush the host's disks
#   unshare, setns, clone's namespaces    a user namespace gives all capabilities inside it
#   io_uring_*, bpf, userfaultfd, perf_event_open, keyctl, io_submit   kernel code that Python does not need

CALL_POLICY: Mapping[str, SyscallRule] = {
    **dict.fromkeys((_FILES + _MEMORY + _PROCESSES + _SIGNALS_AND_TIME + _EVENTS + _SOCKETPAIRS).split(), ALLOW),
    **dict.fromkeys(_OWN_IDS.split(), ALLOW),
    **dict.fromkeys(_NOT_IMPLEMENTED.split(), ENOSYS),
    **_CHECKED_ARGUMENTS,
}

# For a call in a network namespace that no other call shares: AF_UNIX streams and datagrams, which can have names. The
# options have no dangerous meaning at either level, SOL_SOCKET or IPPROTO_TCP: 26, 27, 50, 51 and 52 would load BPF, 16
# (SO_PASSCRED) is not needed, and TCP_MD5SIG (14) and TCP_ULP (31) are parts of the kernel that Python does not need.
# Sizes of buffers (SO_SNDBUF, SO_RCVBUF), SO_PRIORITY and SO_LINGER are only hints. SO_OOBINLINE is for MSG_OOB, which
# is refused. At the level of TCP, 13 would choose the congestion control.
NAMED_SOCKETS: Mapping[str, SyscallRule] = {
    **dict.fromkeys(["bind", "connect", "accept", "accept4"], ALLOW),
    "listen": (ArgumentCheck(1, (), maximum=MAX_BACKLOG),),
    **dict.fromkeys(["socket", "socketpair"], (ArgumentCheck(0, (1,)), ArgumentCheck(1, (1, 2), mask=_SOCKET_TYPE))),
    "setsockopt": (
        ArgumentCheck(1, (1, 6)),
        ArgumentCheck(2, (1, 2, 3, 4, 5, 6, 9, 15), fake_success_values=(7, 8, 10, 12, 13)),
    ),
}
# With `network: "loopback"`: also TCP and UDP of IPv4 (protocol 0, 6 and 17). There is no IPv6: its option IPV6_V6ONLY,
# which every server sets, has the number 26.
LOOPBACK_SOCKETS: Mapping[str, SyscallRule] = {
    **NAMED_SOCKETS,
    "socket": (ArgumentCheck(0, (1, 2)), ArgumentCheck(1, (1, 2), mask=_SOCKET_TYPE), ArgumentCheck(2, (0, 6, 17))),
}

# A call could leave a message for another call in the attributes of a file, which Landlock does not restrict
# (landlock(7), "Current limitations"). With namespaces, all file systems that calls share are read-only.
_ATTRIBUTES = "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr"

# The cells of a session are forked from its states, which are children of its keeper (`guest/session.py`). So are the
# cells, by CLONE_PARENT. A cell may not signal process groups and all processes at once (negative numbers), because the
# states have its uid.
SESSION_RULES: Mapping[str, SyscallRule] = {
    "clone": (ArgumentCheck(0, (0,), mask=_NAMESPACES),),
    "kill": (ArgumentCheck(0, (), maximum=0x7FFFFFFF),),
}

OWN_PID = 0x7FFFFFFF
"""Placeholder in a rule for the pid of the process that loads the filter. The guest replaces it (`own_pid_offsets`)."""
_CLONE_THREAD = 0x10000
# Rules for calls with the server's own uid. A call may start threads but no process, which could outlive it. It may
# signal only itself and set only its own limits. It may not change owner, mode or times of any file: the files of this
# uid are the server's, and Landlock does not restrict such changes.
_PROCESS_STARTS = "fork vfork execve execveat tkill pidfd_open pidfd_send_signal"
_OWNED_FILE_CHANGES = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat"
_SELF_ONLY = dict.fromkeys(["kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"], (ArgumentCheck(0, (OWN_PID,)),))

# System calls by which a zygote confines a call. Calls may not make them, or not with all arguments.
_SETUP_CALLS = """
    unshare setns mount capset seccomp setgroups memfd_create clone clone3 prctl fcntl ioctl
    sendmsg socket socketpair setsockopt bind connect listen accept accept4
"""


class FilterKind(StrEnum):
    """Kinds of filters. The weaker the other isolation of a process is, the more its filter must refuse."""

    NAMESPACED = "namespaced"
    """For a call in its own namespaces."""
    ZYGOTE = "zygote"
    """For a zygote whose calls get their own namespaces. The calls inherit this filter."""
    CALL_ON_TOP = "call on top"
    """For a call of such a zygote, in addition to the zygote's filter."""
    NAMED_SOCKETS_ON_TOP = "named sockets on top"
    """Like `CALL_ON_TOP`, for a call whose network namespace no other call shares."""
    LOOPBACK_ON_TOP = "loopback on top"
    """Like `NAMED_SOCKETS_ON_TOP`, for a call that also has a loopback network."""
    SESSION_ON_TOP = "session on top"
    """Like `CALL_ON_TOP`, for the cells of a session."""
    OWN_UID = "own uid"
    """For a call in the container's namespaces, with a uid that no other process has."""
    SHARED_UID = "shared uid"
    """For a call in the container's namespaces, with the server's uid."""


ON_TOP: Mapping[FilterKind, Mapping[str, SyscallRule]] = {
    FilterKind.CALL_ON_TOP: {},
    FilterKind.NAMED_SOCKETS_ON_TOP: NAMED_SOCKETS,
    FilterKind.LOOPBACK_ON_TOP: LOOPBACK_SOCKETS,
    FilterKind.SESSION_ON_TOP: SESSION_RULES,
}
"""Kinds of filters that a call adds to the zygote's filter, and for each kind the rules that differ from
`CALL_POLICY`."""
POLICY_OF: Mapping[FilterKind, Mapping[str, SyscallRule]] = {
    FilterKind.NAMESPACED: CALL_POLICY,
    FilterKind.ZYGOTE: {**CALL_POLICY, **dict.fromkeys(_SETUP_CALLS.split(), ALLOW)},
    **{
        kind: {name: {**CALL_POLICY, **rules}.get(name, EPERM) for name in (*_SETUP_CALLS.split(), *rules)}
        for kind, rules in ON_TOP.items()
    },
    FilterKind.OWN_UID: {**CALL_POLICY, **dict.fromkeys(_ATTRIBUTES.split(), EPERM)},
    FilterKind.SHARED_UID: {
        **CALL_POLICY,
        **dict.fromkeys(f"{_ATTRIBUTES} {_PROCESS_STARTS} {_OWNED_FILE_CHANGES}".split(), EPERM),
        **_SELF_ONLY,
        "clone": (ArgumentCheck(0, (_CLONE_THREAD,), mask=_CLONE_THREAD | _NAMESPACES | _CLONE_PARENT),),
        "prlimit64": (ArgumentCheck(0, (0, OWN_PID)), *_CHECKED_ARGUMENTS["prlimit64"]),
    },
}
_RULES_BY_NUMBER: Mapping[str, Mapping[FilterKind, Mapping[int, SyscallRule]]] = {
    machine: {
        kind: {numbers[name]: rule for name, rule in policy.items() if name in numbers}
        for kind, policy in POLICY_OF.items()
    }
    for machine, numbers in NUMBERS.items()
}


def rule_for(number: int, machine: str, kind: FilterKind = FilterKind.NAMESPACED) -> SyscallRule:
    """Return the rule for the system call with this number on a machine of `NUMBERS`."""
    default = ALLOW if kind in ON_TOP else ENOSYS if number >= FIRST_UNKNOWN_NUMBER else EPERM
    return _RULES_BY_NUMBER[machine][kind].get(number, default)


def own_pid_offsets(program: bytes) -> list[int]:
    """Return the offsets, in bytes, of all comparisons with `OWN_PID` in a program."""
    return [
        8 * index + 4
        for index, (code, _, _, k) in enumerate(struct.iter_unpack("<HBBI", program))
        if code == bpf.IF_EQUAL and k == OWN_PID
    ]


def program(kind: FilterKind = FilterKind.NAMESPACED) -> bytes:
    """Return a filter for this machine. Raises `IsolationError` if the policy does not support the machine."""
    machine = os.uname().machine
    if machine not in NUMBERS:
        raise IsolationError(
            f"seccomp: expected a machine for which the policy is written ({', '.join(NUMBERS)}), got {machine}; "
            "use isolation=none, or another machine"
        )
    return compile_program(kind, machine)


@cache
def compile_program(kind: FilterKind, machine: str) -> bytes:
    """Compile a filter for a machine of `NUMBERS`."""
    checked = {
        name: rule for name, rule in POLICY_OF[kind].items() if isinstance(rule, tuple) and name in NUMBERS[machine]
    }
    return bpf.assemble(
        [
            bpf.Instruction(bpf.LOAD, _ARCH),
            bpf.Instruction(bpf.IF_EQUAL, AUDIT_ARCHS[machine], no=_ACTION_LABELS[ENOSYS]),
            bpf.Instruction(bpf.LOAD, _NUMBER),
            *_search_tree(_ranges(kind, machine)),
            *(instruction for name, rule in checked.items() for instruction in _checks(name, rule)),
            *(bpf.Instruction(bpf.RETURN, action, label=label) for action, label in _ACTION_LABELS.items()),
        ]
    )


# Offsets in struct seccomp_data
_NUMBER = 0
_ARCH = 4
_ARGUMENTS = 16
# Names of system calls are labels too. They have no spaces, so they differ from these labels.
_ACTION_LABELS = {ALLOW: "to allow", EPERM: "to refuse", ENOSYS: "to deny", FAKE_SUCCESS: "to fake"}


def _ranges(kind: FilterKind, machine: str) -> list[tuple[int, str]]:
    """Return (first number, jump target) in order. Each range ends where the next one begins."""
    names = {number: name for name, number in NUMBERS[machine].items()}  # the name of a call is the label of its checks

    def target(number: int) -> str:
        rule = rule_for(number, machine, kind)
        return _ACTION_LABELS[rule] if isinstance(rule, int) else names[number]

    merged = [(next(numbers), label) for label, numbers in groupby(range(FIRST_UNKNOWN_NUMBER + 1), target)]
    return [*merged, (X32_BIT, _ACTION_LABELS[ENOSYS])]


def _search_tree(ranges: Sequence[tuple[int, str]], label: str | None = None) -> list[bpf.Instruction]:
    """Return a binary search with one comparison per boundary of ranges. Its leaves jump to the ranges' targets."""
    middle = len(ranges) // 2
    boundary = ranges[middle][0]
    low, high = ranges[:middle], ranges[middle:]
    no = low[0][1] if len(low) == 1 else None  # the search in several low ranges follows this instruction
    yes = high[0][1] if len(high) == 1 else f"from {boundary}"
    return [
        bpf.Instruction(bpf.IF_AT_LEAST, boundary, yes, no, label),
        *(_search_tree(low) if len(low) > 1 else ()),
        *(_search_tree(high, yes) if len(high) > 1 else ()),
    ]


def _checks(name: str, rule: tuple[ArgumentCheck, ...]) -> Iterator[bpf.Instruction]:
    """Yield the instructions that check the arguments of the system call `name`, one check after another."""
    label: str | None = name
    for number, check in enumerate(rule, 1):
        passed = _ACTION_LABELS[ALLOW] if number == len(rule) else f"{name} {check.index}"
        yield bpf.Instruction(bpf.LOAD, _ARGUMENTS + 8 * check.index, label=label)
        label = passed
        if check.mask != 0xFFFFFFFF:
            yield bpf.Instruction(bpf.AND, check.mask)
        for value in check.fake_success_values:
            yield bpf.Instruction(bpf.IF_EQUAL, value, yes=_ACTION_LABELS[FAKE_SUCCESS])
        bound = f"{name} {check.index} bound"
        if check.bounded_value is not None:
            yield bpf.Instruction(bpf.IF_EQUAL, check.bounded_value[0], yes=bound)
        for value in check.values:
            is_last = value == check.values[-1] and check.maximum is None
            yield bpf.Instruction(bpf.IF_EQUAL, value, yes=passed, no=_ACTION_LABELS[EPERM] if is_last else None)
        if check.maximum is not None:
            yield bpf.Instruction(bpf.IF_AT_LEAST, check.maximum + 1, yes=_ACTION_LABELS[EPERM], no=passed)
        if check.bounded_value is not None:
            _, index, maximum = check.bounded_value
            yield bpf.Instruction(bpf.LOAD, _ARGUMENTS + 8 * index, label=bound)
            yield bpf.Instruction(bpf.IF_AT_LEAST, maximum + 1, yes=_ACTION_LABELS[EPERM], no=passed)
