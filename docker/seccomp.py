"""Writes the seccomp profile for level `namespaces` in a container without --privileged: `python docker/seccomp.py`.

- The profile is an allow-list of three parts: the system calls of model-written code, by name, since the filter of each
  call checks the arguments (`sandbox.jail.seccomp.CALL_POLICY`); the system calls that the server and its container
  need in addition; and the system calls by which the server builds jails, only with the arguments that it uses.
- All other system calls fail with EPERM. Those that fail with ENOSYS in the policy also do so here: the C library uses
  clone instead of clone3 only after ENOSYS.
- The profile is for x86_64 and aarch64, as the policy is. A container runtime leaves out the names of system calls that
  its machine does not have. All checked arguments have the same places on both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sandbox.jail import kernel, seccomp, userns
from sandbox.jail.syscalls import NUMBERS, X86_64

PROFILE = Path(__file__).parent / "seccomp.json"

_SERVER_CALLS = """
    bind listen accept accept4 connect setsockopt sendmsg sendmmsg
    memfd_create sendfile
    seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
    capset setresuid setresgid setgroups flock
    setpriority sched_setscheduler
"""
"""System calls that the server makes to serve HTTP, to pass descriptors, to create memory files for output, to set the
filters and uids of calls, to lock what it removes at its next start, and to lower the CPU priority of long calls."""
_RUNTIME_CALLS = "setuid setgid"
"""System calls of the container runtime, which loads the profile before it changes to the container's uid."""

_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_NETLINK, _ROUTE = 16, 0  # AF_NETLINK, NETLINK_ROUTE
_EVERY_NAMESPACE = 0x7E020000
"""All CLONE_NEW* flags of clone(2)."""
_NAMESPACES = kernel.CLONE_NEWUSER | userns.JAIL_NAMESPACES
_MOUNTS = (
    *(kernel.MS_RDONLY, kernel.MS_NOSUID, kernel.MS_NODEV, kernel.MS_NOEXEC),
    *(kernel.MS_REMOUNT, kernel.MS_BIND, kernel.MS_MOVE, kernel.MS_REC, kernel.MS_PRIVATE),
)


def _has_none_of(index: int, bits: int) -> dict[str, Any]:
    """Require that argument `index` has none of these bits."""
    return {"index": index, "value": bits, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}


def _has_only(index: int, bits: int) -> dict[str, Any]:
    """Require that argument `index` has only these bits."""
    return _has_none_of(index, ~bits & (1 << 64) - 1)


def _equals(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


CHECKED: tuple[tuple[str, tuple[dict[str, Any], ...]], ...] = (
    *(("socket", (_equals(0, family),)) for family in _FAMILIES),
    # The C library and the probe list interfaces by this socket. Other netlink sockets would give root of a network
    # namespace access to the parts of the kernel with the most bugs, above all netfilter.
    ("socket", (_equals(0, _NETLINK), _equals(2, _ROUTE))),
    ("unshare", (_has_only(0, _NAMESPACES),)),  # the jail's namespaces, and each call's own
    ("setns", (_equals(1, kernel.CLONE_NEWNET),)),  # each call, into the network namespace of its slot
    ("clone", (_has_none_of(0, _EVERY_NAMESPACE & ~kernel.CLONE_NEWPID),)),  # each call, into a PID namespace
    ("mount", (_has_only(3, sum(_MOUNTS)),)),  # the read-only root; the scratch directory of each call
    ("umount2", (_equals(1, kernel.MNT_DETACH),)),  # the host's root
    ("pivot_root", ()),
    ("sethostname", ()),
)


def profile() -> str:
    """Return the text of the profile."""
    checked = {name for name, _ in CHECKED}
    rules = {name: seccomp.rule_for(number, "x86_64") for name, number in X86_64.items()}
    allowed = {name for name in seccomp.CALL_POLICY if rules[name] != seccomp.ENOSYS}
    allowed = (allowed | {*_SERVER_CALLS.split(), *_RUNTIME_CALLS.split()}) - checked
    not_implemented = {name for name, rule in rules.items() if rule == seccomp.ENOSYS} - allowed
    document = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": seccomp.EPERM & 0xFFFF,
        "architectures": [f"SCMP_ARCH_{machine.upper()}" for machine in NUMBERS],
        "syscalls": [
            {"names": sorted(allowed), "action": "SCMP_ACT_ALLOW"},
            {"names": sorted(not_implemented), "action": "SCMP_ACT_ERRNO", "errnoRet": seccomp.ENOSYS & 0xFFFF},
            *({"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(checks)} for name, checks in CHECKED),
        ],
    }
    return json.dumps(document, indent="\t") + "\n"


if __name__ == "__main__":
    PROFILE.write_text(profile(), encoding="utf-8")
