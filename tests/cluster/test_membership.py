"""Tests of the membership, the gateway's list of the nodes (machines) of a cluster.

Nodes come, go, are refused and come back. The nodes are fakes, which use real TCP.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sandbox.cluster import membership
from sandbox.errors import ClusterError, NodeError
from sandbox.gateway.calls import executor_handle
from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.http.validation import BatchForm, parse
from sandbox.types import Limits
from tests.cluster.fake_nodes import FakeCluster, FakeNode
from tests.gateway.serving import until

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_handle, "MIN_BACKOFF_S", 0.0)
    monkeypatch.setattr(executor_handle, "EXIT_CODE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_handle, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(membership, "MIN_RESTART_DELAY_S", 0.0)


async def submit(cluster: FakeCluster, *codes: str) -> Batch:
    batch, _ = await parse(BatchForm(cluster.dispatcher.config), {"calls": [{"code": code} for code in codes]})
    cluster.dispatcher.submit(batch)
    return batch


async def done(batch: Batch) -> list[tuple[str, str, int]]:
    """Wait for all results. Return stdout, status and attempts of each."""
    await until(lambda: not batch.unfinished)
    return [(result["stdout"], result["status"], result["attempts"]) for result in batch.results if result]


def numbers(cluster: FakeCluster) -> list[int]:
    return [executor.number for executor in cluster.dispatcher.executors]


def ready(cluster: FakeCluster) -> int:
    return sum(executor.is_ready for executor in cluster.dispatcher.executors)


async def test_calls_are_spread_over_nodes() -> None:
    a, b = FakeNode("a"), FakeNode("b")
    async with FakeCluster(a, b).running() as cluster:
        await cluster.dispatcher.started()
        await until(lambda: ready(cluster) == 2)
        batch = await submit(cluster, *["hang"] * 8)
        await until(lambda: len(a.executors[0].calls) == len(b.executors[0].calls) == 4)
        for node in (a, b):
            node.executors[0].finish(*node.executors[0].calls)
        assert await done(batch) == [("hang", "ok", 1)] * 8
        assert cluster.rows() == {"a": ("ready", ""), "b": ("ready", "")}


async def test_each_node_gets_the_settings_for_its_cores() -> None:
    small, large = FakeNode("small"), FakeNode("large", cores=32, isolation="nsjail")
    large.cpus = 20.0  # Ray may have fewer CPUs than the machine; each eight CPUs get an executor
    async with FakeCluster(small, large).running() as cluster:
        await until(lambda: ready(cluster) == 4)
        settings = [executor.settings for executor in large.executors]
        assert [s["cores"] for s in settings] == [7, 7, 6] and sum(s["slots"] for s in settings) == 320
        assert {s["isolation"] for s in settings} == {"nsjail"} and small.executors[0].settings["slots"] == 16
        assert small.executors[0].settings["python"] == "/their/python"


async def test_the_memory_of_the_smallest_node_limits_calls() -> None:
    large, small = FakeNode("large", memory_mb=8000), FakeNode("small", memory_mb=3000)
    async with FakeCluster(large, small).running(max_limits=Limits(memory_mb=5000)) as cluster:
        await until(lambda: ready(cluster) == 2)
        assert cluster.dispatcher.config.max_limits.memory_mb == 3000
        for leaves, remaining, memory_mb in ((small, [0], 5000), (large, [], 5000)):
            cluster.nodes.remove(leaves)
            leaves.close()
            await until(lambda remaining=remaining: ready(cluster) == len(remaining))
            cluster.list_nodes()
            await until(lambda remaining=remaining: numbers(cluster) == remaining)
            assert cluster.dispatcher.config.max_limits.memory_mb == memory_mb
        cluster.nodes.append(FakeNode("new", memory_mb=4000))
        cluster.list_nodes()
        await until(lambda: ready(cluster) == 1)
        assert cluster.dispatcher.config.max_limits.memory_mb == 4000


async def test_the_weakest_level_in_use_is_reported() -> None:
    async with FakeCluster(FakeNode("a")).running() as cluster:
        await cluster.dispatcher.started()
        assert cluster.dispatcher.isolation["isolation"] == "none", "that of the fake executor"


@pytest.mark.parametrize(
    ("report", "settings", "reason"),
    [
        (
            {"isolation": "landlock"},
            {"cluster_min_isolation": "namespaces"},
            "its strongest isolation level is landlock, --cluster-min-isolation is namespaces",
        ),
        ({"isolation": "", "isolation_error": "this machine lacks seccomp"}, {}, "this machine lacks seccomp"),
        ({"runtime": "3.12-abc"}, {}, "its guest runtime is 3.12-abc, that of the first node is 3.13-abc"),
        ({"python": "", "python_error": "has no guest runtime"}, {}, "has no guest runtime"),
        ({"version": "9.9"}, {}, "has rstar-sandbox 9.9, the gateway has 0.1.0"),
    ],
)
async def test_a_node_that_differs_from_the_gateway_or_the_first_node_is_refused_by_name(
    report: dict[str, Any], settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = FakeNode("bad", **report)
    async with FakeCluster(FakeNode("good"), bad).running(**settings) as cluster:
        await cluster.dispatcher.started()
        assert cluster.rows() == {"good": ("ready", ""), "bad": ("refused", reason)}
        assert await done(await submit(cluster, "1")) == [("1", "ok", 1)]
        assert not bad.executors
    assert f"node bad is refused: {reason}" in caplog.messages


async def test_a_level_that_is_weak_is_accepted_if_it_is_required_by_name() -> None:
    async with FakeCluster(FakeNode("a", isolation="none")).running(isolation="none") as cluster:
        await cluster.dispatcher.started()


async def test_nodes_with_different_runtimes_are_accepted_if_the_python_is_named() -> None:
    nodes = FakeNode("a"), FakeNode("b", runtime="3.12-abc")
    async with FakeCluster(*nodes).running(python="/their/python") as cluster:
        await until(lambda: ready(cluster) == 2)


async def test_a_cluster_whose_nodes_are_all_refused_is_an_error() -> None:
    nodes = FakeNode("a", isolation="none"), FakeNode("b", python="", python_error="has no guest runtime")
    async with FakeCluster(*nodes).running() as cluster:
        with pytest.raises(ClusterError, match=r"node a: its strongest .* is none.*; node b: has no guest runtime"):
            await cluster.dispatcher.started()


async def test_a_node_whose_executor_does_not_start_is_an_error_of_the_first_start() -> None:
    async with FakeCluster(FakeNode("a", reaction="failed")).running() as cluster:
        with pytest.raises(ClusterError, match="node a: executor 0 did not start: no isolation here"):
            await cluster.dispatcher.started()


async def test_a_report_that_makes_no_sense_refuses_the_node() -> None:
    async with FakeCluster(FakeNode("good"), FakeNode("bad", cores="many")).running() as cluster:
        await cluster.dispatcher.started()
        state, reason = cluster.rows()["bad"]
        assert state == "refused" and reason.startswith("expected the report of a node with instance, version")


async def test_a_cluster_that_cannot_be_used_is_an_error() -> None:
    cluster = FakeCluster()
    cluster.fail(ClusterError("no Ray answers there"))
    async with cluster.running():
        with pytest.raises(ClusterError, match="no Ray answers there"):
            await cluster.dispatcher.started()


async def test_the_server_waits_for_a_first_node() -> None:
    async with FakeCluster().running() as cluster:
        started = asyncio.create_task(cluster.dispatcher.started())
        await asyncio.sleep(0)
        cluster.nodes.append(FakeNode("late"))
        cluster.list_nodes()
        await started


async def test_calls_wait_while_no_node_can_be_used(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster().running() as cluster:
        cluster.list_nodes()
        batch = await submit(cluster, "1")
        await until(lambda: bool(caplog.messages) and cluster._events.empty())
        assert not cluster.dispatcher.is_ready and batch.unfinished == 1
        cluster.nodes.append(FakeNode("late"))
        cluster.list_nodes()
        assert await done(batch) == [("1", "ok", 1)]
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["Ray lists no node with CPUs; calls wait in the queue"]


async def test_a_node_added_later_gets_calls() -> None:
    async with FakeCluster(FakeNode("a", slots=1)).running() as cluster:
        await cluster.dispatcher.started()
        batch = await submit(cluster, *["hang"] * 4)
        late = FakeNode("late")
        cluster.nodes.append(late)
        cluster.list_nodes()
        await until(lambda: bool(late.executors) and len(late.executors[0].calls) == 2)
        for node in cluster.nodes:
            node.executors[0].finish(*node.executors[0].calls)
        assert [status for _, status, _ in await done(batch)] == ["ok"] * 4


async def test_calls_of_a_lost_node_run_elsewhere_and_the_node_that_comes_back_is_new() -> None:
    a, b = FakeNode("a"), FakeNode("b", slots=8)
    async with FakeCluster(a, b).running() as cluster:
        await until(lambda: ready(cluster) == 2)
        batch = await submit(cluster, *["hang"] * 20)
        await until(lambda: len(a.executors[0].calls) + len(b.executors[0].calls) == 20)
        a.state, a.reason = "lost", "its actor has not answered for 11 s"
        a.reaction = "exit"
        a.executors[0].exit()
        await until(lambda: not any(executor.is_ready for executor in cluster.dispatcher.executors[:1]))
        cluster.list_nodes()
        await until(lambda: numbers(cluster) == [1])
        assert cluster.rows()["a"] == ("lost", "its actor has not answered for 11 s")
        b.executors[0].send("window", 50)
        await until(lambda: len(b.executors[0].calls) == 20)
        a.state, a.reason, a.reaction = "ready", "", "ready"
        cluster.list_nodes()
        await until(lambda: ready(cluster) == 2)
        assert numbers(cluster) == [1, 2] and cluster.rows()["a"] == ("ready", "")
        b.executors[0].finish(*b.executors[0].calls)
        results = await done(batch)
        assert {status for _, status, _ in results} == {"ok"}
        assert sum(attempts == 2 for *_, attempts in results) == 4


async def test_a_node_that_ray_no_longer_lists_keeps_its_calls_while_its_executor_answers() -> None:
    """Ray no longer lists the node, but the executor of the node answers. So the calls of the node go on."""
    node = FakeNode("a")
    async with FakeCluster(node).running() as cluster:
        await cluster.dispatcher.started()
        batch = await submit(cluster, "hang")
        await until(lambda: bool(node.executors[0].calls))
        cluster.nodes.clear()
        cluster.list_nodes()
        await until(lambda: cluster._events.empty())
        node.executors[0].finish(1)
        assert await done(batch) == [("hang", "ok", 1)]
        assert cluster.rows() == {"a": ("ready", "")}


async def test_a_node_that_ray_does_not_list_is_removed_when_its_executors_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, other = FakeNode("a"), FakeNode("b")
    async with FakeCluster(node, other).running() as cluster:
        await until(lambda: ready(cluster) == 2)
        cluster.nodes.remove(node)
        node.close()
        await until(lambda: ready(cluster) == 1)
        cluster.list_nodes()
        await until(lambda: numbers(cluster) == [1])
        assert cluster.rows()["a"] == ("lost", "Ray does not list it")
        monkeypatch.setattr(membership, "LOST_SHOWN_S", 0.0)
        cluster.list_nodes()
        await until(lambda: "a" not in cluster.rows())


async def test_an_agent_that_was_started_again_gets_new_executors() -> None:
    """The executors of the old agent may still be alive. They have returned no results yet, so their calls run again on
    the new executors."""
    node = FakeNode("a")
    async with FakeCluster(node).running() as cluster:
        await cluster.dispatcher.started()
        batch = await submit(cluster, "hang")
        await until(lambda: bool(node.executors[0].calls))
        node.restart()
        cluster.list_nodes()
        await until(lambda: len(node.executors) == 2 and bool(node.executors[1].calls))
        node.executors[1].finish(*node.executors[1].calls)
        assert await done(batch) == [("hang", "ok", 2)]
        assert node.generations == [1, 2]
        (row,) = cluster.dispatcher.membership.rows()  # type: ignore[union-attr]
        assert row.restarts == 1


async def test_late_results_of_a_node_that_was_declared_lost_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is silent, so another node runs its calls. Then the first node sends its results after all."""
    monkeypatch.setattr(executor_handle, "SILENCE_CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(membership, "SILENCE_TIMEOUT_S", 0.5)
    a, b = FakeNode("a"), FakeNode("b")
    async with FakeCluster(a, b).running() as cluster, asyncio.TaskGroup() as tasks:
        await until(lambda: ready(cluster) == 2)
        alive = tasks.create_task(_send_stats(b))
        batch = await submit(cluster, *["hang"] * 2)
        await until(lambda: bool(a.executors[0].calls) or bool(b.executors[0].calls))
        lost = a.executors[0]
        calls = list(lost.calls)
        a.reaction = "silent"
        await until(lambda: len(b.executors[0].calls) == 2)
        lost.finish(*calls)
        assert lost.exit_code.done(), "its connection has been reset"
        assert not set(calls) & set(b.executors[0].calls), "calls that run again have new numbers"
        b.executors[0].finish(*b.executors[0].calls)
        assert [status for _, status, _ in await done(batch)] == ["ok", "ok"]
        alive.cancel()


async def _send_stats(node: FakeNode) -> None:
    while True:
        node.executors[0].send("stats", {})
        await asyncio.sleep(0.01)


async def test_a_driver_that_ends_is_started_again_and_calls_go_on(caplog: pytest.LogCaptureFixture) -> None:
    node = FakeNode("a")
    async with FakeCluster(node).running() as cluster:
        await cluster.dispatcher.started()
        batch = await submit(cluster, "hang")
        await until(lambda: bool(node.executors[0].calls))
        cluster.fail(NodeError("the Ray driver has ended"))
        await until(lambda: cluster.starts == 2)
        node.executors[0].finish(1)
        assert await done(batch) == [("hang", "ok", 1)]
    assert "the Ray driver will be started again: the Ray driver has ended" in caplog.messages


async def test_an_executor_that_does_not_start_on_a_later_node_is_tried_again() -> None:
    bad = FakeNode("bad", reaction="failed")
    async with FakeCluster(FakeNode("good")).running() as cluster:
        await cluster.dispatcher.started()
        cluster.nodes.append(bad)
        cluster.list_nodes()
        await until(lambda: cluster.rows().get("bad", ("", ""))[0] == "refused")
        assert "no isolation here" in cluster.rows()["bad"][1]
        bad.reaction = "ready"
        cluster.list_nodes()
        await until(lambda: cluster.rows()["bad"] == ("ready", ""))


async def test_only_the_executor_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []
    monkeypatch.setattr(membership, "backoff_s", lambda count, *_: failures.append(count) or 0.0)
    node = FakeNode("a")
    node.reactions[1] = "failed"
    async with FakeCluster(node).running(executors=2) as cluster:
        await cluster.dispatcher.started()
        batch = await submit(cluster, "hang")
        running = node.executors[node.starts.index(0)]
        await until(lambda: bool(running.calls) and failures == [1])
        for count in (2, 3):
            cluster.list_nodes()
            await until(lambda count=count: len(failures) == count)
        state, reason = cluster.rows()["a"]
        assert state == "ready" and reason.endswith("did not start: no isolation here")
        node.reactions.clear()
        cluster.list_nodes()
        await until(lambda: ready(cluster) == 2)
        running.finish(*running.calls)
        assert await done(batch) == [("hang", "ok", 1)]
        assert sorted(node.starts) == [0, 1, 1, 1, 1] and cluster.rows() == {"a": ("ready", "")}
        node.reactions[1] = "failed"
        node.restart()
        cluster.list_nodes()
        await until(lambda: len(failures) == 4)
    assert failures == [1, 2, 3, 1], "all executors were ready once"


async def test_a_node_is_usable_once_one_of_its_executors_is_ready() -> None:
    node = FakeNode("a", reaction="silent")
    node.reactions[1] = "failed"
    async with FakeCluster(node).running(executors=2) as cluster:
        await until(lambda: "no isolation here" in cluster.rows().get("a", ("", ""))[1])
        assert cluster.rows()["a"][0] == "starting"
        first = node.executors[node.starts.index(0)]
        first.become_ready()
        await cluster.dispatcher.started()
        node.state, node.reason, node.reaction = "lost", "its actor has not answered for 11 s", "exit"
        first.exit()
        await until(lambda: ready(cluster) == 0)
        cluster.list_nodes()
        await until(lambda: cluster.rows() == {"a": ("lost", node.reason)})


async def test_restarts_of_removed_executors_are_counted() -> None:
    """A counter of Prometheus never falls."""
    node = FakeNode("a")
    async with FakeCluster(node).running() as cluster:
        await cluster.dispatcher.started()
        node.executors[0].exit()
        await until(lambda: len(node.executors) == 2 and ready(cluster) == 1)
        node.restart()
        cluster.list_nodes()
        await until(lambda: numbers(cluster) == [1] and ready(cluster) == 1)
        samples = {(name, *labels.values()): value for name, labels, value in cluster.dispatcher.samples()}
        assert samples[("executor_restarts_total",)] == 1
        assert samples["node_restarts_total", "a"] == 2, "a restart of the executor and one of the agent"
        assert samples["nodes", "ready"] == 1 and samples["nodes", "lost"] == 0


async def test_a_change_of_a_node_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sandbox.cluster")
    async with FakeCluster(FakeNode("a")).running() as cluster:
        await cluster.dispatcher.started()
        for _ in range(3):
            cluster.list_nodes()
        await until(lambda: cluster._events.empty())
    assert caplog.messages == ["node a is ready: isolation namespaces, executors 0"]
