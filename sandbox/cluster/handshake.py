"""The start of a connection between the gateway and the agent of a node, before the first frame.

    hello     agent -> gateway   MAGIC, nonce of the agent
    request   gateway -> agent   nonce of the gateway, executor, generation, HMAC of hello and of these three fields
    reply     agent -> gateway   HMAC of hello and request

- An agent is the process on a node that starts executors there. HMAC is a message authentication code.
- Both ends prove that they know the secret of this `serve` run. Before that, neither end sends anything else.
- `generation` is the number of this start. A `serve` run numbers all starts of executors, on all nodes, from 1. An
  agent rejects a number that is not higher than the last number for the same executor. If the agent accepts the number,
  it kills the process of the executor's last start.
- The connection is neither encrypted nor protected against changes after the handshake.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass

from sandbox.errors import ProtocolError

MAGIC = b"rstar-sandbox/1\n"
NONCE_BYTES = 32
TIMEOUT_S = 5.0
"""Seconds for the whole handshake, the TCP connection included."""
_START = struct.Struct("<QQ")
_MAC_BYTES = hashlib.sha256().digest_size
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
REQUEST_BYTES = NONCE_BYTES + _START.size + _MAC_BYTES
REPLY_BYTES = _MAC_BYTES
CUT_TIMEOUT_S = 10
"""Seconds without an acknowledgement from the other end after which the kernel ends a connection."""


@dataclass(frozen=True, slots=True)
class ExecutorStart:
    """One start of an executor: the executor's number on its node, and the number of the start."""

    executor: int
    generation: int


def encode_request(secret: bytes, hello: bytes, nonce: bytes, start: ExecutorStart) -> bytes:
    """Encode the gateway's message. Raises `ProtocolError` if `hello` is not the first message of an agent."""
    if not hello.startswith(MAGIC):
        raise ProtocolError(f"expected an agent of rstar-sandbox, got {hello[: len(MAGIC)]!r}")
    body = nonce + _START.pack(start.executor, start.generation)
    return body + _mac(secret, b"gateway", hello + body)


def decode_request(secret: bytes, hello: bytes, request: bytes) -> ExecutorStart:
    """Decode the gateway's message. Raises `ProtocolError` if its HMAC is wrong."""
    body, mac = request[:-_MAC_BYTES], request[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"gateway", hello + body)):
        raise ProtocolError("the gateway does not know the secret of this agent")
    return ExecutorStart(*_START.unpack(body[NONCE_BYTES:]))


def encode_reply(secret: bytes, hello: bytes, request: bytes) -> bytes:
    return _mac(secret, b"agent", hello + request)


def check_reply(secret: bytes, hello: bytes, request: bytes, reply: bytes) -> None:
    """Raises `ProtocolError` if the HMAC of the agent's reply is wrong."""
    if not hmac.compare_digest(reply, _mac(secret, b"agent", hello + request)):
        raise ProtocolError("the agent does not know the secret of this gateway")


def set_tcp_options(sock: socket.socket) -> None:
    """Send frames without delay. Have the kernel end the connection within `CUT_TIMEOUT_S` of a network cut: by
    TCP_USER_TIMEOUT if data is on its way, otherwise by keep-alive (tcp(7))."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # 4 s of silence, then 3 probes with 2 s for each: CUT_TIMEOUT_S together.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CUT_TIMEOUT_S * 1000)


def _mac(secret: bytes, sender: bytes, message: bytes) -> bytes:
    """Return the HMAC of a message. It covers the name of the sender, so that the HMAC of one end is never valid as
    that of the other end. The NUL byte ends the name."""
    return hmac.digest(secret, sender + b"\0" + message, "sha256")
