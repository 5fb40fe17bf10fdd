"""Attacks through networks: connections and messages by all address families."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.escape.targets import Host, Target, succeeds_without_jail

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
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        fd = raw(41, family, kind, 0)
        if fd >= 0: breach((family, kind)); os.close(fd)
""",
    "a pair of sockets with names": """
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        fds = (ctypes.c_int * 2)()
        if raw(53, family, kind, 0, fds) == 0:
            if (family, kind) != (1, 1): breach((family, kind))
            os.close(fds[0]); os.close(fds[1])
""",
    "the kernel by netlink": """
if works(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))): breach("netlink")
""",
    "the hypervisor by vsock": """
got = attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
if getattr(got, "errno", errno.EAFNOSUPPORT) == errno.EAFNOSUPPORT: breach("vsock, where there is one")
""",
    "the kernel's cryptography": """
got = attempt(lambda: socket.socket(38, socket.SOCK_SEQPACKET, 0))
if getattr(got, "errno", errno.EAFNOSUPPORT) == errno.EAFNOSUPPORT: breach("AF_ALG, where there is one")
""",
    "frames on the wire": """
if works(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)): breach("packets")
""",
    "a name server": """
got = attempt(socket.getaddrinfo, "localhost", HOST["port"])
if not isinstance(got, OSError) and works(socket.create_connection, got[0][4][:2], 5): breach(got)
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
ours, theirs = socket.socketpair()
for action in (lambda: ours.bind("\\0name"), lambda: ours.connect(HOST["abstract"]), lambda: ours.listen(),
             lambda: ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)):
    if works(action): breach("named")
""",
}


@pytest.mark.parametrize("attack", REACHING)
def test_reaching(attack: str, target: Target) -> None:
    target.resists(REACHING[attack])


@pytest.mark.parametrize("attack", REACHING)
def test_reaching_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, REACHING[attack], tmp_path)
