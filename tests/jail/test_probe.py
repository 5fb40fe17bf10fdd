"""Probing layers, repeating attempts after transient failures, and choosing a level."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import Level, LevelChoice, ProbedLayer, choose_level, probe
from sandbox.jail.probe import MAX_TRIES, _probe_in_child
from tests.jail import jails


def without(name: str) -> tuple[ProbedLayer, ...]:
    """Return the layers of a machine that lacks Landlock and the named layer."""
    landlock = ProbedLayer("Landlock", False, "refused too", "for a test")
    return (ProbedLayer("seccomp", True, "", ""), ProbedLayer(name, False, "refused here", "for a test"), landlock)


def test_every_layer_has_a_finding_and_a_purpose() -> None:
    layers = probe()
    assert len({layer.name for layer in layers}) == len(layers) >= 15
    assert all(layer.found and layer.purpose for layer in layers)


def test_probing_leaves_nothing_behind() -> None:
    def state() -> tuple[str, str, int]:
        return Path("/proc/self/mounts").read_text(), os.uname().nodename, len(os.listdir("/proc/self/fd"))

    before = state()
    probe()
    assert state() == before


def test_auto_never_chooses_none() -> None:
    for name in ("user namespace", "seccomp", "pivot_root", "capability drop"):
        with pytest.raises(IsolationError, match=rf"{name} \(refused here\)"):
            choose_level("auto", without(name))


def test_a_missing_optional_layer_does_not_prevent_a_level() -> None:
    assert (
        choose_level("auto", without("uid range")).level
        is choose_level("namespaces", without("schedstat")).level
        is Level.NAMESPACES
    )


def test_none_is_chosen_only_by_name() -> None:
    assert choose_level("none", without("user namespace")).level is Level.NONE


def test_auto_chooses_landlock_where_namespaces_are_refused() -> None:
    layers = (ProbedLayer("user namespace", False, "refused here", ""), ProbedLayer("Landlock", True, "ABI 4", ""))
    assert choose_level("auto", layers).level is choose_level("landlock", layers).level is Level.LANDLOCK


def test_a_missing_landlock_is_named() -> None:
    with pytest.raises(
        IsolationError, match=r"^isolation=landlock: this machine lacks Landlock \(refused too\)\. Start"
    ):
        choose_level("landlock", without("user namespace"))


def test_an_unknown_level_is_an_error_that_lists_the_levels() -> None:
    with pytest.raises(ConfigError, match="expected one of auto, nsjail, namespaces, landlock, none"):
        choose_level("docker")


def test_auto_gives_the_reason_for_not_choosing_a_stronger_level() -> None:
    landlock = ProbedLayer("Landlock", True, "ABI 7", "")
    refused = (ProbedLayer("user namespace", False, "refused here", ""), landlock)
    reason = "namespaces: this machine lacks user namespace (refused here)"
    assert choose_level("auto", refused, {}) == LevelChoice(Level.LANDLOCK, reason)
    assert choose_level("landlock", refused, {}) == LevelChoice(Level.LANDLOCK)
    assert choose_level("auto", (ProbedLayer("seccomp", True, "", ""),), {}) == LevelChoice(Level.NAMESPACES)


def test_auto_gives_the_reason_for_not_choosing_a_configured_nsjail() -> None:
    layers = (ProbedLayer("nsjail", False, "a trial failed: here", ""),)
    assert choose_level("auto", layers, {"RSTAR_NSJAIL": sys.executable}).reason == "nsjail: a trial failed: here"


def killed(number: signal.Signals) -> Callable[[], str]:
    def attempt() -> str:
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
        return "survived"

    return attempt


def raising(error: Exception) -> Callable[[], str]:
    def attempt() -> str:
        raise error

    return attempt


def wrapped(error: OSError) -> Callable[[], str]:
    """Raise an `IsolationError` as `userns.layer_errors` does."""

    def attempt() -> str:
        try:
            raise error
        except OSError:
            raise IsolationError("user namespace: the kernel refused") from None

    return attempt


TRANSIENT = {
    "killed": killed(signal.SIGKILL),
    "terminated": killed(signal.SIGTERM),
    "no memory": raising(OSError(errno.ENOMEM, "no memory")),
    "no process": wrapped(OSError(errno.EAGAIN, "no process")),
    "no object": raising(MemoryError("no object")),
}
FINAL = {
    "a filter kills": killed(signal.SIGSYS),
    "refused": raising(PermissionError(errno.EPERM, "refused")),
    "refused by name": wrapped(OSError(errno.EPERM, "refused")),
    "wrong": raising(OSError("sizes do not hold")),
}


@pytest.mark.parametrize("reason", TRANSIENT)
@pytest.mark.parametrize("failures", [1, MAX_TRIES - 1, MAX_TRIES])
def test_an_attempt_is_repeated_after_a_transient_failure(
    reason: str, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[_probe_in_child.__module__], "RETRY_DELAY_S", 0)
    attempts = mmap.mmap(-1, 1)  # shared memory: each attempt runs in a child process

    def attempt() -> str:
        attempts[0] += 1
        return TRANSIENT[reason]() if attempts[0] <= failures else "there"

    layer = _probe_in_child("seccomp", attempt, "for a test")
    assert (layer.ok, attempts[0]) == (failures < MAX_TRIES, min(failures + 1, MAX_TRIES)), layer
    assert layer.found


@pytest.mark.parametrize("reason", FINAL)
def test_a_refusal_by_the_kernel_is_not_repeated(reason: str) -> None:
    attempts = mmap.mmap(-1, 1)

    def attempt() -> str:
        attempts[0] += 1
        return FINAL[reason]()

    layer = _probe_in_child("seccomp", attempt, "for a test")
    assert (layer.ok, attempts[0], bool(layer.found)) == (False, 1, True)


def test_a_killed_child_of_an_attempt_is_a_transient_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first attempt the child that writes the id map is killed."""
    from sandbox.jail import userns

    attempts = mmap.mmap(-1, 1)

    def attempt() -> str:
        attempts[0] += 1
        if attempts[0] == 1:
            monkeypatch.setattr(userns, "_write_maps", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        proc = userns.open_proc_self()
        userns.unshare_mapped(0, userns.id_map(None, 0, proc), proc)
        return "mapped"

    layer = _probe_in_child("user namespace", attempt, "for a test")
    if not layer.ok and "killed" not in layer.found:
        pytest.skip(f"this machine grants no user namespace: {layer.found}")
    assert (layer.ok, attempts[0]) == (True, 2), layer


def test_auto_chooses_landlock_where_groups_cannot_be_changed(isolation: None) -> None:
    code = (
        "from sandbox.jail import choose_level as f; choice = f('auto', None, {}); print(choice.level, choice.reason)"
    )
    run = jails.run_in_user_namespace(sys.executable, "-c", code)
    if "isolation=landlock: this machine lacks" in run.stderr:
        pytest.skip(run.stderr.splitlines()[-1])
    level, _, reason = run.stdout.partition(" ")
    assert level == "landlock", run.stderr
    assert reason.startswith("namespaces: this machine lacks user namespace (user ids: the kernel refused ([Errno 1]")
