"""Tests of `serve --cluster ray=ADDRESS` on a cluster of several nodes: calls, new nodes, faults, and the end.

All nodes are on this machine. The tests use one cluster, in the order of the file. A test that kills a node adds
another node.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.probes import processes
from bench.servers.ray_cluster import RayCluster
from sandbox import wire
from tests.cluster.processes import children, running
from tests.cluster.serving import Server, needs_ray, serving, until

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.usefixtures("needs_isolation", "guest_python")]
CALLS = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as cluster:
        for _ in range(2):
            cluster.add_node()
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(cluster.address, tmp_path_factory.mktemp("serve"), nodes=2) as server:
        yield server


class Load:
    """`CALLS` calls in flight over both nodes, each with a result of its own."""

    def __init__(self, server: Server) -> None:
        codes = [f"import time\ntime.sleep(0.2)\nprint({number} * 3)" for number in range(CALLS)]
        self._server = server
        self._pool = ThreadPoolExecutor(1)
        self._results = self._pool.submit(server.run, codes)
        until(lambda: sum(row["running"] > 0 for row in server.nodes()) == 2, server.nodes)

    def check(self) -> list[dict[str, Any]]:
        """Wait for the results, and check that each call has exactly one result, which is its own."""
        results = self._results.result()
        self._pool.shutdown()
        assert [result["stdout"] for result in results] == [f"{number * 3}\n" for number in range(CALLS)]
        return results


def test_calls_run_on_all_nodes(server: Server) -> None:
    assert {result["attempts"] for result in Load(server).check()} == {1}


def test_stats_and_metrics_show_the_nodes(server: Server) -> None:
    rows = server.nodes()
    assert [(row["state"], row["slots"], row["restarts"], row["reason"]) for row in rows] == [("ready", 4, 0, "")] * 2
    assert len({row["name"] for row in rows}) == 2 and all(row["isolation"] for row in rows)
    assert server.stats()["service"]["isolation"] == rows[0]["isolation"]


def test_ray_variables_and_tokens_do_not_reach_calls(server: Server) -> None:
    (result,) = server.run(["import os\nprint([name for name in os.environ if 'RAY' in name])"])
    assert result["stdout"] == "[]\n"


def test_calls_of_a_killed_executor_run_elsewhere(server: Server, cluster: RayCluster) -> None:
    load = Load(server)
    (executor,) = cluster.executors(0)
    os.kill(executor, signal.SIGKILL)
    assert 2 in {result["attempts"] for result in load.check()}
    until(lambda: cluster.executors(0))
    server.wait_for_nodes(2)


def test_calls_of_a_killed_actor_run_elsewhere(server: Server, cluster: RayCluster) -> None:
    """Ray starts the actor again. The executor of the killed actor is dead."""
    load = Load(server)
    (actor,) = cluster.actors(0)
    pids = processes.tree(actor)
    os.kill(actor, signal.SIGKILL)
    load.check()
    until(lambda: not running(pids))
    server.wait_for_nodes(2)
    assert sum(row["restarts"] > 0 for row in server.nodes()) == 1


def test_the_gateway_survives_its_ray_driver(server: Server, cluster: RayCluster) -> None:
    """The actors of a driver die with it. The next driver makes new actors."""
    load = Load(server)
    pids = cluster.sandbox_processes()
    (driver,) = [pid for pid in children(server.process.pid) if "sandbox.cluster" in processes.command(pid)]
    os.kill(driver, signal.SIGKILL)
    load.check()
    until(lambda: not running(pids), lambda: [processes.command(pid) for pid in running(pids)])
    server.wait_for_nodes(2)
    assert "the Ray driver will be started again: the Ray driver has ended" in server.log


def test_a_silent_node_is_lost_and_its_late_results_are_dropped(server: Server, cluster: RayCluster) -> None:
    load = Load(server)
    (executor,) = cluster.executors(0)
    stopped_at = time.monotonic()
    os.kill(executor, signal.SIGSTOP)
    load.check()
    assert time.monotonic() - stopped_at < 45, "10 s of silence, then the calls again; more on a busy machine"
    if running([executor]):
        os.kill(executor, signal.SIGCONT)
    until(lambda: not running([executor]))
    server.wait_for_nodes(2)
    totals = server.stats()["totals"]["statuses"]
    assert set(totals) == {"ok"}


def test_calls_of_a_killed_node_run_elsewhere_and_a_new_node_gets_calls(server: Server, cluster: RayCluster) -> None:
    load = Load(server)
    pids = processes.tree(cluster.raylets[0])
    cluster.kill_node(0)
    load.check()
    until(lambda: not running(pids), lambda: [processes.command(pid) for pid in running(pids)])
    until(lambda: len(server.nodes("lost")) == 1, server.nodes)
    added = cluster.add_node()
    server.wait_for_nodes(2)
    Load(server).check()
    assert cluster.executors(added)


def test_a_node_without_a_guest_runtime_is_refused_by_name(server: Server, cluster: RayCluster, tmp_path: Path) -> None:
    number = cluster.add_node(environ={"RSTAR_RUNTIME": str(tmp_path)})
    server.wait_for_nodes(1, "refused")
    (row,) = server.nodes("refused")
    assert row["reason"] == "has no guest runtime; run `rstar-sandbox runtime` there"
    assert f"node {row['name']} is refused: has no guest runtime" in server.log
    assert server.run(["print(1)"])[0]["stdout"] == "1\n"
    cluster.kill_node(number)


def test_nothing_of_the_server_is_left_after_its_end(server: Server, cluster: RayCluster) -> None:
    pids = [*cluster.sandbox_processes(), *processes.tree(server.process.pid)]
    assert server.stop() == 0
    until(lambda: not running(pids), lambda: [processes.command(pid) for pid in running(pids)])


def test_nothing_of_the_server_is_left_after_its_gateway_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    with serving(cluster.address, tmp_path, nodes=2) as server:
        pids = [*cluster.sandbox_processes(), *processes.tree(server.process.pid)]
        server.process.kill()
        server.process.wait()
        until(lambda: not running(pids), lambda: [processes.command(pid) for pid in running(pids)])


def test_nodes_with_a_too_weak_level_are_refused_by_name(cluster: RayCluster, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"no node of the cluster can run calls: node .* its strongest isolation"),
        serving(cluster.address, tmp_path, "--cluster-min-isolation", "nsjail"),
    ):
        pass


OTHER_VERSION = """
import socket, sys, ray
ray.__version__ = "2.57.0"
from sandbox.cluster.ray_nodes import drive
sys.exit(drive(socket.socket(fileno=int(sys.argv[1]))))
"""


def test_a_ray_of_another_version_is_named(cluster: RayCluster) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = {"address": cluster.address, "secret": b"", "isolation": "auto", "python": ""}
        ours.sendall(wire.pack(["start", start]))
        command = [sys.executable, "-W", "ignore", "-c", OTHER_VERSION, str(theirs.fileno())]
        assert (
            subprocess.run(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL, timeout=60).returncode == 1
        )
        (message,) = wire_frames(ours)
    assert message[0] == "failed" and "\n" not in message[1]
    assert message[1].startswith(f"--cluster ray={cluster.address}: Version mismatch: ") and "2.57.0" in message[1]


def wire_frames(sock: socket.socket) -> list[list[Any]]:
    unpacker = wire.Unpacker()
    unpacker.feed(sock.recv(1 << 16))
    return list(unpacker)
