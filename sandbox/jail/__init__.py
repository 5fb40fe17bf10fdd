"""Isolation: jails around zygotes, the plan that confines each call, and a probe of what this machine supports.

    python = Interpreter.find("/opt/runtime/bin/python")
    uid_base, uid_count = host_uids(jail_number=0, slots=64)
    spec = JailSpec(choose_level("auto").level, python, GUEST_SOURCE_DIR, uid_base=uid_base, uid_count=uid_count)
    subprocess.Popen(launch_argv(spec, fd), pass_fds=[fd])

The package is synchronous and imports only the standard library, `machine` and `errors`. `launch_argv` has no effects.
"""

from sandbox.jail.cgroup import CgroupUsage, SlotCgroup
from sandbox.jail.cgroup_tree import CgroupTree, IdleCgroup, fds_for_slots, max_slots_for_fds, raise_fd_limit_for
from sandbox.jail.data_mounts import check_mounts
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.kernel import can_restore_priority
from sandbox.jail.landlock_rules import scratch_parent_dir
from sandbox.jail.level_choice import AUTO, LevelChoice, choose_level
from sandbox.jail.plan import confinement_plan, launch_argv
from sandbox.jail.probe import ProbedLayer, probe, probe_process_limits
from sandbox.jail.spec import FIRST_SLOT_UID, GUEST_SOURCE_DIR, JailSpec, Level
from sandbox.jail.uid_range import host_uids

__all__ = [
    "AUTO",
    "FIRST_SLOT_UID",
    "GUEST_SOURCE_DIR",
    "CgroupTree",
    "CgroupUsage",
    "IdleCgroup",
    "Interpreter",
    "JailSpec",
    "Level",
    "LevelChoice",
    "ProbedLayer",
    "SlotCgroup",
    "can_restore_priority",
    "check_mounts",
    "choose_level",
    "confinement_plan",
    "fds_for_slots",
    "host_uids",
    "launch_argv",
    "max_slots_for_fds",
    "probe",
    "probe_process_limits",
    "raise_fd_limit_for",
    "scratch_parent_dir",
]
