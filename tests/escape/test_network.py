"""Attacks through networks: connections and messages by all address families."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.types import Network, Status
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
        fd = raw('socket', family, kind, 0)
        if fd >= 0:
            if family != socket.AF_UNIX or kind not in (socket.SOCK_STREAM, socket.SOCK_DGRAM): breach((family, kind))
            os.close(fd)
""",
    "a pair of sockets with names": """
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        fds = (ctypes.c_int * 2)()
        if raw('socketpair', family, kind, 0, fds) == 0:
            if family != socket.AF_UNIX or kind not in (socket.SOCK_STREAM, socket.SOCK_DGRAM): breach((family, kind))
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
    "a server with an old socket": """
one_end, other_end = socket.socketpair()
for own in (one_end, socket.socket(socket.AF_UNIX)):
    for action in (lambda: own.connect(HOST["abstract"]), lambda: own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)):
        if works(action): breach("connected")
""",
}


@pytest.mark.parametrize("attack", REACHING)
def test_a_call_cannot_reach(attack: str, target: Target) -> None:
    target.resists(REACHING[attack])


@pytest.mark.parametrize("attack", with_controls_of_root(REACHING, "frames on the wire"))
def test_reaching_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, REACHING[attack], tmp_path)


LOOPBACK = {
    "a server of the host": REACHING["a server of the host"],
    "a server by its abstract Unix socket": REACHING["a server by its abstract Unix socket"],
    "the ports of the host": """
if not works(socket.create_server, ("127.0.0.1", HOST["port"])): breach("in use")
""",
    "other networks": """
for address in ("192.0.2.1", "10.0.0.1", "169.254.169.254"):
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if works(client.connect, (address, 80)): breach(address)
""",
    "raw packets": """
for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (17, 3, 768), (16, 3, 0), (10, 1, 0), (2, 1, 262), (2, 1, 132)):
    if raw('socket', family, kind, protocol) >= 0: breach((family, kind, protocol))
""",
    "the kernel by options of sockets": """
own = socket.socket()
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
if works(own.setsockopt, socket.SOL_SOCKET, 26, program): breach("SO_ATTACH_FILTER")
if works(own.setsockopt, 0, 64, bytes(84)) or works(own.setsockopt, 6, 31, b"tls"): breach("netfilter or TLS")
""",
    "the configuration of its network": """
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for request in (0x8914, 0x894C):  # SIOCSIFFLAGS with the flags that it has, SIOCGSKNS
    if raw('ioctl', own.fileno(), request, ctypes.create_string_buffer(struct.pack("16sH22x", b"lo", 0x49))) >= 0: breach(request)
""",
}


@pytest.mark.parametrize("attack", LOOPBACK)
def test_a_call_with_loopback_cannot_reach(attack: str, target: Target) -> None:
    if target.level == "landlock":
        result = target.run(LOOPBACK[attack], network=Network.LOOPBACK)
        assert result.status is Status.INVALID and result.error is not None
        assert "level landlock has no private network" in result.error.message
        return
    target.resists(LOOPBACK[attack], network=Network.LOOPBACK)


# A machine without a route to other networks stops that attack even without a jail.
@pytest.mark.parametrize(
    "attack",
    with_controls_of_root(
        [attack for attack in LOOPBACK if attack != "other networks"],
        "raw packets",
        "the configuration of its network",
        "the kernel by options of sockets",
    ),
)
def test_reaching_with_loopback_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, LOOPBACK[attack], tmp_path)


LISTENING = """
server = socket.create_server(("127.0.0.1", 8000))
named = socket.socket(socket.AF_UNIX); named.bind("\\0escape"); named.listen()
"""
CONNECTING = """
if works(socket.create_connection, ("127.0.0.1", 8000), 5): breach("connected")
if works(lambda: socket.socket(socket.AF_UNIX).connect("\\0escape")): breach("connected by name")
"""


@pytest.mark.parametrize("receiver", list(Network))
def test_a_call_with_loopback_cannot_reach_another(receiver: Network, target: Target) -> None:
    if target.level == "landlock":
        pytest.skip("landlock: has no private network")
    # A call that connects to its own sockets shows that the attack works.
    itself = target.run(LISTENING + CONNECTING, network=Network.LOOPBACK)
    assert itself.stdout == "BREACH connected\nBREACH connected by name\nEND\n"
    with target.sleeping_call(target.host.attack_program(LISTENING), network=Network.LOOPBACK):
        target.resists(CONNECTING, network=receiver)


BACKLOG = """
server = socket.socket(socket.AF_UNIX)
server.bind("s")
raw('listen', server.fileno(), 4096)
server.listen(4096)
kept = []
while len(kept) < 150:
    kept.append(socket.socket(socket.AF_UNIX)); kept[-1].setblocking(False)
    if not works(kept[-1].connect, "s"): break
else: breach(len(kept))
"""


def test_the_queue_of_connections_is_short(target: Target) -> None:
    """A waiting connection can hold 208 KiB of kernel memory, and needs no descriptor of the call. So the queue must be
    short."""
    if target.level == "landlock":
        pytest.skip("landlock: sockets have no names")
    target.resists(BACKLOG)


def test_a_long_queue_of_connections_is_possible_without_a_jail(host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, BACKLOG, tmp_path)
