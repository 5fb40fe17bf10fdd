"""`rstar-sandbox serve --cluster ray[=ADDRESS]`: checks the address, then runs the gateway with the nodes of Ray."""

from __future__ import annotations

import functools
import importlib.util
import socket
from collections.abc import Mapping

from sandbox.cluster.membership import ClusterMembership
from sandbox.cluster.ray_driver import RayDriver
from sandbox.config import ServeConfig
from sandbox.errors import ClusterError
from sandbox.gateway import serve

CONNECT_TIMEOUT_S = 5.0


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
    """Raises `ClusterError` if nothing listens at HOST:PORT. Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"--cluster ray={address}: no Ray answers there ({error})") from None
