"""`serve --cluster` on a Ray cluster of this machine, in its own process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.probes import processes
from bench.servers.ray_cluster import kill

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: the extra `cluster`")
TIMEOUT_S = 120.0


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
        """Wait until `count` nodes are in a state."""
        until(lambda: len(self.nodes(state)) == count, lambda: f"{self.nodes()}\n{self.log}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(
    address: str, tmp_path: Path, *flags: str, nodes: int = 1, environ: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run the server, and yield it when `nodes` are ready."""
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "sandbox", "serve", "--cluster", f"ray={address}", "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--profiles", "bare", "--slots", "4", "--long-slots", "4", *flags],
            stderr=stderr,
            text=True,
            env={**os.environ, **(environ or {})},
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
            kill(pid)


def until(read: Callable[[], Any], describe: Callable[[], object] = lambda: "not in time") -> Any:
    """Return what `read` returns once it is true."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not (value := read()):
        assert time.monotonic() < give_up_at, describe()
        time.sleep(0.05)
    return value
