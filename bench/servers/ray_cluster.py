"""A Ray cluster of several nodes on this machine.

The process `python -m bench.servers.ray_cluster` owns the cluster: it reads commands from its standard input as JSON,
one per line, and answers each with one line. So Ray is never loaded into the process that measures or tests.

The head has no CPUs, so it gets no executors. All nodes are on one machine. So the cluster shows the effects of a lost
node, but no speed-up. With `networks`, each node has an address and a network of its own, and the network can be cut.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from bench.harness.command import BenchFailed
from bench.probes import processes
from bench.servers.node_networks import NodeNetworks
from sandbox.gateway.calls.executor_handle import EXECUTOR_MODULE

STOP_TIMEOUT_S = 30.0
OBJECT_STORE_BYTES = 100 << 20


class RayCluster:
    """A context manager. Nodes are numbered in the order in which they are added. A number is never used again."""

    def __init__(self, *, networks: bool = False) -> None:
        self.has_networks = networks
        self._flags = ["--networks"] if networks else []

    def __enter__(self) -> RayCluster:
        self._directory = tempfile.TemporaryDirectory(prefix="rayt-", dir="/tmp")  # a socket's path must be short
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.servers.ray_cluster", *self._flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "RAY_TMPDIR": self._directory.name},
        )
        try:
            self.address: str = self._answer()["address"]
        except BaseException:
            self.__exit__()
            raise
        self.raylets: list[int] = []
        """Process ids by number of the node."""
        return self

    def __exit__(self, *_: object) -> None:
        pids = processes.tree(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for pid in pids:
                kill(pid)
            self._process.wait()
            self._process.stdout.close()
            self._directory.cleanup()

    def add_node(self, num_cpus: int = 1, environ: Mapping[str, str] | None = None) -> int:
        """Start a node and return its number."""
        self.raylets.append(self._ask("add", num_cpus, dict(environ or {}))["raylet"])
        return len(self.raylets) - 1

    def kill_node(self, number: int) -> None:
        """Kill the processes of a node with SIGKILL."""
        self._ask("kill", number)

    def cut(self, number: int) -> None:
        """Have all packets from and to a node vanish."""
        self._ask("cut", number)

    def restore(self, number: int) -> None:
        """Undo `cut`."""
        self._ask("restore", number)

    def processes(self, number: int) -> list[int]:
        """Return the raylet of a node and all processes below it."""
        return processes.tree(self.raylets[number])

    def actors(self, number: int) -> list[int]:
        """Return the processes of the server's actors on a node."""
        return [pid for pid in self.processes(number) if processes.command(pid) == "ray::NodeActor"]

    def executors(self, number: int) -> list[int]:
        """Return the executor processes of a node."""
        return [pid for pid in self.processes(number) if EXECUTOR_MODULE in processes.command(pid)]

    def sandbox_processes(self) -> list[int]:
        """Return the server's actors in the whole cluster and all processes below them."""
        roots = [pid for number in range(len(self.raylets)) for pid in self.actors(number)]
        return [pid for root in roots for pid in processes.tree(root)]

    def _ask(self, *command: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed("the process of the Ray cluster has ended; is the extra `cluster` installed?")
        answer: dict[str, Any] = json.loads(line)
        return answer


def kill(pid: int) -> None:
    """Kill a process unless it has ended."""
    if processes.state(pid) not in ("", "Z"):
        os.kill(pid, signal.SIGKILL)


def _hold_cluster() -> None:
    import warnings

    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster

    answers = os.dup(1)
    os.dup2(2, 1)  # Ray prints to stdout

    def answer(**fields: object) -> None:
        os.write(answers, (json.dumps(fields) + "\n").encode())

    with ExitStack() as stack:
        networks = stack.enter_context(NodeNetworks()) if "--networks" in sys.argv else None
        options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        head = options | {"num_cpus": 0} | ({"node_ip_address": networks.host} if networks else {})
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes: list[Any] = []
        answer(address=cluster.address)
        for line in sys.stdin:
            match json.loads(line):
                case ["add", num_cpus, environ]:
                    options |= {"num_cpus": num_cpus, "env_vars": environ}
                    if networks is None:
                        node = cluster.add_node(**options)
                    else:
                        number, address = networks.add()
                        with networks.entered(number):
                            node = cluster.add_node(node_ip_address=address, **options)
                    nodes.append(node)
                    answer(raylet=node.all_processes["raylet"][0].process.pid)
                case ["kill", number]:
                    cluster.remove_node(nodes[number], allow_graceful=False)
                    answer()
                case ["cut", number] if networks:
                    networks.cut(number)
                    answer()
                case ["restore", number] if networks:
                    networks.restore(number)
                    answer()
        timer = threading.Timer(STOP_TIMEOUT_S, os._exit, [1])
        timer.start()
        cluster.shutdown()
    os._exit(0)


if __name__ == "__main__":
    _hold_cluster()
