"""Turns a `JailSpec` into the argv that starts the jail, and into the plan by which the guest confines each call. The
guest is the code inside the jail; its zygotes fork the calls."""

from __future__ import annotations

import base64
import sys
from dataclasses import asdict
from typing import Any, TypedDict

from sandbox.jail import kernel, seccomp
from sandbox.jail.landlock_rules import check_requirements, rules_for
from sandbox.jail.spec import FIRST_SLOT_UID, JailSpec, Level

MAX_SCRATCH_FILES = 4096
"""Maximum number of files in a scratch directory. Each file takes about 1 KiB of kernel memory beyond disk_mb."""
LAUNCHER_MODULES = {
    Level.NSJAIL: "launch_nsjail",
    Level.NAMESPACES: "launch_namespaces",
    Level.LANDLOCK: "launch_landlock",
    Level.NONE: "launch_none",
}


class ConfinementPlan(TypedDict):
    """The parameters by which the guest confines calls. `guest/confine.py` defines the order of the steps."""

    zygote_filter: str | None
    """Seccomp program that each zygote loads, in base64."""
    clear_bounding_set: bool
    """Whether the zygote empties its capability bounding set."""
    pid_namespace: bool
    """Whether a call is forked into its own PID namespace."""
    namespaces: int
    """CLONE_NEW* flags of the namespaces that a call enters."""
    user_namespace: bool
    """Whether a call also enters its own user namespace."""
    scratch_mount: str | None
    """Directory on which a call mounts its own tmpfs."""
    max_files: int
    """Maximum number of files in that tmpfs."""
    uid_base: int | None
    """Uid of the calls of slot 0, or None if calls keep the zygote's uid."""
    drop_capabilities: bool
    limits_processes: bool
    """Whether a call gets RLIMIT_NPROC. It is False if other calls have the same uid in the same user namespace,
    because the kernel would count the processes of all these calls together."""
    landlock: dict[str, Any] | None
    """Rules and directories for `guest/landlock_slots.py`."""
    no_new_privs: bool
    slot_networks: bool
    """`JailSpec.has_slot_networks`."""
    call_filter: str | None
    """Seccomp program that each call loads, in base64."""
    loopback_filter: str | None
    """Seccomp program that a call with `network: "loopback"` loads instead of `call_filter`. None if such calls are
    refused."""
    session_filter: str | None
    """Seccomp program that the first state of a session loads. None if there are no sessions at this level."""
    own_pid_offsets: list[int]
    """Offsets in the seccomp program of a call at which the guest writes the call's pid."""


def launch_argv(spec: JailSpec, socket_fd: int) -> list[str]:
    """Return the argv of the launcher, which must inherit `socket_fd`, the guest's end of a Unix socket.

        subprocess.Popen(launch_argv(spec, fd), pass_fds=[fd])

    The launcher's exit status is the guest's. The jail ends when the launcher is killed, and when the process that
    started the launcher ends.
    """
    assert socket_fd > 2, "the guest's standard streams are replaced"
    module = f"sandbox.jail.{LAUNCHER_MODULES[spec.level]}"
    return [sys.executable, "-I", "-m", module, spec.encode(), str(socket_fd)]


def confinement_plan(spec: JailSpec) -> ConfinementPlan:
    """Return the plan of this jail, which is sent to its zygotes as JSON.

    Raises `IsolationError` if level `landlock` lacks something, or there is no seccomp policy for this machine.
    """
    plan: ConfinementPlan = {
        "zygote_filter": None,
        "clear_bounding_set": False,
        "pid_namespace": False,
        "namespaces": 0,
        "user_namespace": False,
        "scratch_mount": None,
        "max_files": MAX_SCRATCH_FILES,
        "uid_base": None,
        "drop_capabilities": False,
        "limits_processes": False,
        "landlock": None,
        "no_new_privs": False,
        "slot_networks": False,
        "call_filter": None,
        "loopback_filter": None,
        "session_filter": None,
        "own_pid_offsets": [],
    }
    match spec.level:
        case Level.NSJAIL | Level.NAMESPACES:
            _add_namespace_steps(plan, spec)
        case Level.LANDLOCK:
            _add_landlock_steps(plan, spec)
    return plan


def _add_namespace_steps(plan: ConfinementPlan, spec: JailSpec) -> None:
    plan["zygote_filter"] = _encoded_filter(seccomp.FilterKind.ZYGOTE)
    plan["clear_bounding_set"] = plan["pid_namespace"] = plan["drop_capabilities"] = plan["no_new_privs"] = True
    # No IPC namespace: before Linux 6.3 the kernel frees one in each RCU grace period, so calls that follow one another
    # would soon reach user.max_ipc_namespaces. The calls of a jail share its IPC namespace, in which nobody can create
    # an object: both filters refuse all system calls of System V IPC and of POSIX message queues.
    plan["namespaces"] = kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS
    plan["user_namespace"] = spec.user_namespace_per_call
    plan["scratch_mount"] = "/tmp"
    plan["uid_base"] = FIRST_SLOT_UID if spec.uid_base is not None else None
    plan["limits_processes"] = spec.uid_base is not None or spec.user_namespace_per_call
    plan["call_filter"] = _encoded_filter(seccomp.FilterKind.CALL_ON_TOP)
    plan["session_filter"] = _encoded_filter(seccomp.FilterKind.SESSION_ON_TOP)
    if spec.has_slot_networks:
        plan["slot_networks"] = True
        plan["call_filter"] = _encoded_filter(seccomp.FilterKind.NAMED_SOCKETS_ON_TOP)
        plan["loopback_filter"] = _encoded_filter(seccomp.FilterKind.LOOPBACK_ON_TOP)


def _add_landlock_steps(plan: ConfinementPlan, spec: JailSpec) -> None:
    """Add the steps of level `landlock`.

    The zygote has no filter. A call would inherit the filter, and the filter would refuse system calls that the call
    needs to enter its scratch directory.
    """
    abi = kernel.landlock_abi()
    check_requirements(spec, abi)
    has_uids = spec.uid_base is not None
    kind = seccomp.FilterKind.OWN_UID if has_uids else seccomp.FilterKind.SHARED_UID
    plan["clear_bounding_set"] = plan["limits_processes"] = has_uids
    plan["drop_capabilities"] = plan["no_new_privs"] = True
    plan["uid_base"] = None if spec.uid_base is None else spec.uid_base + FIRST_SLOT_UID
    plan["landlock"] = {
        **asdict(rules_for(spec, abi)),
        "slots_dir": f"{spec.scratch_root}/calls",
        "uid_base": plan["uid_base"],
        "slots": spec.landlock_slots,
    }
    plan["call_filter"] = _encoded_filter(kind)
    plan["own_pid_offsets"] = seccomp.own_pid_offsets(seccomp.program(kind))


def _encoded_filter(kind: seccomp.FilterKind) -> str:
    return base64.b64encode(seccomp.program(kind)).decode()
