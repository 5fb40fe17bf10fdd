"""Attacks on the kernel: system calls outside the policy, other entries, and refused arguments of allowed calls."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path

import pytest

from tests.escape.targets import SYSTEM_CALLS, Host, Target, succeeds_without_jail, with_controls_of_root

DANGEROUS: dict[str, str] = {
    "other processes": "ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise process_mrelease",
    "kernel code": "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register io_setup io_submit",
    "keyrings": "add_key request_key keyctl",
    "modules and other kernels": "init_module finit_module delete_module kexec_load kexec_file_load reboot",
    "mounts": "mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr",
    "namespaces": "unshare setns",
    "files past the path": "open_by_handle_at name_to_handle_at fanotify_init fanotify_mark",
    "identities": "setfsuid setfsgid setgroups capset",
    "clocks and names": "settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname",
    "hardware": "iopl ioperm modify_ldt swapon swapoff acct quotactl syslog",
    "priorities": "setpriority sched_setscheduler sched_setparam sched_setattr sched_setaffinity ioprio_set",
    "memory of other nodes": "migrate_pages move_pages mbind set_mempolicy",
    "networks": "socket sendmsg sendmmsg",
    "System V IPC": "shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv msgctl",
    "message queues": "mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify",
    "watching files": "inotify_init inotify_init1 inotify_add_watch",
    "pipes full of page cache": "splice tee vmsplice sendfile readahead fadvise64",
    "memory without limits": "memfd_create memfd_secret",
    "filters": "seccomp landlock_create_ruleset landlock_restrict_self personality",
}
"""System calls that attackers try first, by purpose."""

TRY_CALLS = """
for name, number in {numbers!r}.items():
    # If the call is allowed, these arguments are harmless: invalid pointers, descriptors and flags.
    got = raw(number, *{harmless!r}.get(name, [-1] * 6))
    if got not in (-errno.EPERM, -errno.ENOSYS): breach(name)
"""
HARMLESS_ARGUMENTS: dict[str, list[int]] = {
    "msgget": [0x7FFFFFF1, 0],
    "semget": [0x7FFFFFF1, 0, 0],
    "shmget": [0x7FFFFFF1, 0, 0],
    "sync": [],
}


def try_calls(names: str) -> str:
    numbers = {name: SYSTEM_CALLS[name] for name in names.split() if name in SYSTEM_CALLS}
    return TRY_CALLS.format(numbers=numbers, harmless=HARMLESS_ARGUMENTS)


@pytest.mark.parametrize("attack", DANGEROUS)
def test_system_calls_are_refused_for(attack: str, target: Target) -> None:
    target.resists(try_calls(DANGEROUS[attack]))


@pytest.mark.parametrize("attack", with_controls_of_root(DANGEROUS, "modules and other kernels"))
def test_system_call_is_allowed_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, try_calls(DANGEROUS[attack]), tmp_path)


@cache
def _allowed() -> frozenset[str]:
    """Return the system calls that the policy does not refuse."""
    from sandbox.jail.seccomp import EPERM, NAMED_SOCKETS, rule_for

    machine = os.uname().machine
    allowed = {name for name, number in SYSTEM_CALLS.items() if rule_for(number, machine) != EPERM}
    return frozenset(allowed | NAMED_SOCKETS.keys())


def test_every_system_call_outside_the_policy_is_refused(target: Target) -> None:
    target.resists(try_calls(" ".join(SYSTEM_CALLS.keys() - _allowed())))


OTHER_IDS = """
for number in (os.setuid, os.setgid, lambda n: os.setreuid(n, n), lambda n: os.setregid(n, n),
               lambda n: os.setresuid(n, n, n), lambda n: os.setresgid(n, n, n)):
    for other in {0, 1, 1000, 65534, os.getuid() + 1} - {os.getuid(), os.getgid()}:
        if works(number, other): breach(other)
"""


def test_a_call_cannot_take_other_ids(target: Target) -> None:
    target.resists(OTHER_IDS)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the kernel stops the attack of other users")
def test_taking_other_ids_succeeds_without_a_jail(host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, OTHER_IDS, tmp_path)


def test_system_calls_that_do_not_exist_yet_are_refused(target: Target) -> None:
    # On x86_64, 335 (uretprobe) and 336 (uprobe) kill a process that uses them outside of a probe.
    unused = {*range(424), *range(453, 1024), 0x3FFFFFFF} - {335, 336, *SYSTEM_CALLS.values()}
    target.resists(TRY_CALLS.format(numbers={f"number {n}": n for n in unused}, harmless={}))


RUN_MACHINE_CODE = """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex({code!r}))
got = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
if got > 0: breach(got)
print("got", got)
"""
ENTRIES = {
    # mov eax, 20 (getpid of i386); int 0x80; ret
    "of i386 by int 0x80": "b814000000cd80c3",
    # mov eax, 0x40000027 (getpid of x32, which kernels are seldom built with, or plain getpid); syscall; ret
    "of x32": "b8270000400f05c3",
}


on_x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86_64 has these entries")


@on_x86_64
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_kernel_refuses_the_entry(entry: str, target: Target) -> None:
    """The entry fails with ENOSYS. If the filter killed the process, each attempt would write to the audit log."""
    result = target.resists(RUN_MACHINE_CODE.format(code=ENTRIES[entry]))
    assert result.stdout == f"got {-errno.ENOSYS}\nEND\n"


@on_x86_64
def test_the_entry_of_i386_works_without_a_jail(host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, RUN_MACHINE_CODE.format(code=ENTRIES["of i386 by int 0x80"]), tmp_path)


ARGUMENTS = {
    "a user namespace by unshare": "if raw('unshare', 0x10000000) == 0: breach('unshare')  # CLONE_NEWUSER",
    "a user namespace by clone": """
pid = raw('clone', 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)  # CLONE_NEWUSER
if pid == 0: os._exit(0)
if pid > 0: breach('clone')
""",
    "a user namespace by clone3": """
args = struct.pack('8Q', 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
pid = raw('clone3', args, len(args))  # CLONE_NEWUSER
if pid == 0: os._exit(0)
if pid > 0: breach('clone3')
""",
    "a sibling outside of the PID namespace, by CLONE_PARENT": """
pid = raw('clone', 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: breach('clone')
""",
    "which files are in the page cache, by RWF_NOWAIT": """
fd = os.open(os.__file__, os.O_RDONLY)
got = attempt(os.preadv, fd, [bytearray(1)], 0, 8)  # RWF_NOWAIT
if got == 1 or getattr(got, 'errno', 0) == errno.EAGAIN: breach(got)
""",
    "out-of-band data in Unix sockets, once a way out of sandboxes": """
ours, theirs = socket.socketpair()
if attempt(ours.send, b'x', socket.MSG_OOB) == 1: breach('sent')
""",
    "a lease on a shared file": """
for path in PROTECTED_PATHS:
    fd = attempt(os.open, path, os.O_RDONLY)
    for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
        if isinstance(fd, int) and works(fcntl.fcntl, fd, fcntl.F_SETLEASE, kind): breach(path)
""",
    "notification of reads by others, by dnotify": """
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
if works(fcntl.fcntl, fd, fcntl.F_NOTIFY, fcntl.DN_ACCESS): breach('watching')
""",
    "signals on behalf of a descriptor": """
ours, theirs = socket.socketpair()
if works(fcntl.fcntl, ours, fcntl.F_SETOWN, os.getpid()): breach('F_SETOWN')
if works(fcntl.fcntl, ours, 10, signal.SIGUSR1): breach('F_SETSIG')
if raw('fcntl', ours.fileno(), 15, struct.pack('ii', 1, os.getpid())) == 0: breach('F_SETOWN_EX')
""",
    "a hint for a shared inode": """
fd = os.open(DEVICE, os.O_RDWR)
if raw('fcntl', fd, 1036, struct.pack('Q', 2)) == 0: breach('F_SET_RW_HINT')
""",
    "typing into a terminal": """
import termios
for fd in range(5):
    if works(fcntl.ioctl, fd, termios.TIOCSTI, b'x'): breach(fd)
    got = attempt(fcntl.ioctl, fd, termios.TIOCGPGRP, bytes(4))
    if getattr(got, 'errno', 0) != errno.EPERM: breach(got)
""",
    "network interfaces through any descriptor": """
for fd in range(5):
    got = attempt(fcntl.ioctl, fd, 0x8912, bytes(16))  # SIOCGIFCONF
    if getattr(got, 'errno', 0) not in (errno.EPERM, errno.EBADF): breach(got)
""",
    "speculation and dumps by prctl": """
for option in (4, 22, 23, 24, 26, 28, 47, 50, 53, 59, 65, 67, 0x59616d61):
    got = raw('prctl', option, 0, 0, 0, 0)
    if got != -errno.EPERM: breach((option, got))
""",
}
"""Allowed system calls with arguments that must be refused."""


@pytest.mark.parametrize("attack", ARGUMENTS)
def test_arguments_are_refused_for(attack: str, target: Target) -> None:
    target.resists(ARGUMENTS[attack])


@pytest.mark.parametrize("attack", ARGUMENTS)
def test_argument_is_accepted_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, ARGUMENTS[attack], tmp_path)
