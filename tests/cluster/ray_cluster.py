"""A Ray cluster of several nodes on this machine, and `serve --cluster` on it. The tests of faults use both.

`python -m tests.cluster.ray_cluster` holds the cluster: it reads commands from its standard input as JSON, one per
line, and answers each with one line. So Ray is never loaded into the process of the tests.

The head has no CPUs, so that it gets no executors. A node has one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.probes import processes
from sandbox.gateway.calls.executor_handle import EXECUTOR_MODULE

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: the extra `cluster`")
TIMEOUT_S = 60.0


class RayCluster:
    """A context manager. Nodes have numbers in the order of their addition."""

    def __enter__(self) -> RayCluster:
        self._directory = tempfile.TemporaryDirectory(prefix="rayt-", dir="/tmp")  # a socket's path must be short
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "RAY_TMPDIR": self._directory.name},
        )
        self.address: str = self._ask()["address"]
        self.raylets: list[int] = []
        """Process ids by number of the node."""
        return self

    def __exit__(self, *_: object) -> None:
        pids = processes.tree(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            for pid in pids:
                _kill(pid)
            self._process.wait()
            self._process.stdout.close()
            self._directory.cleanup()

    def add_node(self, environ: Mapping[str, str] | None = None) -> int:
        """Start a node and return its number."""
        self.raylets.append(self._ask("add", dict(environ or {}))["raylet"])
        return len(self.raylets) - 1

    def kill_node(self, number: int) -> None:
        """Kill the processes of a node with SIGKILL."""
        self._ask("kill", number)

    def actors(self, number: int) -> list[int]:
        """Return the processes of the actors of a node."""
        return [pid for pid in processes.tree(self.raylets[number]) if processes.command(pid) == "ray::NodeActor"]

    def executors(self, number: int) -> list[int]:
        """Return the executor processes of a node."""
        return [pid for pid in processes.tree(self.raylets[number]) if EXECUTOR_MODULE in processes.command(pid)]

    def sandbox_processes(self) -> list[int]:
        """Return the actors of the whole cluster and all processes below them."""
        roots = [pid for number in range(len(self.raylets)) for pid in self.actors(number)]
        return [pid for root in roots for pid in processes.tree(root)]

    def _ask(self, *command: object) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        if command:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process of the cluster has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server:
    """A running `rstar-sandbox serve --cluster`."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def post(self, path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def run(self, codes: list[str]) -> list[dict[str, Any]]:
        """Return the results of one batch."""
        results: list[dict[str, Any]] = self.post("/v1/batch", {"calls": [{"code": code} for code in codes]})["results"]
        return results

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/v1/stats", timeout=60) as response:
            stats: dict[str, Any] = json.load(response)
        return stats

    def nodes(self, state: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of all nodes, or of those in one state."""
        return [row for row in self.stats()["nodes"] if state in (None, row["state"])]

    def wait_for_nodes(self, count: int, state: str = "ready") -> None:
        """Wait until so many nodes are in a state."""
        until(lambda: len(self.nodes(state)) == count, lambda: f"{self.nodes()}\n{self.log}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(address: str, tmp_path: Path, *flags: str, nodes: int = 1) -> Iterator[Server]:
    """Run the server until `nodes` are ready."""
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "sandbox", "serve", "--cluster", f"ray={address}", "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--profiles", "bare", "--slots", "4", "--long-slots", "4", *flags], stderr=stderr, text=True
        )
    try:

        def url() -> str:
            assert process.poll() is None, log.read_text()
            match = re.search(r"^rstar-sandbox \S+ on (http://\S+)", log.read_text(), re.MULTILINE)
            return match[1] if match else ""

        server = Server(process, until(url, log.read_text), log)
        server.wait_for_nodes(nodes)
        yield server
    finally:
        pids = processes.tree(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in pids[1:]:
            _kill(pid)


def until(read: Callable[[], Any], describe: Callable[[], object] = lambda: "not in time") -> Any:
    """Return what `read` returns once it is true."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not (value := read()):
        assert time.monotonic() < give_up_at, describe()
        time.sleep(0.05)
    return value


def _kill(pid: int) -> None:
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

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes: list[Any] = []
    answer(address=cluster.address)
    for line in sys.stdin:
        match json.loads(line):
            case ["add", environ]:
                node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20, env_vars=environ)
                nodes.append(node)
                answer(raylet=node.all_processes["raylet"][0].process.pid)
            case ["kill", number]:
                cluster.remove_node(nodes[number], allow_graceful=False)
                answer()
    threading.Timer(20, os._exit, [1]).start()
    cluster.shutdown()
    os._exit(0)


if __name__ == "__main__":
    _hold_cluster()
