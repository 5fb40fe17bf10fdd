"""Profiles that an operator defines in the TOML file of `serve`, in addition to the built-in ones.

    [profiles.ml]
    extends = "scientific"      a built-in profile, or another one of the file; the default is bare
    imports = ["sklearn"]       modules that the zygote imports
    warm = "warm.py"            code that the zygote runs once at its start; a path relative to the TOML file

A profile is the modules that a zygote, a process from which calls are forked, has imported. The warm-up code is
trusted. It runs in the jail of the zygote, as the imports do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError, InvalidCall
from sandbox.types import PROFILE_NAME, Profile

MAX_WARM_BYTES = 256 << 10
"""Maximum size of a file with warm-up code. It is sent to the zygotes in the header of a frame."""
PARENTS = tuple(profile for profile in Profile if profile not in (Profile.AUTO, Profile.VERIFY))
"""Built-in profiles that a profile may extend."""
_KEYS = ("extends", "imports", "warm")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class OwnProfile:
    """One profile that an operator has defined. `warm` is the code itself, not its path."""

    name: str
    extends: str = Profile.BARE.value
    imports: tuple[str, ...] = ()
    warm: str = ""

    def encode(self) -> dict[str, Any]:
        """Return a mapping for msgpack or JSON."""
        return asdict(self)

    @staticmethod
    def decode(raw: Mapping[str, Any]) -> OwnProfile:
        """Invert `encode`."""
        return OwnProfile(**{**raw, "imports": tuple(raw["imports"])})


def read_profiles(tables: Mapping[str, Any], file: Path) -> tuple[OwnProfile, ...]:
    """Check the tables `[profiles.NAME]` of a TOML file and read their warm-up files. Return the profiles, each after
    the one that it extends. Raises `ConfigError`."""
    unsorted = {name: _read_profile(name, table, file) for name, table in tables.items()}
    for own in unsorted.values():
        if own.extends not in PARENTS and own.extends not in unsorted:
            names = ", ".join([*PARENTS, *(name for name in unsorted if name != own.name)])
            raise ConfigError(f"{_where(file, own.name)}.extends: expected one of {names}, got {own.extends!r:.80}")
    ordered: dict[str, OwnProfile] = {}
    while len(ordered) < len(unsorted):
        added = {
            name: own
            for name, own in unsorted.items()
            if name not in ordered and (own.extends in PARENTS or own.extends in ordered)
        }
        if not added:
            circle = ", ".join(sorted(set(unsorted) - set(ordered)))
            raise ConfigError(
                f"{file}: profiles {circle}: each extends another of them; one has to extend a built-in one"
            )
        ordered |= added
    return tuple(ordered.values())


def check_profile(name: str, own_profiles: Sequence[OwnProfile], where: str) -> None:
    """Raise `InvalidCall` if a call names a profile that is neither built-in nor one of `own_profiles`."""
    names = [*Profile, *(profile.name for profile in own_profiles)]
    if name not in names:
        raise InvalidCall(f"{where}.profile: expected one of {', '.join(names)}, got {name!r}")


def _read_profile(name: str, table: Any, file: Path) -> OwnProfile:
    where = _where(file, name)
    if not PROFILE_NAME.fullmatch(name) or name in list(Profile):
        raise ConfigError(f"{where}: expected a name of lower-case letters, digits, - and _ that is not built in")
    if not isinstance(table, dict) or not set(table) <= set(_KEYS):
        unknown = sorted(set(table) - set(_KEYS)) if isinstance(table, dict) else table
        raise ConfigError(f"{where}: expected the keys {', '.join(_KEYS)}, got {unknown!r:.80}")
    extends, imports, warm = table.get("extends", Profile.BARE.value), table.get("imports", []), table.get("warm", "")
    if not isinstance(imports, list) or not all(isinstance(m, str) and _MODULE.fullmatch(m) for m in imports):
        raise ConfigError(f"{where}.imports: expected a list of names of modules, got {imports!r:.80}")
    if not isinstance(warm, str):
        raise ConfigError(f"{where}.warm: expected the path of a Python file, got {warm!r:.80}")
    if not isinstance(extends, str):
        raise ConfigError(f"{where}.extends: expected the name of a profile, got {extends!r:.80}")
    code = _read_code(file.parent / warm, f"{where}.warm") if warm else ""
    return OwnProfile(name, extends, tuple(imports), code)


def _read_code(path: Path, where: str) -> str:
    try:
        code = path.read_bytes()
        text = code.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {path} is not UTF-8 ({error})") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{where}: {str(path)!r} cannot be read ({error})") from None
    if len(code) > MAX_WARM_BYTES:
        raise ConfigError(f"{where}: expected at most {MAX_WARM_BYTES} bytes, but {path} has {len(code)}")
    return text


def _where(file: Path, name: str) -> str:
    return f"{file}: profiles.{name}"
