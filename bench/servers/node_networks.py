"""Network namespaces for the nodes of a cluster on one machine, so that the network of one node can be cut.

    this machine, bridge 10.213.N.1 ── veth ── namespace of node K, 10.213.N.K+2

A cut takes the node's link down: packets vanish in both directions, and no connection is closed. Needs root, and ip(8)
of iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000


def are_available() -> bool:
    """Whether this process may create network namespaces and bridges."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with NodeNetworks():
            return True
    except subprocess.CalledProcessError:
        return False


class NodeNetworks:
    """A context manager: a bridge, and a namespace for each `add`. All are removed at the end."""

    def __enter__(self) -> NodeNetworks:
        number = random.SystemRandom().randrange(1, 255)
        self._prefix, self._subnet = f"rsb{number}", f"10.213.{number}"
        self._count = 0
        self.host = f"{self._subnet}.1"
        """This machine's address on the bridge."""
        _ip("link", "add", self._prefix, "type", "bridge")
        _ip("addr", "add", f"{self.host}/24", "dev", self._prefix)
        _ip("link", "set", self._prefix, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(self._count):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._name(number))
        _ip("link", "del", self._prefix)

    def add(self) -> tuple[int, str]:
        """Create a namespace. Return its number and its address."""
        number, self._count = self._count, self._count + 1
        name, address = self._name(number), f"{self._subnet}.{number + 2}"
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", self._prefix, "up")
        for command in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", name, *command)
        return number, address

    def cut(self, number: int) -> None:
        _ip("link", "set", self._name(number), "down")

    def restore(self, number: int) -> None:
        _ip("link", "set", self._name(number), "up")

    @contextmanager
    def entered(self, number: int) -> Iterator[None]:
        """Have this thread, and processes that it starts, use the network of a node."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self._name(number)}") as inside:
            _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def _name(self, number: int) -> str:
        return f"{self._prefix}n{number}"


def _enter(namespace_fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace_fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
