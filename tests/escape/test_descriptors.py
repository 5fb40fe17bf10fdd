"""Attacks through descriptors: misuse of the input's file, and passing descriptors over sockets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.escape.targets import Host, Target, succeeds_without_jail

INPUT = """
if not HOST["is_jailed"]:
    fd = os.memfd_create("input", 2); os.write(fd, b"of this call"); os.dup2(fd, 0); os.lseek(0, 0, 0)
"""
MISUSES = {
    "growing the input by its size": "if works(os.ftruncate, 0, 8 << 20): breach('grown')",
    "growing the input by a write": "if works(os.pwrite, 0, b'x', 8 << 20): breach('grown')",
    "growing the input ahead": "if works(os.posix_fallocate, 0, 0, 8 << 20): breach('grown')",
    "changing the input by a write": "if works(os.pwrite, 0, b'x', 0): breach('written')",
    "changing the input by a map": """
import mmap
if works(mmap.mmap, 0, 1): breach('mapped')
""",
    "emptying the input": "if works(os.ftruncate, 0, 0): breach('emptied')",
    "unsealing the input": """
for seal in (2, 4, 8):  # F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE
    if raw('fcntl', 0, 1033, seal) == 0: breach(seal)  # F_ADD_SEALS
""",
}
MISUSES["executing the input"] = """
# execveat(2) with AT_EMPTY_PATH. ENOEXEC would mean that the input may be executed.
got = raw('execveat', 0, b"", 0, 0, 0x1000)
if got not in (-errno.EACCES, -errno.EPERM): breach(got)
"""
MISUSES["executing the input once it is made a program"] = (
    "attempt(os.fchmod, 0, 0o777)\n" + MISUSES["executing the input"]
)


@pytest.mark.parametrize("attack", MISUSES)
def test_input_can_only_be_read(attack: str, target: Target) -> None:
    if "made a program" in attack and [int(n) for n in os.uname().release.split(".")[:2]] < [6, 3]:
        pytest.skip("needs MFD_NOEXEC_SEAL (Linux 6.3); earlier kernels let the owner make the file executable")
    result = target.resists(INPUT + MISUSES[attack] + "\nos.write(1, os.read(0, 100))", stdin="of this call")
    assert result.stdout == "of this callEND\n"


@pytest.mark.parametrize("attack", MISUSES)
def test_misuse_of_input_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, INPUT + MISUSES[attack], tmp_path)


SENDING = """
import _socket
def sent(sock, fds):
    return attempt(_socket.socket.sendmsg, sock, [b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))])
"""
PASSING = {
    "a descriptor to a socket of its own": """
ours, theirs = socket.socketpair()
if not isinstance(sent(ours, [1]), OSError): breach(socket.recv_fds(theirs, 1, 4)[1])
""",
    "a descriptor among many messages": """
ours, theirs = socket.socketpair()
# sendmmsg(2) of one struct mmsghdr with SCM_RIGHTS
space = ctypes.create_string_buffer(struct.pack("QiiI4x", 20, 1, 1, 1))
data = ctypes.create_string_buffer(b"x", 1)
vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(data), 1))
message = struct.pack("QI4xQQQQi4xI4x", 0, 0, ctypes.addressof(vector), 1, ctypes.addressof(space), 24, 0, 0)
if raw('sendmmsg', ours.fileno(), message, 1, 0) == 1: breach(socket.recv_fds(theirs, 1, 4)[1])
""",
    "more descriptors than it may hold": """
pairs, held = [socket.socketpair() for _ in range(4)], 0
for ours, _ in pairs:
    for _ in range(2):
        if not isinstance(sent(ours, [1] * 200), OSError): held += 200
if held > 256: breach(held)
""",
    "a socket into its own queue, which only a garbage collector frees": """
ours, theirs = socket.socketpair()
if not isinstance(sent(ours, [theirs.fileno(), ours.fileno()]), OSError): breach("left")
""",
    "its identity": """
ours, theirs = socket.socketpair()
credentials = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
if works(_socket.socket.sendmsg, ours, [b"x"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)]): breach("sent")
""",
    "a descriptor to an inherited socket": """
if not HOST["is_jailed"]: ours, theirs = socket.socketpair(); os.dup2(ours.fileno(), 3)
null = os.open("/dev/null", os.O_RDONLY)
for fd in range(4):
    got = attempt(lambda: socket.socket(fileno=os.dup(fd)))
    if not isinstance(got, OSError) and not isinstance(sent(got, [null]), OSError): breach(fd)
""",
}


@pytest.mark.parametrize("attack", PASSING)
def test_a_call_cannot_pass(attack: str, target: Target) -> None:
    target.resists(SENDING + PASSING[attack])


@pytest.mark.parametrize("attack", PASSING)
def test_passing_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, SENDING + PASSING[attack], tmp_path)
