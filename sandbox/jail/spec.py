"""What a jail is to be, as data: `JailSpec`, which goes to the launcher as JSON.

A jail holds one family of zygotes, which fork the calls. Its first uid inside (0) is the zygote's; calls run as
`FIRST_SLOT_UID + slot`. Two jails with disjoint host ranges (`host_uids`) never share a host uid, so neither
per-uid limits nor signals reach from one to the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from sandbox.errors import ConfigError
from sandbox.jail.interpreter import PYTHON_DIR_IN_JAIL, Interpreter

FIRST_SLOT_UID = 1000
"""The first uid of calls, inside."""
UIDS_PER_SLOT = 3
"""At level `landlock`; see `guest/landlock_slots.py`."""
GUEST_DIR_IN_JAIL = "/guest"


class Level(StrEnum):
    """How strong a jail is, from the strongest down."""

    NSJAIL = "nsjail"
    """nsjail around the zygote."""
    NAMESPACES = "namespaces"
    """Our own namespaces and read-only root."""
    LANDLOCK = "landlock"
    """Landlock rules, for containers without namespaces."""
    NONE = "none"
    """Rlimits only; asked for by name."""


HOST_PATH_LEVELS = (Level.LANDLOCK, Level.NONE)
"""The levels at which the guest sees the host's paths."""


@dataclass(frozen=True, slots=True)
class JailSpec:
    """One jail. Without `argv` it runs the zygote of `guest_dir`; `argv` is for tests, with `{fd}` for the socket's
    number. `uid_base` is the first of `uid_count` host ids, or None for a single uid. With `own_namespaces` each call
    has a user namespace of its own, in which alone its processes are counted, though all have one uid. `scratch`, for
    level `landlock` alone, is the folder that the jail makes for itself and removes."""

    level: Level
    python: Interpreter
    guest_dir: str
    env: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    uid_base: int | None = None
    uid_count: int = 0
    scratch: str | None = None
    user_namespace_per_call: bool = False

    def __post_init__(self) -> None:
        if self.uid_base is not None and (self.uid_base <= 0 or self.uid_count <= FIRST_SLOT_UID):
            raise ConfigError(
                f"uid_base={self.uid_base}, uid_count={self.uid_count}: expected a base over 0 and a count over "
                f"{FIRST_SLOT_UID}, the first slot's uid; take both from host_uids()"
            )
        if (self.level is Level.LANDLOCK) != (self.scratch is not None):
            raise ConfigError(f"scratch={self.scratch!r}: expected a path for level landlock, and None for others")

    @property
    def slots(self) -> int:
        """At level `landlock`, of how many slots the range has the uids: the call's and two helpers' for each."""
        return max(0, self.uid_count - FIRST_SLOT_UID) // UIDS_PER_SLOT

    @property
    def guest_python(self) -> str:
        """Where the guest's Python is, as the guest sees it."""
        return self.python.executable if self.level in HOST_PATH_LEVELS else f"{PYTHON_DIR_IN_JAIL}/bin/python3"

    @property
    def guest_dir_in_jail(self) -> str:
        """Where `guest_dir` is, as the guest sees it."""
        if self.scratch is not None:
            return f"{self.scratch}/guest"
        return self.guest_dir if self.level is Level.NONE else GUEST_DIR_IN_JAIL

    def guest_argv(self, fd: int) -> list[str]:
        """What the jail runs. No -I: the environment is ours alone, and PYTHONPATH may be in it."""
        zygote = (self.guest_python, "-s", "-B", f"{self.guest_dir_in_jail}/zygote.py", "--fd", "{fd}")
        return [str(fd) if word == "{fd}" else word for word in self.argv or zygote]

    def guest_env(self) -> dict[str, str]:
        """The guest's whole environment."""
        if self.level is Level.LANDLOCK:
            # The host's time zones are there and closed, where zoneinfo expects them to be readable or not there.
            return {**self.env, "PATH": os.path.dirname(self.guest_python), "PYTHONTZPATH": ""}
        paths = () if self.level is Level.NONE else self.python.pythonpath
        return {**({"PYTHONPATH": ":".join(paths)} if paths else {}), **self.env}

    def encode(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> JailSpec:
        """The inverse of `encode`."""
        raw = json.loads(text)
        python = Interpreter.decode(raw["python"])
        return cls(**{**raw, "level": Level(raw["level"]), "python": python, "argv": tuple(raw["argv"])})
