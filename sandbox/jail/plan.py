"""From a spec to what is done: the argv that starts a jail, and the steps that the guest takes around each call."""

from __future__ import annotations

import base64
import sys
from typing import Any

from sandbox.errors import IsolationError
from sandbox.jail import kernel, seccomp
from sandbox.jail.spec import SLOT_UID, JailSpec, Level

CALL_INODES = 4096
"""Files in a call's scratch folder: each costs the kernel about 1 KiB that disk_mb does not count."""
NOT_BUILT = frozenset({Level.LANDLOCK})
LAUNCHERS = {Level.NSJAIL: "nsjail", Level.NAMESPACES: "namespaces", Level.NONE: "plain"}


def command(spec: JailSpec, fd: int) -> list[str]:
    """The argv that starts this jail, with `fd` (a Unix socket) inherited. Raises `IsolationError` for levels to come.

    Start it by `subprocess.Popen(command(spec, fd), pass_fds=[fd])`. Its exit status is the guest's; killing it takes
    the whole jail down, and the end of the process that started it does, too.
    """
    refuse_unbuilt(spec.level)
    assert fd > 2, "standard streams are not passed on"
    return [sys.executable, "-I", "-m", f"sandbox.jail.{LAUNCHERS[spec.level]}", spec.encode(), str(fd)]


def call_plan(spec: JailSpec) -> dict[str, Any]:
    """What the guest does around each call, as JSON: `guest.confine` carries it out."""
    refuse_unbuilt(spec.level)
    confined = spec.level in (Level.NSJAIL, Level.NAMESPACES)
    return {
        "level": spec.level.value,
        "unshare_pid": confined,
        "unshare": kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS if confined else 0,
        "tmpfs": "/tmp" if confined else None,
        "inodes": CALL_INODES,
        "uid_base": SLOT_UID if confined and spec.uid_base is not None else None,
        "drop_caps": confined,
        "no_new_privs": confined,
        "seccomp": base64.b64encode(seccomp.program()).decode() if confined else None,
    }


def refuse_unbuilt(level: Level) -> None:
    if level in NOT_BUILT:
        raise IsolationError(f"isolation={level.value}: not built yet; use {Level.NAMESPACES.value}, or auto")
