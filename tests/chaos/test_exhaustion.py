"""A server that has run out of something: what it can still answer is right, for the rest it says that it cannot.

Each time there is enough again, all is as before.
"""

from __future__ import annotations

import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from bench.chaos import Target
from bench.probes.fault_injector import victims
from bench.servers import service
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.chaos.test_kills import FLAGS, ask
from tests.executor.calling import OWN_PYTHON

pytestmark = pytest.mark.timeout(400)
OUTAGE_S = 2.0


@pytest.fixture
def life() -> Iterator[ExitStack]:
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))
    with ExitStack() as life:
        yield life


def start(life: ExitStack, **environ: str) -> Target:
    return Target(life, lambda: service.running(OWN_PYTHON, FLAGS, environ))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free byte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=16", "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs to mount a file system: {done.stderr.strip()}")
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(2 << 20))
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_none_of_its_business(full_disk: Path, life: ExitStack) -> None:
    target = start(life, TMPDIR=str(full_disk), TEMP=str(full_disk), HOME=str(full_disk))
    tally = ask(target, 100, lambda _: None)
    assert "unavailable" not in tally.statuses


@pytest.mark.parametrize("of", ["gateway", "executor", "zygote"])
def test_out_of_descriptors_for_a_while(of: str, life: ExitStack) -> None:
    target = start(life)
    with limited(target, of, resource.RLIMIT_NOFILE, 11 if of == "zygote" else 3):
        ask(target, 150, lambda _: None)
    assert "unavailable" not in ask(target, 40, lambda _: None).statuses


def test_out_of_processes_for_a_while(life: ExitStack) -> None:
    target = start(life)
    with limited(target, "zygote", resource.RLIMIT_NPROC, 1):
        ask(target, 150, lambda _: None)
    assert "unavailable" not in ask(target, 40, lambda _: None).statuses


@contextmanager
def limited(target: Target, of: str, what: int, most: int) -> Iterator[None]:
    """For `OUTAGE_S`, one kind of the server's processes may have no more than this, whatever it has already."""
    found = {**victims(target.pid), "gateway": [target.pid]}[of]
    limits = {pid: resource.prlimit(pid, what) for pid in found}
    assert limits
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, what, (most, hard))

    def restore() -> None:
        for pid, before in limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, what, before)

    timer = threading.Timer(OUTAGE_S, restore)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        restore()
