"""Chooses the isolation level from the layers that this machine grants. `auto` never chooses `none`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import nsjail_binary
from sandbox.jail.probe import NAMESPACE_LAYERS, NSJAIL, ProbedLayer, probe_layers, probe_nsjail
from sandbox.jail.spec import Level

AUTO = "auto"
MAX_REASON_CHARS = 500
_STRONGEST_FIRST: tuple[Level, ...] = (Level.NSJAIL, Level.NAMESPACES, Level.LANDLOCK)
_REQUIRED_LAYERS: Mapping[Level, frozenset[str]] = {
    Level.NSJAIL: NAMESPACE_LAYERS,
    Level.NAMESPACES: NAMESPACE_LAYERS,
    Level.LANDLOCK: frozenset({"Landlock", "no_new_privs", "seccomp", "rlimits"}),
    Level.NONE: frozenset(),
}
_ALLOW_NAMESPACES = (
    "Start as root with CAP_SYS_ADMIN, or allow unprivileged user namespaces (sysctl user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns, and in a container its seccomp profile)"
)
_REMEDIES = {
    Level.NSJAIL: _ALLOW_NAMESPACES,
    Level.NAMESPACES: _ALLOW_NAMESPACES,
    Level.LANDLOCK: "Start on Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK and landlock among lsm= at boot",
}
_REMEDY_FOR_SECCOMP = "Start on a kernel with CONFIG_SECCOMP_FILTER"


@dataclass(frozen=True, slots=True)
class LevelChoice:
    level: Level
    reason: str = ""
    """Why `auto` chose no stronger level: the layers that the machine lacks. It is empty if `auto` chose the strongest
    level, or if a level was requested by name."""


def choose_level(
    requested: str, layers: tuple[ProbedLayer, ...] | None = None, environ: Mapping[str, str] = os.environ
) -> LevelChoice:
    """Return the requested level, or for `auto` the strongest that the machine supports.

    `layers` is the result of a probe. Without it, the required layers are probed now.

    Raises `ConfigError` for an unknown level, and `IsolationError` if the machine lacks a layer of the level or
    RSTAR_NSJAIL names no program.
    """
    is_nsjail_requested = bool(environ.get(nsjail_binary.VARIABLE))
    if requested == AUTO:
        if is_nsjail_requested:
            nsjail_binary.find(environ)  # raises if the variable names no program
        candidates = _STRONGEST_FIRST
    else:
        try:
            candidates = (Level(requested),)
        except ValueError:
            raise ConfigError(f"isolation={requested!r}: expected one of {AUTO}, {', '.join(Level)}") from None
    refused: list[tuple[Level, str, str]] = []
    for level in candidates:
        problem, remedy = _missing_layers(level, layers, environ)
        if not problem:
            return LevelChoice(level, "; ".join(f"{other}: {text}" for other, text, _ in refused)[:MAX_REASON_CHARS])
        if requested != AUTO or level is not Level.NSJAIL or is_nsjail_requested:  # nsjail is optional otherwise
            refused.append((level, problem, remedy))
    sentences = (f"isolation={level.value}: {problem}{remedy}" for level, problem, remedy in refused)
    raise IsolationError(
        f"{'. '.join(sentences)}, or ask for isolation=none by name. `rstar-sandbox doctor` shows the commands"
    )


def _missing_layers(
    level: Level, layers: tuple[ProbedLayer, ...] | None, environ: Mapping[str, str]
) -> tuple[str, str]:
    """Return (problem, remedy) of a level on this machine. The problem is empty if no layer is missing."""
    if level is Level.NSJAIL:
        nsjail = next((layer for layer in layers or (probe_nsjail(environ),) if layer.name == NSJAIL), None)
        if nsjail is None or not nsjail.ok:
            return nsjail.found if nsjail else "not tried", f"; or ask for isolation={Level.NAMESPACES.value}"
    required = _REQUIRED_LAYERS[level]
    if layers is None:
        layers = probe_layers(required) if required else ()
    missing = [layer for layer in layers if layer.name in required and not layer.ok]
    if not missing:
        return "", ""
    # The first missing layer is often the reason why the others are missing too.
    text = ", ".join([f"{missing[0].name} ({missing[0].found})", *(layer.name for layer in missing[1:])])
    remedy = _REMEDY_FOR_SECCOMP if "seccomp" in {layer.name for layer in missing} else _REMEDIES[level]
    return f"this machine lacks {text}", f". {remedy}"
