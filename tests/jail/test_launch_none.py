"""Level `none`: what is left of a jail when its guest is an ordinary process."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from sandbox.jail import Interpreter, JailSpec, Level
from tests.jail import jails


@pytest.fixture
def spec(python: Interpreter, guest_dir: Path) -> JailSpec:
    return JailSpec(Level.NONE, python, str(guest_dir), jails.ENV)


def test_environment_is_clean(spec: JailSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the server")
    assert jails.ask(spec, "tell(dict(os.environ))") == jails.ENV


def test_session_is_its_own(spec: JailSpec) -> None:
    assert jails.ask(spec, "tell(os.getsid(0))") != os.getsid(0)


def test_exit_status_is_forwarded(spec: JailSpec) -> None:
    with jails.started(spec, None) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_guest_dies_with_its_launcher(spec: JailSpec, number: signal.Signals) -> None:
    with jails.started(spec, "tell(os.getpid()); wait()") as jail:
        guest = os.pidfd_open(jail.answer())
        jail.process.send_signal(number)
        assert select.select([guest], [], [], jails.DEADLINE_S)[0]
        os.close(guest)
