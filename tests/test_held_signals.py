"""Tests of signals that arrive while a child process starts. The exception of the signal's handler is raised only when
the code that ends the child knows the child."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from bench.servers import service
from sandbox.runtime import build as runtime
from trainer.recipe.runner import Phase, run_child

SLEEP = ("-S", "-c", "import time; time.sleep(1000)")


def run_server() -> None:
    with service.started(SLEEP):
        pass


def run_phase() -> None:
    lock_fd = os.open(os.devnull, os.O_RDONLY)
    try:
        run_child(Phase("prepare"), [sys.executable, *SLEEP], lock_fd)
    finally:
        os.close(lock_fd)


def stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(number)


@pytest.fixture
def handlers() -> Iterator[tuple[Any, ...]]:
    """Handlers of SIGINT and SIGTERM that raise."""
    before = [(number, signal.signal(number, stop)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield stop, stop
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "run",
    [lambda: runtime.run_in_session([sys.executable, *SLEEP]), run_server, run_phase],
    ids=["step", "server", "phase"],
)
def test_a_signal_before_popen_returns_ends_the_child(
    run: Callable[[], object], number: signal.Signals, handlers: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_exec, children = subprocess._fork_exec, []  # type: ignore[attr-defined]

    def fork_exec_and_signal(*args: Any) -> int:
        pid: int = fork_exec(*args)
        children.append(os.pidfd_open(pid))
        signal.raise_signal(number)
        return pid

    monkeypatch.setattr(subprocess, "_fork_exec", fork_exec_and_signal)
    try:
        with pytest.raises(SystemExit) as raised:
            run()
        assert raised.value.code == number
        (child,) = children
        assert select.select([child], [], [], 0)[0], "the child is still running"
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_child_starts_with_no_signal_blocked_or_ignored() -> None:
    code = "import signal; print(signal.pthread_sigmask(0, ()), signal.getsignal(15) is signal.SIG_DFL)"
    assert runtime.run_in_session([sys.executable, "-S", "-c", code]).stdout == "set() True\n"


def test_a_program_that_cannot_start_leaves_the_handlers_as_they_are(handlers: tuple[Any, ...]) -> None:
    with pytest.raises(FileNotFoundError):
        runtime.run_in_session(["/nowhere/program"])
    with pytest.raises(FileNotFoundError):
        run_child(Phase("prepare"), ["/nowhere/program"], 0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_thread_can_start_a_child() -> None:
    """Python allows only the main thread to set handlers of signals, so other threads start a child without them."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(runtime.run_in_session, [sys.executable, "-c", "print(1)"]).result().stdout == "1\n"
