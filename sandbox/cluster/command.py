"""`rstar-sandbox serve --cluster ray[=ADDRESS]`: checks the address, then runs the gateway with the nodes of Ray."""

from __future__ import annotations

import functools
import importlib.util
import socket
from collections.abc import Mapping

from sandbox.cluster.membership import ClusterMembership
from sandbox.cluster.ray_driver import RayDriver
from sandbox.errors import ClusterError
from sandbox.gateway import serve
from sandbox.settings.server import ServeConfig

CONNECT_TIMEOUT_S = 5.0
"""Maximum seconds for each of two steps: to connect, and to wait for the first bytes."""
HTTP2_SETTINGS = b"\x04"
"""Type of the frame that each end of an HTTP/2 connection, and so of a gRPC connection, sends first (RFC 9113, 3.4)."""
HTTP2_HEADER_BYTES = 9
"""Length of the header of an HTTP/2 frame. The fourth byte is the type of the frame."""
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + HTTP2_SETTINGS + bytes(5)


def serve_cluster(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. Raises `ClusterError` if no Ray answers, or if Ray is
    not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("--cluster needs Ray; install it with pip install 'rstar-sandbox[cluster]'")
    if config.ray_address != "auto":
        _check_address(config.ray_address)
    return serve(config, membership=ClusterMembership(config, functools.partial(_driver, config)))


def _driver(config: ServeConfig, secret: bytes) -> RayDriver:
    start: Mapping[str, object] = {
        "address": config.ray_address,
        "secret": secret,
        "isolation": config.isolation,
        "python": config.python or "",
    }
    return RayDriver(start)


def _check_address(address: str) -> None:
    """Raises `ClusterError` if no gRPC server listens at HOST:PORT. Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as sock:
            sock.sendall(HTTP2_START)
            answer = sock.recv(HTTP2_HEADER_BYTES, socket.MSG_WAITALL)
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterError(f"--cluster ray={address}: no Ray answers there ({error})") from None
    if answer[3:4] != HTTP2_SETTINGS:
        raise ClusterError(f"--cluster ray={address}: no Ray answers there, but another server: {answer!r}")
