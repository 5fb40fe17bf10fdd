"""Tests of `serve --workers N`: complete servers behind one port, and their supervisor. The executors are fakes."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from sandbox.errors import ConfigError
from sandbox.gateway.metrics import MetricSample, PrometheusText, with_worker_label
from sandbox.gateway.observe.history import Snapshot
from sandbox.gateway.observe.merged import OtherWorkers, add
from sandbox.settings.server import SPLIT_BY_WORKER, ServeConfig

SERVE_CODE = """
import functools, sys
from sandbox import logs
from sandbox.commands.workers import serve_workers
from sandbox.gateway.calls.executor_handle import ExecutorProcess
from sandbox.settings.server import ServeConfig
config = ServeConfig(port={port}, workers=2, cores=2, drain_s=60, token={token!r})
logs.configure("text")
sys.exit(serve_workers(config, functools.partial(ExecutorProcess.launch, {module!r})))
"""
TOKEN = "s3cret"
TIMEOUT_S = 60


class Server:
    """A running server with two workers."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def request(self, path: str, body: object = None, method: str | None = None) -> Any:
        """Send a request on a connection of its own, and return the decoded JSON or the text."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            text = response.read().decode()
            return json.loads(text) if response.headers.get_content_type() == "application/json" else text

    def run(self, code: str) -> str:
        return str(self.request("/v1/execute", {"code": code})["status"])

    def per_worker(self, metric: str) -> dict[str, float]:
        """Return the sum of a metric by worker, from `/metrics`."""
        sums: dict[str, float] = {}
        pattern = rf'^rstar_sandbox_{metric}{{(?:.*,)?worker="(\d+)".*}} (\S+)$'
        for worker, value in re.findall(pattern, self.request("/metrics"), re.MULTILINE):
            sums[worker] = sums.get(worker, 0) + float(value)
        return sums

    def workers(self) -> set[int]:
        """Return the process ids of the workers."""
        pid = self.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return set(map(int, file.read().split()))

    def finished_calls(self) -> int:
        """Return the calls that have finished since the start, from `/v1/stats`."""
        return sum(self.request("/v1/stats")["totals"]["statuses"].values())

    def run_on_both_workers(self) -> int:
        """Run calls, each on a new connection, until both workers have finished one. Returns their number."""
        calls = 0
        while len([count for count in self.per_worker("calls_total").values() if count]) < 2:
            assert self.run("hi") == "ok"
            calls += 1
        return calls


@contextmanager
def started(port: int = 0, module: str = "tests.fakes") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVE_CODE.format(port=port, token=TOKEN, module=module)]
    with (
        tempfile.TemporaryDirectory(prefix="rstar-test-") as directory,  # a killed supervisor leaves its own in it
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": directory}
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def server() -> Iterator[Server]:
    with started() as process:
        assert process.stderr is not None
        urls: dict[str, str] = {}
        while len(urls) < 2:
            line = process.stderr.readline()
            assert line, "the server has ended"
            if match := re.search(r"on (http://127\.0\.0\.1:\d+)  .*  worker=(\d)$", line):
                urls[match[2]] = match[1]
        assert urls["0"] == urls["1"], "the workers have different addresses"
        yield Server(process, urls["0"])


def test_the_settings_are_divided_among_the_workers() -> None:
    config = ServeConfig(workers=3, cores=7, queue_mb=100, token=TOKEN)
    workers, whole = config.per_worker(1), config.resolved(1)
    for name in SPLIT_BY_WORKER:
        assert sum(getattr(worker, name) for worker in workers) == max(getattr(whole, name), 3), name
    assert {worker.token for worker in workers} == {TOKEN}
    for worker in workers:
        assert worker.batch_calls <= worker.queue_calls * worker.tenant_share, "such a batch is never admitted"


@pytest.mark.parametrize("settings", [{"tenants": "tenants.toml"}, {"cluster": "ray"}, {"cores": 1}])
def test_settings_that_belong_to_one_server_are_refused_with_workers(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^workers=2"):
        ServeConfig(workers=2, **settings).per_worker(1)


def test_two_workers_serve_and_their_metrics_and_statistics_sum_up(server: Server) -> None:
    assert len(server.workers()) == 2
    calls = server.run_on_both_workers()
    assert sum(server.per_worker("calls_total").values()) == calls
    assert server.per_worker("executors_ready") == {"0": 1, "1": 1}
    while server.finished_calls() != calls:  # worker 0 asks the other one once a second
        pass
    stats = server.request("/v1/stats")
    assert stats["now"]["executors"] == 2
    assert [row["number"] for row in stats["executors"]] == [0, 1]
    assert stats["service"]["queue_calls"] == ServeConfig().queue_calls
    assert "<title>" in server.request("/")


def test_a_killed_worker_is_started_again_while_the_other_one_answers(server: Server) -> None:
    calls = server.run_on_both_workers()
    while server.finished_calls() != calls:
        pass
    for victim in sorted(server.workers()):
        others = server.workers() - {victim}
        os.kill(victim, signal.SIGKILL)
        while victim in server.workers():  # the kernel closes the sockets of a process before it can be reaped
            pass
        while len(server.workers()) < 2 or server.per_worker("executors_ready") != {"0": 1, "1": 1}:
            assert server.run("hi") == "ok"
        assert others < server.workers()
    assert server.process.stderr is not None
    while "has ended (exit code -9) and is started again" not in (line := server.process.stderr.readline()):
        assert line, "the supervisor has not logged the end of a worker"


def test_one_request_cancels_the_calls_of_all_workers(server: Server) -> None:
    with ThreadPoolExecutor(64) as pool:
        hanging = []
        while len([count for count in server.per_worker("calls_dispatched").values() if count]) < 2:
            hanging.append(pool.submit(server.request, "/v1/batch", {"calls": [{"code": "hang", "id": "job"}]}))
            while sum(server.per_worker("calls_dispatched").values()) < len(hanging):
                pass
        assert server.request("/v1/calls/job", method="DELETE") == {"cancelled": len(hanging)}
        results = [result for answer in hanging for result in answer.result(TIMEOUT_S)["results"]]
        assert {result["error"]["type"] for result in results} == {"Cancelled"}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.request("/v1/calls/job", method="DELETE")


def test_sigterm_under_load_answers_every_accepted_call(server: Server) -> None:
    codes = ["slow"] * 40
    with ThreadPoolExecutor(32) as pool:
        batches = [
            pool.submit(server.request, "/v1/batch", {"calls": [{"code": code} for code in codes]}) for _ in range(32)
        ]
        while sum(server.per_worker("calls_dispatched").values()) + server.finished_calls() == 0:
            pass
        while sum(server.per_worker("calls_waiting").values()) + sum(
            server.per_worker("calls_dispatched").values()
        ) < len(codes) * len(batches) and not any(batch.done() for batch in batches):
            pass
        server.process.send_signal(signal.SIGTERM)
        statuses: Counter[str] = Counter()
        for batch in batches:
            statuses.update(result["status"] for result in batch.result(TIMEOUT_S)["results"])
    assert server.process.wait(TIMEOUT_S) == 0
    assert statuses.total() == len(codes) * len(batches), "an accepted call has no result"
    assert statuses["ok"] > 0
    assert set(statuses) <= {"ok", "unavailable"}  # calls that waited are sent to another server


def test_a_second_signal_ends_all_workers_at_once(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.request, "/v1/batch", {"calls": [{"code": "hang"}]})
        while sum(server.per_worker("calls_dispatched").values()) < 1:
            pass
        server.process.send_signal(signal.SIGINT)
        assert server.process.stderr is not None
        while "stopping: 1 running calls" not in (line := server.process.stderr.readline()):
            assert line, "the worker has not logged that it stops"
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(TIMEOUT_S) == 1


def test_the_workers_end_with_their_supervisor(server: Server) -> None:
    pidfds = [os.pidfd_open(pid) for pid in server.workers()]
    server.process.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], TIMEOUT_S)[0], "a worker has survived its supervisor"
        os.close(pidfd)


def test_executors_that_cannot_start_end_the_server() -> None:
    with started(module="tests.no_such_executor") as process:
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr is not None
        assert "rstar-sandbox: executor 0 did not start: " in process.stderr.read()


def test_a_port_in_use_is_an_error_also_if_it_could_be_shared(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    with started(port) as process:
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr is not None
        (line,) = process.stderr
        assert "is another server running there?" in line


def test_samples_of_workers_get_a_label_and_stay_grouped_by_metric() -> None:
    def samples(ok: int) -> list[MetricSample]:
        return [("calls_total", {"status": "ok"}, ok), ("calls_waiting", {}, 1)]

    text = PrometheusText(lambda: with_worker_label({1: samples(3), 0: samples(2)})).render().decode()
    assert [line for line in text.splitlines() if not line.startswith("# ")] == [
        'rstar_sandbox_calls_total{status="ok",worker="0"} 2.0',
        'rstar_sandbox_calls_total{status="ok",worker="1"} 3.0',
        'rstar_sandbox_calls_waiting{worker="0"} 1.0',
        'rstar_sandbox_calls_waiting{worker="1"} 1.0',
    ]


def snapshot(ok: int, waiting: int = 0) -> Snapshot:
    return Snapshot(1.0, {"ok": ok}, {"retried": ok}, {"run_ms": (ok, 1)}, {"waiting": waiting, "machine_busy": 0.5})


def test_snapshots_are_summed_except_for_the_gauges_of_the_machine() -> None:
    total = add([snapshot(1, 2), snapshot(10, 20)])
    assert total == Snapshot(
        1.0, {"ok": 11}, {"retried": 11}, {"run_ms": (11, 2)}, {"waiting": 22, "machine_busy": 0.5}
    )


def test_counters_of_a_worker_that_died_are_kept_and_its_gauges_are_not() -> None:
    def body(started_at: float, ok: int) -> dict[str, Any]:
        counted = snapshot(ok, waiting=5)
        names = ("at_s", "statuses", "events", "latencies", "gauges")
        return {"service": {"started_at": started_at}, "snapshot": {name: getattr(counted, name) for name in names}}

    others = OtherWorkers()
    others.update({1: body(100.0, 7)})
    assert (others.add_to(snapshot(1)).statuses, others.add_to(snapshot(1)).gauges["waiting"]) == ({"ok": 8}, 5)
    others.update({})
    assert (others.add_to(snapshot(1)).statuses, others.add_to(snapshot(1)).gauges["waiting"]) == ({"ok": 8}, 0)
    others.update({1: body(200.0, 2)})
    assert (others.add_to(snapshot(1)).statuses, others.add_to(snapshot(1)).gauges["waiting"]) == ({"ok": 10}, 5)
