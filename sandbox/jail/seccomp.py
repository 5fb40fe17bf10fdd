"""Which system calls a call may make: an allow-list, and its compilation to a classic BPF program.

`CALL_POLICY` is the whole truth, by name; `evaluate` reads it for one system call, slowly and obviously; `program`
compiles it, and a test holds the two together for every number. Everything not named is refused with EPERM, and the
kernel's other entries (int 0x80, x32) with ENOSYS: a kill would put a line into the host's audit log for each attempt.

What every call loads costs: the kernel translates a program, and then runs it once for each number to see which are
always allowed (those then cost nothing). Hence a balanced tree over ranges of numbers instead of a chain, whose leaves
share their returns. Where a choice was free, it was made for fewer ranges. And hence two programs where a zygote may be
bound as well: its own, inherited by all its calls, and a small one that each call adds. The kernel runs both, and the
stricter verdict holds (seccomp(2)); together they say what `CALL_POLICY` says.
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
from sandbox.jail import bpf
from sandbox.jail.syscalls import X86_64

ALLOW = 0x7FFF0000
EPERM = 0x00050001
ENOSYS = 0x00050026
FAKE_SUCCESS = 0x00050000
"""Not made, and answered with 0 (an errno of 0, seccomp(2)): for what a call may ask for and needs not have."""
ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """The low 32 bits of argument `index`, masked, are among `values`. The kernel itself reads no more than 32 bits of
    the arguments that are checked here."""

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    fake_success_values: tuple[int, ...] = ()
    """Values for which the call is `GRANTED`."""


SyscallRule = int | tuple[ArgumentCheck, ...]
"""A verdict; or conditions, of which all must hold for ALLOW, with EPERM otherwise."""

_FILES = """
    read write open close stat fstat lstat poll lseek pread64 pwrite64 readv writev access pipe select dup dup2
    fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink
    symlink readlink chmod fchmod chown fchown lchown umask utime mknod statfs fstatfs setxattr lsetxattr
    fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr
    getdents64 utimes openat mkdirat mknodat fchownat futimesat newfstatat unlinkat renameat linkat
    symlinkat readlinkat fchmodat faccessat pselect6 ppoll utimensat fallocate dup3 pipe2 preadv pwritev renameat2
    copy_file_range statx close_range openat2 faccessat2 fchmodat2
"""
# mlock is bounded by RLIMIT_MEMLOCK; mincore answers only for files that the caller may write.
_MEMORY = """
    mmap mprotect munmap brk mremap msync mincore madvise mlock munlock mlockall munlockall mlock2 pkey_mprotect
    pkey_alloc pkey_free
"""
# Signals and limits reach no further than the call's own PID namespace and uid; a hard limit only ever goes down.
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
# On the ends of a socketpair, the only sockets there are. No setsockopt: SO_ATTACH_FILTER brings BPF, and SO_PASSCRED
# a name that other calls could send to.
_SOCKETPAIRS = "shutdown getsockname getpeername getsockopt"

# libc tries this first and does without where it "does not exist"; with EPERM it would give up. The same holds for what
# kernels add later (from map_shadow_stack on).
_NOT_IMPLEMENTED = "clone3"
FIRST_UNKNOWN_NUMBER = X86_64["map_shadow_stack"]

_NAMESPACES = 0x7E020000  # every CLONE_NEW* that clone takes
_CLONE_PARENT = 0x8000
_LIMITS = (0, 1, 2, 3, *range(5, 16))  # RLIMIT_CORE is 4
_NOT_OUT_OF_BAND = 0x1  # MSG_OOB: of no use here, and a way out of browsers' sandboxes (CVE-2025-38236)
_CHECKED_ARGUMENTS: dict[str, tuple[ArgumentCheck, ...]] = {
    "clone": (ArgumentCheck(0, (0,), mask=_NAMESPACES | _CLONE_PARENT),),
    # AF_UNIX, and streams only (with or without SOCK_CLOEXEC, SOCK_NONBLOCK): the calls of a zygote share its network
    # namespace, and a datagram socket can be sent to by name.
    "socketpair": (ArgumentCheck(0, (1,)), ArgumentCheck(1, (1,), mask=~0x80800 & 0xFFFFFFFF)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": (ArgumentCheck(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_NO_NEW_PRIVS
    "prctl": (ArgumentCheck(0, (3, 15, 16, 39)),),
    # Descriptors and their flags. No leases (a call could have others wait to open what it owns), no F_NOTIFY (it tells
    # what others read), no owners and signals, no hints, which stay with files that all calls share. Locks would too, a
    # bit for each, so nobody gets any; sqlite and the like are content, since a call has its own files to itself.
    "fcntl": (ArgumentCheck(1, (0, 1, 2, 3, 4, 5, 36, 1030, 1032), fake_success_values=(6, 7, 37, 38)),),
    # No flags: RWF_NOWAIT tells what others have read lately.
    "preadv2": (ArgumentCheck(5, (0,)),),
    "pwritev2": (ArgumentCheck(5, (0,)),),
    # All limits but RLIMIT_CORE: see lifeline.NO_CORE.
    "setrlimit": (ArgumentCheck(0, _LIMITS),),
    "prlimit64": (ArgumentCheck(1, _LIMITS),),
    "sendto": (ArgumentCheck(3, (0,), mask=_NOT_OUT_OF_BAND),),
    "recvfrom": (ArgumentCheck(3, (0,), mask=_NOT_OUT_OF_BAND),),
    "recvmsg": (ArgumentCheck(2, (0,), mask=_NOT_OUT_OF_BAND),),
    "recvmmsg": (ArgumentCheck(3, (0,), mask=_NOT_OUT_OF_BAND),),
}

# Refused, among all that is not named, and why where it is not plain:
#   memfd_create, shm*, sem*, msg*, mq_*  memory that no rlimit and no tmpfs size counts
#   socket, bind, connect, inotify_*      ways for one call to reach or watch another
#   sendmsg, sendmmsg                     put descriptors into queues (SCM_RIGHTS), where they count for no limit of a
#                                         call and need the garbage collector of AF_UNIX; sendto and write send data
#   splice, tee, vmsplice, sendfile       put the page cache of shared files into pipes (Dirty Pipe); Python falls back
#   readahead, fadvise64                  decide what is in the page cache, which is everybody's
#   sync, syncfs                          would flush the host's disks
#   unshare, setns, clone's namespaces    a user namespace of its own would give a call all capabilities within
#   io_uring_*, bpf, userfaultfd, perf_event_open, keyctl, io_submit   kernel code that Python does not need

CALL_POLICY: Mapping[str, SyscallRule] = {
    **dict.fromkeys((_FILES + _MEMORY + _PROCESSES + _SIGNALS_AND_TIME + _EVENTS + _SOCKETPAIRS).split(), ALLOW),
    **dict.fromkeys(_NOT_IMPLEMENTED.split(), ENOSYS),
    "flock": FAKE_SUCCESS,
    **_CHECKED_ARGUMENTS,
}

# What Landlock leaves open (landlock(7), "Current limitations") and level `namespaces` closes by other means:
# attributes of files that a call may name, where one call could leave a note for another.
_ATTRIBUTES = "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr"

OWN_PID = 0x7FFFFFFF
"""Stands in a rule for the process that loads the filter, which the guest writes in its place (`own_pid_places`)."""
_CLONE_THREAD = 0x10000
# Calls that share the server's own uid. What a call starts could outlive it, so it starts nothing but threads; it
# signals and limits nobody but itself; and it may not change the files that this uid owns, which Landlock lets it name.
_PROCESS_STARTS = "fork vfork execve execveat tkill pidfd_open pidfd_send_signal"
_OWNED_FILE_CHANGES = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat"
_SELF_ONLY = dict.fromkeys(["kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"], (ArgumentCheck(0, (OWN_PID,)),))


# What a zygote needs to make a call ready, and its calls do not, or not with every argument.
_SETUP_CALLS = """
    unshare mount capset seccomp setgroups setresuid setresgid memfd_create clone clone3 prctl fcntl
    sendmsg
"""


class FilterKind(StrEnum):
    """Who a call is, and so how much the filter alone has to hold."""

    NAMESPACED = "namespaced"
    """In namespaces of its own."""
    ZYGOTE = "zygote"
    """The zygote of such, and so they as well."""
    CALL_ON_TOP = "added"
    """What is left to refuse to those."""
    OWN_UID = "own uid"
    """In the container's namespaces, as a user that no other process has."""
    SHARED_UID = "shared uid"
    """In the container's namespaces, as the user that the server is."""


POLICY_OF: Mapping[FilterKind, Mapping[str, SyscallRule]] = {
    FilterKind.NAMESPACED: CALL_POLICY,
    FilterKind.ZYGOTE: {**CALL_POLICY, **dict.fromkeys(_SETUP_CALLS.split(), ALLOW)},
    FilterKind.CALL_ON_TOP: {name: CALL_POLICY.get(name, EPERM) for name in _SETUP_CALLS.split()},
    FilterKind.OWN_UID: {**CALL_POLICY, **dict.fromkeys(_ATTRIBUTES.split(), EPERM)},
    FilterKind.SHARED_UID: {
        **CALL_POLICY,
        **dict.fromkeys(f"{_ATTRIBUTES} {_PROCESS_STARTS} {_OWNED_FILE_CHANGES}".split(), EPERM),
        **_SELF_ONLY,
        "clone": (ArgumentCheck(0, (_CLONE_THREAD,), mask=_CLONE_THREAD | _NAMESPACES | _CLONE_PARENT),),
        "prlimit64": (ArgumentCheck(0, (0, OWN_PID)), *_CHECKED_ARGUMENTS["prlimit64"]),
    },
}
_NUMBERED: Mapping[FilterKind, Mapping[int, SyscallRule]] = {
    policy: {X86_64[name]: rule for name, rule in rules.items()} for policy, rules in POLICY_OF.items()
}


def evaluate(
    number: int, arguments: Sequence[int], arch: int = ARCH_X86_64, policy: FilterKind = FilterKind.NAMESPACED
) -> int:
    """What the policy says to one system call; `arguments` are the six registers, 64 bits each."""
    if arch != ARCH_X86_64 or number >= X32_BIT:
        return ENOSYS
    rule = rule_for(number, policy)
    if isinstance(rule, int):
        return rule
    for when in rule:
        value = arguments[when.index] & when.mask
        if value in when.fake_success_values:
            return FAKE_SUCCESS
        if value not in when.values:
            return EPERM
    return ALLOW


def rule_for(number: int, policy: FilterKind = FilterKind.NAMESPACED) -> SyscallRule:
    """What holds for the call of the kernel with this number."""
    otherwise = ALLOW if policy is FilterKind.CALL_ON_TOP else ENOSYS if number >= FIRST_UNKNOWN_NUMBER else EPERM
    return _NUMBERED[policy].get(number, otherwise)


def own_pid_offsets(program: bytes) -> list[int]:
    """The offsets, in bytes, at which a program compares with `OWN_PID`."""
    return [
        8 * line + 4
        for line, (code, _, _, k) in enumerate(struct.iter_unpack("<HBBI", program))
        if code == bpf.IF_EQUAL and k == OWN_PID
    ]


@cache
def program(policy: FilterKind = FilterKind.NAMESPACED) -> bytes:
    """The policy as a filter for this machine. Raises `IsolationError` where there is none."""
    if os.uname().machine != "x86_64":
        raise IsolationError(
            f"seccomp: expected an x86_64 machine, for which the policy is written, got {os.uname().machine}; "
            "use isolation=none, or another machine"
        )
    return bpf.assemble(
        [
            bpf.Instruction(bpf.LOAD, _ARCH),
            bpf.Instruction(bpf.IF_EQUAL, ARCH_X86_64, no=_ACTION_LABELS[ENOSYS]),
            bpf.Instruction(bpf.LOAD, _NUMBER),
            *_search_tree(_ranges(policy)),
            *(line for name, rule in POLICY_OF[policy].items() if type(rule) is tuple for line in _check(name, rule)),
            *(bpf.Instruction(bpf.RETURN, action, label=name) for action, name in _ACTION_LABELS.items()),
        ]
    )


_ARCH, _NUMBER, _ARGUMENTS = 4, 0, 16  # offsets in struct seccomp_data
# Labels that are no call's name.
_ACTION_LABELS = {ALLOW: "to allow", EPERM: "to refuse", ENOSYS: "to deny", FAKE_SUCCESS: "to grant"}


def _ranges(policy: FilterKind) -> list[tuple[int, str]]:
    """(first number, where to go), in order; each range ends where the next begins."""
    names = {X86_64[name]: name for name in POLICY_OF[policy]}

    def target(number: int) -> str:
        rule = rule_for(number, policy)
        return _ACTION_LABELS[rule] if isinstance(rule, int) else names[number]

    merged = [(next(numbers), name) for name, numbers in groupby(range(FIRST_UNKNOWN_NUMBER + 1), target)]
    return [*merged, (X32_BIT, _ACTION_LABELS[ENOSYS])]


def _search_tree(ranges: Sequence[tuple[int, str]], label: str | None = None) -> list[bpf.Instruction]:
    """A search tree: one comparison per boundary between ranges, leaves jumping straight to the shared ends."""
    middle = len(ranges) // 2
    first = ranges[middle][0]
    low, high = ranges[:middle], ranges[middle:]
    no = low[0][1] if len(low) == 1 else None  # a bigger lower half comes right after this instruction
    yes = high[0][1] if len(high) == 1 else f"from {first}"
    return [
        bpf.Instruction(bpf.IF_AT_LEAST, first, yes, no, label),
        *(_search_tree(low) if len(low) > 1 else ()),
        *(_search_tree(high, yes) if len(high) > 1 else ()),
    ]


def _check(name: str, rule: tuple[ArgumentCheck, ...]) -> Iterator[bpf.Instruction]:
    label: str | None = name
    for when in rule:
        passed = _ACTION_LABELS[ALLOW] if when is rule[-1] else f"{name} {when.index}"
        yield bpf.Instruction(bpf.LOAD, _ARGUMENTS + 8 * when.index, label=label)
        if when.mask != 0xFFFFFFFF:
            yield bpf.Instruction(bpf.AND, when.mask)
        for value in when.fake_success_values:
            yield bpf.Instruction(bpf.IF_EQUAL, value, yes=_ACTION_LABELS[FAKE_SUCCESS])
        for value in when.values:
            last = value == when.values[-1]
            yield bpf.Instruction(bpf.IF_EQUAL, value, yes=passed, no=_ACTION_LABELS[EPERM] if last else None)
        label = passed
