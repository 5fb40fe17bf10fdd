"""What attacks get at the weaker levels, and error that cannot be helped there.

Each line is a test that must fail: the day an attack stops succeeding, this table has to change. docs/isolation.md says
the same in prose.
"""

from __future__ import annotations

import os

NO_NAMESPACES = "without namespaces a call sees the machine's own numbers and names"
DISK = "without a tmpfs of its own a call's directory has no size: disk_mb bounds each file, not their number"
LANDLOCK = {
    "test_learning[its name]": f"{NO_NAMESPACES}: uname(2)",
    "test_learning[that a path exists]": "Landlock does not cover stat(2): names can be attempt, contents cannot be read",
    "test_learning[our own server's paths]": "the runtime is used where it lies, and tracebacks say where",
    "test_learning[who started us]": f"{NO_NAMESPACES}: getppid(2)",
    "test_learning[how many are here]": f"{NO_NAMESPACES}: getpid(2)",
    "test_reaching[a handle of a process]": f"{NO_NAMESPACES}: pidfd_open(2); no signal passes through it",
    "test_reaching[the priority of a process]": f"{NO_NAMESPACES}: getpriority(2) may be read of any process",
    "test_reaching[the session of a process]": f"{NO_NAMESPACES}: getpgid(2) may be read of any process",
    "test_reaching[any process by counting]": f"{NO_NAMESPACES}: kill(2) tells what exists from what does not",
    "test_bomb_of[disk in many files]": DISK,
    "test_bomb_of[inodes]": DISK,
    "test_bomb_of[folders in folders]": DISK,
}
# Its calls may not even open a pidfd: the filter there is for one process.
ONE_UID = {test: error for test, error in LANDLOCK.items() if "handle" not in test}
WE_ARE_ROOT = os.geteuid() == 0
GROUPS = {
    "test_learning[its groups]": "setgroups(2) takes privilege: an ordinary user's calls keep the server's groups"
}
OURS = {} if WE_ARE_ROOT or not os.getgroups() else GROUPS
EXPECTED: dict[str, dict[str, str]] = {
    "nsjail": OURS,
    "namespaces": OURS,
    "landlock": {**(LANDLOCK if WE_ARE_ROOT else ONE_UID), **OURS},
    "landlock as nobody": ONE_UID,
}
"""Target, then test (as pytest names it, less the target) -> reason."""


def reason(target: str, test: str) -> str | None:
    return EXPECTED.get(target, {}).get(test)
