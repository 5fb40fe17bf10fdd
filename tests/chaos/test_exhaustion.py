"""Tests of a server that runs out of a resource. It answers correctly or with `unavailable`, and recovers
afterwards."""

from __future__ import annotations

import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from bench.probes.fault_injector import processes_by_kind
from bench.servers.server_under_test import ServerUnderTest
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.chaos.test_kills import FLAGS, run_calls
from tests.executor.calling import OWN_PYTHON

pytestmark = pytest.mark.timeout(400)
OUTAGE_S = 2.0
"""Seconds for which a resource is limited."""


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Owns the servers of a test and stops them at its end."""
    try:
        choose_level("auto")
    except IsolationError as error:
        pytest.skip(str(error))
    with ExitStack() as servers:
        yield servers


def start(servers: ExitStack, **environ: str) -> ServerUnderTest:
    return servers.enter_context(ServerUnderTest(OWN_PYTHON, FLAGS, environ))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in a file system without a free byte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=16", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs to mount a file system: {mounted.stderr.strip()}")
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(2 << 20))
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_has_no_effect(full_disk: Path, servers: ExitStack) -> None:
    server = start(servers, TMPDIR=str(full_disk), TEMP=str(full_disk), HOME=str(full_disk))
    tally = run_calls(server, 100)
    assert "unavailable" not in tally.statuses


@pytest.mark.parametrize("kind", ["gateway", "executor", "zygote"])
def test_a_process_without_descriptors_recovers(kind: str, servers: ExitStack) -> None:
    server = start(servers)
    with limited(server, kind, resource.RLIMIT_NOFILE, 11 if kind == "zygote" else 3):
        run_calls(server, 150)
    assert "unavailable" not in run_calls(server, 40).statuses


def test_a_zygote_that_cannot_fork_recovers(servers: ExitStack) -> None:
    server = start(servers)
    with limited(server, "zygote", resource.RLIMIT_NPROC, 1):
        run_calls(server, 150)
    assert "unavailable" not in run_calls(server, 40).statuses


@contextmanager
def limited(server: ServerUnderTest, kind: str, limit: int, value: int) -> Iterator[None]:
    """Set a resource limit of all processes of a kind to `value` for `OUTAGE_S`, or until the end of the block."""
    pids = {**processes_by_kind(server.pid), "gateway": [server.pid]}[kind]
    limits = {pid: resource.prlimit(pid, limit) for pid in pids}
    assert limits
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, limit, (value, hard))

    def restore() -> None:
        for pid, before in limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, limit, before)

    timer = threading.Timer(OUTAGE_S, restore)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        restore()
