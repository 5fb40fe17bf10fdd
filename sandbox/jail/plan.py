"""From a spec to what is done: the argv that starts a jail, and the steps that the guest takes around each call."""

from __future__ import annotations

import base64
import sys
from typing import Any

from sandbox.jail import kernel, seccomp
from sandbox.jail.landlock_rules import check_requirements, rules_for
from sandbox.jail.spec import FIRST_SLOT_UID, JailSpec, Level

CALL_INODES = 4096
"""Files in a call's scratch folder: each costs the kernel about 1 KiB that disk_mb does not count."""
LAUNCHER_MODULES = {
    Level.NSJAIL: "launch_nsjail",
    Level.NAMESPACES: "launch_namespaces",
    Level.LANDLOCK: "launch_landlock",
    Level.NONE: "launch_none",
}


def launch_argv(spec: JailSpec, fd: int) -> list[str]:
    """The argv that starts this jail, with `fd` (a Unix socket) inherited.

    Start it by `subprocess.Popen(command(spec, fd), pass_fds=[fd])`. Its exit status is the guest's; killing it takes
    the whole jail down, and the end of the process that started it does, too.
    """
    assert fd > 2, "standard streams are not passed on"
    return [sys.executable, "-I", "-m", f"sandbox.jail.{LAUNCHER_MODULES[spec.level]}", spec.encode(), str(fd)]


def confinement_plan(spec: JailSpec) -> dict[str, Any]:
    """What the guest does around each call, as JSON: `guest.confine` carries it out. Raises `IsolationError` where
    level `landlock` would lack something."""
    if spec.level is Level.LANDLOCK:
        return _landlock_plan(spec)
    confined = spec.level in (Level.NSJAIL, Level.NAMESPACES)
    return {
        "level": spec.level.value,
        "unshare_pid": confined,
        "unshare": kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS if confined else 0,
        "unshare_user": confined and spec.user_namespace_per_call,
        "bounds_processes": confined and (spec.uid_base is not None or spec.user_namespace_per_call),
        "tmpfs": "/tmp" if confined else None,
        "inodes": CALL_INODES,
        "uid_base": FIRST_SLOT_UID if confined and spec.uid_base is not None else None,
        "drop_caps": confined,
        "drop_bounding": confined,
        "no_new_privs": confined,
        "zygote_seccomp": _encoded_filter(seccomp.FilterKind.ZYGOTE) if confined else None,
        "seccomp": _encoded_filter(seccomp.FilterKind.CALL_ON_TOP) if confined else None,
        "own_pid_at": [],
        "landlock": None,
    }


def _landlock_plan(spec: JailSpec) -> dict[str, Any]:
    abi = kernel.landlock_abi()
    check_requirements(spec, abi)
    has_uids = spec.uid_base is not None
    program = seccomp.program(seccomp.FilterKind.OWN_UID if has_uids else seccomp.FilterKind.SHARED_UID)
    uid_base = None if spec.uid_base is None else spec.uid_base + FIRST_SLOT_UID
    return {
        "level": spec.level.value,
        "unshare_pid": False,
        "unshare": 0,
        "unshare_user": False,
        "bounds_processes": has_uids,  # else the kernel counts all that the server's uid has
        "tmpfs": None,
        "inodes": CALL_INODES,
        "uid_base": uid_base,
        "drop_caps": True,
        "drop_bounding": has_uids,
        "no_new_privs": True,
        "zygote_seccomp": None,  # there, entering the folder takes half of what a call may not
        "seccomp": base64.b64encode(program).decode(),
        "own_pid_at": seccomp.own_pid_offsets(program),
        "landlock": {
            **rules_for(spec, abi).encode(),
            "folder": f"{spec.scratch}/calls",
            "uid_base": uid_base,
            "slots": spec.slots,
        },
    }


def _encoded_filter(policy: seccomp.FilterKind) -> str:
    return base64.b64encode(seccomp.program(policy)).decode()
