"""Turns a `JailSpec` into the argv that starts the jail, and into the plan by which the guest confines each call."""

from __future__ import annotations

import base64
import sys
from typing import Any

from sandbox.jail import kernel, seccomp
from sandbox.jail.landlock_rules import check_requirements, rules_for
from sandbox.jail.spec import FIRST_SLOT_UID, JailSpec, Level

CALL_INODES = 4096
"""Maximum number of files in a scratch directory. Each takes about 1 KiB of kernel memory beyond disk_mb."""
LAUNCHER_MODULES = {
    Level.NSJAIL: "launch_nsjail",
    Level.NAMESPACES: "launch_namespaces",
    Level.LANDLOCK: "launch_landlock",
    Level.NONE: "launch_none",
}


def launch_argv(spec: JailSpec, socket_fd: int) -> list[str]:
    """Return the argv of the launcher of this jail. It inherits `socket_fd`, the guest's end of a Unix socket.

        subprocess.Popen(launch_argv(spec, fd), pass_fds=[fd])

    The launcher's exit status is the guest's. The jail ends when the launcher is killed, and when the process that
    started the launcher ends.
    """
    assert socket_fd > 2, "the guest's standard streams are not the launcher's"
    module = f"sandbox.jail.{LAUNCHER_MODULES[spec.level]}"
    return [sys.executable, "-I", "-m", module, spec.encode(), str(socket_fd)]


def confinement_plan(spec: JailSpec) -> dict[str, Any]:
    """Return the plan, as JSON, that `guest/confine.py` executes for each call.

    Raises `IsolationError` if level `landlock` lacks something, or there is no seccomp policy for this machine.
    """
    if spec.level is Level.LANDLOCK:
        return _landlock_plan(spec)
    confined = spec.level in (Level.NSJAIL, Level.NAMESPACES)
    return {
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
        "unshare_pid": False,
        "unshare": 0,
        "unshare_user": False,
        "bounds_processes": has_uids,  # else the kernel would count all processes of the server's user
        "tmpfs": None,
        "inodes": CALL_INODES,
        "uid_base": uid_base,
        "drop_caps": True,
        "drop_bounding": has_uids,
        "no_new_privs": True,
        "zygote_seccomp": None,  # entering a scratch directory needs many calls that it would refuse
        "seccomp": base64.b64encode(program).decode(),
        "own_pid_at": seccomp.own_pid_offsets(program),
        "landlock": {
            **rules_for(spec, abi).encode(),
            "folder": f"{spec.scratch_root}/calls",
            "uid_base": uid_base,
            "slots": spec.slots,
        },
    }


def _encoded_filter(kind: seccomp.FilterKind) -> str:
    return base64.b64encode(seccomp.program(kind)).decode()
