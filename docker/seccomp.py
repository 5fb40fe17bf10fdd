"""The seccomp profile for level `namespaces` in a container without --privileged: `python docker/seccomp.py`.

It is Docker's default profile (`seccomp-docker.json`, as Docker 26.1.5 has it, unchanged) and `ADDED`: the system calls
by which the server jails itself in user namespaces of its own, each with the arguments that it uses and no others.
Calls of model-written code get none of this: their own filter is loaded before their first line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sandbox.jail import kernel, namespaces

HERE = Path(__file__).parent
BASE = HERE / "seccomp-docker.json"
PROFILE = HERE / "seccomp.json"

EVERY_NAMESPACE = 0x7E020000
"""Every CLONE_NEW* that clone takes: Docker's profile refuses clone with any."""
NAMESPACES = kernel.CLONE_NEWUSER | namespaces.INNER
MOUNTS = (
    *(kernel.MS_RDONLY, kernel.MS_NOSUID, kernel.MS_NODEV, kernel.MS_NOEXEC),
    *(kernel.MS_REMOUNT, kernel.MS_BIND, kernel.MS_MOVE, kernel.MS_REC, kernel.MS_PRIVATE),
)


def without(index: int, bits: int) -> dict[str, Any]:
    """Argument `index` has none of these bits."""
    return {"index": index, "value": bits, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}


def only(index: int, bits: int) -> dict[str, Any]:
    """Argument `index` has no bit but these."""
    return without(index, ~bits & (1 << 64) - 1)


def equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


ADDED: tuple[tuple[str, tuple[dict[str, Any], ...]], ...] = (
    ("unshare", (only(0, NAMESPACES),)),  # the jail's namespaces, and each call's own
    ("clone", (without(0, EVERY_NAMESPACE & ~kernel.CLONE_NEWPID),)),  # each call, into a PID namespace
    ("mount", (only(3, sum(MOUNTS)),)),  # the read-only root; each call's scratch folder
    ("umount2", (equal(1, kernel.MNT_DETACH),)),  # the host's root, let go of
    ("pivot_root", ()),
    ("sethostname", ()),
)


def profile() -> str:
    """The whole profile, as the file has it."""
    base = json.loads(BASE.read_text(encoding="utf-8"))
    added = [{"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(args)} for name, args in ADDED]
    return json.dumps({**base, "syscalls": [*base["syscalls"], *added]}, indent="\t") + "\n"


if __name__ == "__main__":
    PROFILE.write_text(profile(), encoding="utf-8")
