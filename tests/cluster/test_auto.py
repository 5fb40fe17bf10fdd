"""Tests of `serve --cluster ray` on a machine on which no Ray runs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from bench.probes import processes
from tests.cluster.processes import running
from tests.cluster.serving import needs_ray, serving, until

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.usefixtures("needs_isolation", "guest_python")]


def test_auto_starts_ray_and_stops_it(tmp_path: Path) -> None:
    if any("/gcs_server" in processes.command(pid) for pids in processes.children().values() for pid in pids):
        pytest.skip("a Ray runs on this machine, to which auto would connect")
    directory = tempfile.mkdtemp(prefix="rayt-", dir="/tmp")
    with serving("auto", tmp_path, environ={"RAY_TMPDIR": directory}) as server:
        assert server.run(["print(1)"])[0]["stdout"] == "1\n"
        pids = processes.tree(server.process.pid)
        server.process.kill()
        server.process.wait()
        until(lambda: not running(pids), lambda: [processes.command(pid) for pid in running(pids)])
    shutil.rmtree(directory)
