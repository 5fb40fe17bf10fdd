"""Attacks that succeed at the weaker levels, and the reason why they cannot be prevented there.

Each entry is a test that must fail: when an attack stops succeeding, this table has to change. docs/isolation.md
explains the same in prose.
"""

from __future__ import annotations

import os

from sandbox.jail import Level, host_uids

NO_NAMESPACES = "without namespaces a call sees the machine's own pids and names"
DISK = "without its own tmpfs a scratch directory has no size limit: disk_mb limits each file, not their number"
LANDLOCK = {
    "test_a_call_cannot_learn[the host name]": f"{NO_NAMESPACES}: uname(2)",
    "test_a_call_cannot_learn[whether a path exists]": "Landlock does not restrict stat(2): a call can test whether a name exists, but not read the file",
    "test_a_call_cannot_learn[paths of the server]": "the runtime is used at its path on the host, which tracebacks show",
    "test_a_call_cannot_learn[the pid of the parent]": f"{NO_NAMESPACES}: getppid(2)",
    "test_a_call_cannot_learn[the number of processes]": f"{NO_NAMESPACES}: getpid(2)",
    "test_a_call_cannot_reach[a pidfd of a process]": f"{NO_NAMESPACES}: pidfd_open(2); no signal passes through it",
    "test_a_call_cannot_reach[the priority of a process]": f"{NO_NAMESPACES}: getpriority(2) may be read of any process",
    "test_a_call_cannot_reach[the session of a process]": f"{NO_NAMESPACES}: getpgid(2) may be read of any process",
    "test_a_call_cannot_reach[any process by trying all pids]": f"{NO_NAMESPACES}: kill(2) fails differently for pids that do not exist",
    "test_other_calls_survive_a_bomb_of[disk in many files]": DISK,
    "test_other_calls_survive_a_bomb_of[inodes]": DISK,
    "test_other_calls_survive_a_bomb_of[nested directories]": DISK,
}
# The filter also refuses pidfd_open(2) if all calls have one uid.
ONE_UID = {test: reason for test, reason in LANDLOCK.items() if "pidfd" not in test}
IS_ROOT = os.geteuid() == 0
GROUPS = {
    "test_a_call_cannot_learn[groups of the server]": "setgroups(2) needs a privilege: an ordinary user's calls keep the server's groups"
}


def server_groups(level: Level) -> dict[str, str]:
    """Return `GROUPS` if calls at this level keep the groups of the server. An ordinary user may drop the groups only
    with a range of ids from newuidmap(1)."""
    has_range = host_uids(jail_number=0, slots=1, level=level)[0] is not None
    return {} if IS_ROOT or has_range or not os.getgroups() else GROUPS


EXPECTED: dict[str, dict[str, str]] = {
    "nsjail": server_groups(Level.NSJAIL),
    "namespaces": server_groups(Level.NAMESPACES),
    "landlock": {**(LANDLOCK if IS_ROOT else ONE_UID), **server_groups(Level.LANDLOCK)},
    "landlock as nobody": ONE_UID,
}
"""Target -> test (pytest's name without the target) -> reason."""


def reason(target: str, test: str) -> str | None:
    return EXPECTED.get(target, {}).get(test)
