"""What the kernel grants: jails around zygotes, the layers of each call, and what this machine has of them.

    python = Interpreter.find("/opt/runtime/bin/python")
    uid_base, uid_count = host_uids(jail=0, slots=64)
    spec = JailSpec(choose("auto"), python, guest_dir, uid_base=uid_base, uid_count=uid_count)
    subprocess.Popen(command(spec, fd), pass_fds=[fd])

Everything here is synchronous and imports the standard library and the hall only. `command` and `call_plan` are pure.
"""

from sandbox.jail.cgroup import Group, Spent
from sandbox.jail.cgroup_tree import Idle, Tree, files_of, most_slots, want_files
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.kernel import may_set_priorities
from sandbox.jail.landlock_rules import scratch_parent
from sandbox.jail.plan import call_plan, command
from sandbox.jail.probe import AUTO, Choice, Layer, choose, decide, probe, process_counts
from sandbox.jail.spec import SLOT_UID, JailSpec, Level
from sandbox.jail.uid_range import host_uids

__all__ = [
    "AUTO",
    "SLOT_UID",
    "Choice",
    "Group",
    "Idle",
    "Interpreter",
    "JailSpec",
    "Layer",
    "Level",
    "Spent",
    "Tree",
    "call_plan",
    "choose",
    "command",
    "decide",
    "files_of",
    "host_uids",
    "may_set_priorities",
    "most_slots",
    "probe",
    "process_counts",
    "scratch_parent",
    "want_files",
]
