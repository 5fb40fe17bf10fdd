"""Finding out what the machine grants, and refusing by name what it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import Layer, Level, choose, probe


def without(name: str) -> tuple[Layer, ...]:
    landlock = Layer("Landlock", False, "refused too", "for a test")
    return (Layer("seccomp", True, "", ""), Layer(name, False, "refused here", "for a test"), landlock)


def test_every_layer_says_what_was_found_and_what_it_is_for() -> None:
    layers = probe()
    assert len({layer.name for layer in layers}) == len(layers) >= 15
    assert all(layer.found and layer.purpose for layer in layers)


def test_probing_leaves_nothing_behind() -> None:
    def state() -> tuple[str, str, int]:
        return Path("/proc/self/mounts").read_text(), os.uname().nodename, len(os.listdir("/proc/self/fd"))

    before = state()
    probe()
    assert state() == before


def test_auto_never_falls_to_none() -> None:
    for name in ("user namespace", "seccomp", "pivot_root", "capability drop"):
        with pytest.raises(IsolationError, match=rf"{name} \(refused here\)"):
            choose("auto", without(name))


def test_missing_layer_of_no_weight_does_not_stop_the_start() -> None:
    assert choose("auto", without("uid range")) is choose("namespaces", without("schedstat")) is Level.NAMESPACES


def test_none_is_taken_only_by_name() -> None:
    assert choose("none", without("user namespace")) is Level.NONE


def test_auto_takes_landlock_where_namespaces_are_refused() -> None:
    layers = (Layer("user namespace", False, "refused here", ""), Layer("Landlock", True, "ABI 4", ""))
    assert choose("auto", layers) is choose("landlock", layers) is Level.LANDLOCK


def test_landlock_that_is_missing_is_refused_by_name() -> None:
    with pytest.raises(
        IsolationError, match=r"^isolation=landlock: this machine lacks Landlock \(refused too\)\. Start"
    ):
        choose("landlock", without("user namespace"))


def test_unknown_level_names_the_known() -> None:
    with pytest.raises(ConfigError, match="expected one of auto, nsjail, namespaces, landlock, none"):
        choose("docker")
