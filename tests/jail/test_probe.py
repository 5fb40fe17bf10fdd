"""Tests of the choice of an isolation level.

A layer is one kernel mechanism that a level uses. The layers of the machine are probed; probes are repeated after
transient failures. Then a level is chosen. These tests use invented layers, and a layer that is not listed counts as
granted.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import Level, LevelChoice, ProbedLayer, choose_level, probe
from sandbox.jail.probe import MAX_TRIES, _probe_in_child, probe_layers
from tests.jail import jails


def layers_without(name: str) -> tuple[ProbedLayer, ...]:
    """Return the layers of a machine that lacks Landlock and the named layer."""
    landlock = ProbedLayer("Landlock", False, "refused too", "for a test")
    return (ProbedLayer("seccomp", True, "", ""), ProbedLayer(name, False, "refused here", "for a test"), landlock)


def test_every_layer_has_a_finding_and_a_purpose() -> None:
    layers = probe()
    assert len({layer.name for layer in layers}) == len(layers)
    assert len(layers) >= 15
    assert all(layer.found and layer.purpose for layer in layers)


def test_probing_leaves_nothing_behind() -> None:
    def state() -> tuple[str, str, int]:
        return Path("/proc/self/mounts").read_text(), os.uname().nodename, len(os.listdir("/proc/self/fd"))

    gc.collect()  # closes what earlier tests left open
    state_before = state()
    probe()
    assert state() == state_before


def test_auto_never_chooses_none() -> None:
    for name in ("user namespace", "seccomp", "pivot_root", "capability drop"):
        with pytest.raises(IsolationError, match=rf"{name} \(refused here\)"):
            choose_level("auto", layers_without(name))


def test_a_missing_optional_layer_does_not_prevent_a_level() -> None:
    assert choose_level("auto", layers_without("uid range")).level is Level.NAMESPACES
    assert choose_level("namespaces", layers_without("schedstat")).level is Level.NAMESPACES


def test_none_is_chosen_only_by_name() -> None:
    assert choose_level("none", layers_without("user namespace")).level is Level.NONE


def test_auto_chooses_landlock_where_namespaces_are_refused() -> None:
    layers = (ProbedLayer("user namespace", False, "refused here", ""), ProbedLayer("Landlock", True, "ABI 4", ""))
    assert choose_level("auto", layers).level is Level.LANDLOCK
    assert choose_level("landlock", layers).level is Level.LANDLOCK


def test_a_missing_landlock_is_named() -> None:
    with pytest.raises(
        IsolationError, match=r"^isolation=landlock: this machine lacks Landlock \(refused too\)\. Start"
    ):
        choose_level("landlock", layers_without("user namespace"))


def test_an_unknown_level_is_an_error_that_lists_the_levels() -> None:
    with pytest.raises(ConfigError, match="expected one of auto, nsjail, namespaces, landlock, none"):
        choose_level("docker")


def test_auto_gives_the_reason_for_not_choosing_a_stronger_level() -> None:
    landlock = ProbedLayer("Landlock", True, "ABI 7", "")
    layers = (ProbedLayer("user namespace", False, "refused here", ""), landlock)
    reason = "namespaces: this machine lacks user namespace (refused here)"
    assert choose_level("auto", layers, {}) == LevelChoice(Level.LANDLOCK, reason)
    assert choose_level("landlock", layers, {}) == LevelChoice(Level.LANDLOCK), "no reason: auto was not requested"
    all_granted = (ProbedLayer("seccomp", True, "", ""),)
    assert choose_level("auto", all_granted, {}) == LevelChoice(Level.NAMESPACES), "no reason: no nsjail was requested"


def test_auto_gives_the_reason_for_not_choosing_a_configured_nsjail() -> None:
    layers = (ProbedLayer("nsjail", False, "a trial failed: here", ""),)
    assert choose_level("auto", layers, {"RSTAR_NSJAIL": sys.executable}).reason == "nsjail: a trial failed: here"


def attempt_killed_by(signum: signal.Signals) -> Callable[[], str]:
    def attempt() -> str:
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return "survived"

    return attempt


def attempt_raising(error: Exception) -> Callable[[], str]:
    def attempt() -> str:
        raise error

    return attempt


def attempt_raising_isolation_error(error: OSError) -> Callable[[], str]:
    """Return an attempt that turns `error` into an `IsolationError`, as `userns.isolation_errors` does."""

    def attempt() -> str:
        try:
            raise error
        except OSError:
            raise IsolationError("user namespace: the kernel refused") from None

    return attempt


TRANSIENT_FAILURES = {
    "SIGKILL": attempt_killed_by(signal.SIGKILL),
    "SIGTERM": attempt_killed_by(signal.SIGTERM),
    "ENOMEM": attempt_raising(OSError(errno.ENOMEM, "no memory")),
    "EAGAIN behind an IsolationError": attempt_raising_isolation_error(OSError(errno.EAGAIN, "no process")),
    "MemoryError": attempt_raising(MemoryError("no object")),
}
REFUSALS = {
    "SIGSYS, from a filter": attempt_killed_by(signal.SIGSYS),
    "EPERM": attempt_raising(PermissionError(errno.EPERM, "refused")),
    "EPERM behind an IsolationError": attempt_raising_isolation_error(OSError(errno.EPERM, "refused")),
    "a wrong effect": attempt_raising(OSError("sizes do not hold")),
}


@pytest.mark.parametrize("failure", TRANSIENT_FAILURES)
@pytest.mark.parametrize("failures", [1, MAX_TRIES - 1, MAX_TRIES])
def test_an_attempt_is_repeated_after_a_transient_failure(
    failure: str, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[_probe_in_child.__module__], "RETRY_DELAY_S", 0)
    tries = mmap.mmap(-1, 1)  # a counter in shared memory, since each attempt runs in a child process

    def attempt() -> str:
        tries[0] += 1
        return TRANSIENT_FAILURES[failure]() if tries[0] <= failures else "granted"

    layer = _probe_in_child("seccomp", attempt, "for a test")
    assert layer.ok == (failures < MAX_TRIES), layer
    assert layer.found
    assert tries[0] == min(failures + 1, MAX_TRIES)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_an_attempt_is_not_repeated_after_a_refusal_by_the_kernel(refusal: str) -> None:
    tries = mmap.mmap(-1, 1)

    def attempt() -> str:
        tries[0] += 1
        return REFUSALS[refusal]()

    layer = _probe_in_child("seccomp", attempt, "for a test")
    assert not layer.ok
    assert layer.found
    assert tries[0] == 1


def test_threads_and_libraries_that_start_them_in_children_do_not_change_the_result() -> None:
    [expected] = probe_layers(["user namespace"])
    code = (
        "import _thread, os, threading\n"
        "from sandbox.jail.probe import probe_layers\n"
        "_thread.start_new_thread(threading.Event().wait, ())\n"
        "os.register_at_fork(after_in_child=lambda: _thread.start_new_thread(threading.Event().wait, ()))\n"
        "print(probe_layers(['user namespace']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"({expected},)\n"


def test_a_probe_whose_interpreter_fails_is_an_error_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(IsolationError, match=r"^the isolation layers could not be tried: .*false ended with status 1"):
        probe_layers(["seccomp"])
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(IsolationError, match=r"^the isolation layers could not be tried: .*No such file"):
        probe_layers(["seccomp"])


def test_level_none_is_chosen_without_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")  # this Python would run the probe
    assert choose_level("none") == LevelChoice(Level.NONE)


def test_a_probe_whose_interpreter_is_killed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, tries = tmp_path / "python", tmp_path / "tries"
    script.write_text(
        f'#!/bin/sh\necho >>{tries}\n[ $(wc -l <{tries}) -gt 2 ] || kill -9 $$\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert [layer.name for layer in probe_layers(["seccomp"])] == ["seccomp"]
    assert len(tries.read_text()) == 3


def test_a_killed_child_of_an_attempt_is_a_transient_failure() -> None:
    """In the first attempt, the child that writes the id map is killed. The test's own process may have threads."""
    code = """
import mmap, os
from sandbox.jail import userns
from sandbox.jail.probe import _probe_in_child

tries = mmap.mmap(-1, 1)

def attempt():
    tries[0] += 1
    if tries[0] == 1:
        userns._write_maps = lambda *_: os.kill(os.getpid(), 9)
    proc_self = userns.open_proc_self()
    userns.become_privileged()  # an ordinary user may map only its own id, until it is root of a namespace
    userns.unshare_mapped(0, userns.id_map(None, 0, proc_self), proc_self)
    return "mapped"

layer = _probe_in_child("user namespace", attempt, "for a test")
print(tries[0], layer.found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [layer] = probe_layers(["user namespace"])
    if not layer.ok:
        pytest.skip(f"this machine grants no user namespace: {layer.found}")
    assert done.stdout == "2 mapped\n"


def test_auto_chooses_landlock_where_groups_cannot_be_changed(isolation: None) -> None:
    code = "from sandbox.jail import choose_level; c = choose_level('auto', None, {}); print(c.level, c.reason)"
    run = jails.run_in_user_namespace(sys.executable, "-c", code)
    if "isolation=landlock: this machine lacks" in run.stderr:
        pytest.skip(run.stderr.splitlines()[-1])
    level, _, reason = run.stdout.partition(" ")
    assert level == "landlock", run.stderr
    assert reason.startswith("namespaces: this machine lacks user namespace (user ids: the kernel refused ([Errno 1]")
