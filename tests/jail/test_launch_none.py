"""Tests of the isolation level `none`. The guest (the program that a launcher starts) is an ordinary process with a
clean environment, and dies with its launcher."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import tempfile
from pathlib import Path

import pytest

from sandbox.guest.protocol import CALL_DIR_PREFIX
from sandbox.jail import Interpreter, JailSpec, Level
from tests.jail import jails
from tests.jail.conftest import GUEST_EXIT_STATUS


@pytest.fixture
def spec(python: Interpreter, guest_dir: Path) -> JailSpec:
    return JailSpec(Level.NONE, python, str(guest_dir), jails.ENV)


def test_environment_is_clean(spec: JailSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the server")
    assert jails.run(spec, "send(dict(os.environ))") == jails.ENV


def test_guest_has_a_session_of_its_own(spec: JailSpec) -> None:
    assert jails.run(spec, "send(os.getsid(0))") != os.getsid(0)


def test_exit_status_is_forwarded(spec: JailSpec) -> None:
    with jails.running(spec) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == GUEST_EXIT_STATUS


def test_only_directories_of_calls_whose_zygote_was_killed_are_removed(spec: JailSpec) -> None:
    left, used = (tempfile.mkdtemp(prefix=CALL_DIR_PREFIX, dir="/tmp") for _ in range(2))
    Path(left, "file").touch()
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert jails.run(spec, f"send([os.path.exists(path) for path in {[left, used]}])") == [False, True]
    os.close(lock)
    jails.run(spec, "send(0)")
    assert not os.path.exists(used), "the directory is left without a lock"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_guest_dies_with_its_launcher(spec: JailSpec, signum: signal.Signals) -> None:
    with jails.running(spec, "send(os.getpid()); wait()") as jail:
        guest_pidfd = os.pidfd_open(jail.receive())
        jail.process.send_signal(signum)
        assert select.select([guest_pidfd], [], [], jails.DEADLINE_S)[0]
        os.close(guest_pidfd)
