"""Attacks through networks: connections and messages by all address families."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.escape.targets import Host, Target, succeeds_without_jail, with_controls_of_root

REACHING = {
    "a server of the host": """
if works(socket.create_connection, ("127.0.0.1", HOST["port"]), 5): breach("connected")
""",
    "a server by its Unix socket": """
if works(lambda: socket.socket(socket.AF_UNIX).connect(HOST["path"])): breach("connected")
""",
    "a server by its abstract Unix socket": """
if works(lambda: socket.socket(socket.AF_UNIX).connect(HOST["abstract"])): breach("connected")
""",
    "a socket of any family": """
# SOCK_STREAM, SOCK_DGRAM, SOCK_RAW and SOCK_SEQPACKET of all address families
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        fd = raw(41, family, kind, 0)  # socket(2)
        if fd >= 0:
            if (family, kind) != (socket.AF_UNIX, socket.SOCK_STREAM): breach((family, kind))
            os.close(fd)
""",
    "a pair of sockets with names": """
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        fds = (ctypes.c_int * 2)()
        if raw(53, family, kind, 0, fds) == 0:  # socketpair(2)
            if (family, kind) != (socket.AF_UNIX, socket.SOCK_STREAM): breach((family, kind))
            os.close(fds[0]); os.close(fds[1])
""",
    "the kernel by netlink": """
if works(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))): breach("netlink")
""",
    "the hypervisor by vsock": """
result = attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
# A socket has no errno. A machine without vsock answers EAFNOSUPPORT, where a filter would have answered EPERM.
if getattr(result, "errno", errno.EAFNOSUPPORT) == errno.EAFNOSUPPORT: breach("vsock")
""",
    "the kernel's cryptography": """
result = attempt(lambda: socket.socket(38, socket.SOCK_SEQPACKET, 0))  # AF_ALG
if getattr(result, "errno", errno.EAFNOSUPPORT) == errno.EAFNOSUPPORT: breach("AF_ALG")
""",
    "frames on the wire": """
if works(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)): breach("packets")
""",
    "a name server": """
addresses = attempt(socket.getaddrinfo, "localhost", HOST["port"])
if not isinstance(addresses, OSError) and works(socket.create_connection, addresses[0][4][:2], 5): breach(addresses)
""",
    "the names of interfaces": """
names = attempt(socket.if_nameindex)
if not isinstance(names, OSError): breach(names)
""",
    "a listening port": """
if works(lambda: socket.create_server(("127.0.0.1", 0))): breach("listening")
""",
    "other calls by an abstract name": """
def serve():
    server = socket.socket(socket.AF_UNIX); server.bind(HOST["abstract"] + "2"); server.listen()
if works(serve): breach("listening")
""",
    "an old socket by a new name": """
one_end, other_end = socket.socketpair()
for own in (one_end, socket.socket(socket.AF_UNIX)):
    for action in (lambda: own.bind("\\0name"), lambda: own.connect(HOST["abstract"]), lambda: own.listen(),
                   lambda: own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)):
        if works(action): breach("named")
""",
}


@pytest.mark.parametrize("attack", REACHING)
def test_a_call_cannot_reach(attack: str, target: Target) -> None:
    target.resists(REACHING[attack])


@pytest.mark.parametrize("attack", with_controls_of_root(REACHING, "frames on the wire"))
def test_reaching_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, REACHING[attack], tmp_path)
