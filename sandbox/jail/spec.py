"""`JailSpec`: the description of a jail. The launcher, which builds the jail, receives it as JSON.

A jail is the isolation around the zygotes of one pool. A zygote is a preloaded interpreter that forks once per call. A
slot is a numbered set of resources (uid, cgroup, scratch directory), used by one call at a time. The code inside a jail
is called the guest.

Uids inside the jail:

    0                        the zygotes
    FIRST_SLOT_UID + slot    the calls of a slot

Level `landlock` has no user namespace, so all uids are uids of the host. There the calls of a slot have the uid
`uid_base` + FIRST_SLOT_UID + slot, and each slot has two further uids (`UIDS_PER_SLOT`).

Jails with disjoint ranges of host uids (`host_uids`) share no uid, so they share no limit that the kernel counts per
uid, and no process of one jail can signal a process of another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from sandbox.errors import ConfigError
from sandbox.jail.interpreter import PYTHON_DIR_IN_JAIL, Interpreter

FIRST_SLOT_UID = 1000
"""Uid, inside the jail, of the calls of slot 0."""
UIDS_PER_SLOT = 3
"""Number of uids that a slot has at level `landlock`; `guest/landlock_slots.py` explains them. At the other levels a
slot has one."""
GUEST_SOURCE_DIR = Path(__file__).resolve().parents[1] / "guest"
GUEST_DIR_IN_JAIL = "/guest"


class Level(StrEnum):
    """Isolation levels in the order in which `auto` tries them. `nsjail` and `namespaces` stop the same attacks
    (docs/isolation.md). `landlock` is weaker than these two, and `none` is weaker than `landlock`."""

    NSJAIL = "nsjail"
    """nsjail builds the namespaces around the zygote."""
    NAMESPACES = "namespaces"
    """The launcher builds namespaces and a read-only root."""
    LANDLOCK = "landlock"
    """Landlock rulesets confine calls. This level is for containers that grant no namespaces."""
    NONE = "none"
    """Calls have rlimits only. `auto` never chooses this level."""


HOST_PATH_LEVELS = (Level.LANDLOCK, Level.NONE)
"""Levels at which the guest sees the host's paths."""


@dataclass(frozen=True, slots=True)
class JailSpec:
    level: Level
    python: Interpreter
    guest_dir: str
    """Directory on the host with the guest's source."""
    env: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    """Program and arguments that the jail runs instead of a zygote. It is empty except in tests and in the trial of
    nsjail (`probe`). A word `{fd}` is replaced by the number of the descriptor of the guest's socket."""
    uid_base: int | None = None
    """First id of the jail's range of host uids and gids, or None if all calls share one id."""
    uid_count: int = 0
    """Number of ids in this range."""
    scratch_root: str | None = None
    """At level `landlock`, the directory for the scratch directories. The launcher creates it, and removes it at the
    end of the jail. None at the other levels."""
    data: tuple[tuple[str, str], ...] = ()
    """The operator's directories that calls can read (setting `mounts`). A pair is (path in the jail, path on the
    host). `data_mounts.check_mounts` checks them."""
    user_namespace_per_call: bool = False
    """Whether each call gets its own user namespace. Several calls may have the same uid; with a namespace for each
    call, the kernel still counts their processes separately."""

    def __post_init__(self) -> None:
        if self.uid_base is not None and (self.uid_base <= 0 or self.uid_count <= FIRST_SLOT_UID):
            raise ConfigError(
                f"uid_base={self.uid_base}, uid_count={self.uid_count}: expected a base over 0 and a count over "
                f"{FIRST_SLOT_UID}, the first slot's uid; take both from host_uids()"
            )
        if (self.level is Level.LANDLOCK) != (self.scratch_root is not None):
            raise ConfigError(
                f"scratch_root={self.scratch_root!r}: expected a path at level landlock, and None at the others"
            )

    @property
    def has_slot_networks(self) -> bool:
        """Whether each slot has its own network namespace. Only then may calls give names to sockets. If calls see
        directories of the operator (`data`), no slot has one, since these directories may contain sockets of the host,
        to which a call could connect."""
        return self.level not in HOST_PATH_LEVELS and not self.data

    @property
    def landlock_slots(self) -> int:
        """Number of slots that have uids at level `landlock`: each needs `UIDS_PER_SLOT` uids of the range."""
        return max(0, self.uid_count - FIRST_SLOT_UID) // UIDS_PER_SLOT

    @property
    def guest_python(self) -> str:
        """Path of the guest's Python, as the guest sees it."""
        return self.python.executable if self.level in HOST_PATH_LEVELS else f"{PYTHON_DIR_IN_JAIL}/bin/python3"

    @property
    def guest_dir_in_jail(self) -> str:
        """Path of the guest's source, as the guest sees it."""
        if self.scratch_root is not None:
            return f"{self.scratch_root}/guest"
        return self.guest_dir if self.level is Level.NONE else GUEST_DIR_IN_JAIL

    def guest_argv(self, socket_fd: int) -> list[str]:
        """Return the guest's argv. Python gets no -I, because it has to use PYTHONPATH. -I is not needed, because
        `guest_env` is the whole environment."""
        zygote = (self.guest_python, "-s", "-B", f"{self.guest_dir_in_jail}/zygote.py", "--fd", "{fd}")
        return [str(socket_fd) if word == "{fd}" else word for word in self.argv or zygote]

    def guest_env(self) -> dict[str, str]:
        """Return the whole environment of the guest."""
        if self.level is Level.LANDLOCK:
            # `env` has the PATH of a jail with a root of its own. Python finds its packages itself at the host's paths.
            # zoneinfo fails on the host's time zone directories, which exist but are not readable at this level.
            return {**self.env, "PATH": os.path.dirname(self.guest_python), "PYTHONTZPATH": ""}
        paths = () if self.level is Level.NONE else self.python.pythonpath
        return {**({"PYTHONPATH": ":".join(paths)} if paths else {}), **self.env}

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> JailSpec:
        fields = json.loads(text)
        # JSON has turned the enum member, the nested dataclass and the tuples into plain values; restore them.
        python = Interpreter.decode(fields["python"])
        data = tuple((path, source) for path, source in fields["data"])
        converted = {"level": Level(fields["level"]), "python": python, "argv": tuple(fields["argv"]), "data": data}
        return cls(**{**fields, **converted})
