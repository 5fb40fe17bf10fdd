"""The profiles of an executor, and the choice of the profile for a call.

A profile is a set of modules that a zygote (a preloaded interpreter that forks once per call) has imported. The profile
of a call is chosen by the import statements in the call's code. The code is scanned with a regular expression, not
parsed. After a wrong choice the call imports the module itself, which takes time and does not change the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from sandbox.guest.protocol import PARENT_PROFILE
from sandbox.settings.profiles import OwnProfile
from sandbox.types import Profile

PROFILE_CHAIN = tuple(Profile(name) for name in PARENT_PROFILE if name != Profile.VERIFY)
"""Built-in profiles from the smallest to the largest, except `verify`. Each profile contains the modules of all
profiles before it."""
MAX_SCANNED_CHARS = 1 << 16
"""Number of characters of the code that are scanned. To scan millions would delay all other calls."""
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([^\n#;]+))", re.MULTILINE)
_MODULES: dict[str, Set[str]] = {
    Profile.BARE: frozenset(),
    Profile.NUMERIC: {"numpy"},
    Profile.SYMBOLIC: {"sympy", "mpmath"},
    Profile.SCIENTIFIC: {"scipy", "networkx", "pandas", "matplotlib"},
}


def imported_modules(code: str) -> frozenset[str]:
    """Return the top-level names of the modules that the code appears to import."""
    start = code[:MAX_SCANNED_CHARS]
    if "import" not in start:
        return frozenset()
    names: set[str] = set()
    for package, module_list in _IMPORT.findall(start):
        if package:
            names.add(package.partition(".")[0])
        else:
            names.update(part.split()[0].partition(".")[0] for part in module_list.split(",") if part.strip())
    return frozenset(names)


class ProfileTree:
    """The built-in profiles, and the profiles that the operator has defined (own profiles). Each profile but `bare`
    extends another profile, which is its parent.

    `own_profiles` lists each profile after its parent.
    """

    def __init__(self, own_profiles: Sequence[OwnProfile] = ()) -> None:
        self.own_profiles = {profile.name: profile for profile in own_profiles}
        self.names: tuple[str, ...] = (*PROFILE_CHAIN, *self.own_profiles)
        """All profiles but `verify`, each after its parent."""
        self._parents = PARENT_PROFILE | {name: profile.extends for name, profile in self.own_profiles.items()}
        self._modules: dict[str, frozenset[str]] = {}
        """By profile: the top-level modules of the profile and its ancestors."""
        for name in self.names:
            own_profile = self.own_profiles.get(name)
            modules = {module.partition(".")[0] for module in own_profile.imports} if own_profile else _MODULES[name]
            self._modules[name] = frozenset(modules) | self._modules.get(self._parents[name] or "", frozenset())

    def choose(self, requested: str, modules: Set[str]) -> str:
        """Return the profile for a call. If the call requests a known profile, return this profile. For `auto` and for
        unknown names, return the profile that contains the most of `modules`, the modules that the call imports. If
        several profiles contain this many, return the first of them."""
        if requested in self._parents:
            return requested
        if not modules:
            return Profile.BARE
        return max(self.names, key=lambda name: len(modules & self._modules[name]))

    def ancestors(self, profile: str) -> Iterator[str]:
        """Yield the profiles that a profile extends, the nearest first."""
        parent = self._parents[profile]
        while parent is not None:
            yield parent
            parent = self._parents[parent]

    def substitutes(self, profile: str) -> Iterator[str]:
        """Yield the profiles that may run a call while the zygote of its profile is down, the best profile first. For a
        profile of the chain, these are the larger profiles, then the smaller profiles. For an own profile, these are
        its ancestors."""
        if profile in PROFILE_CHAIN:
            yield from PROFILE_CHAIN[PROFILE_CHAIN.index(Profile(profile)) + 1 :]
        elif profile == Profile.VERIFY:
            yield from (Profile.SYMBOLIC, Profile.SCIENTIFIC)
        yield from self.ancestors(profile)

    def frame_fields(self, profile: str) -> dict[str, Any]:
        """Return the fields of a `spawn` frame, which makes the new zygote load a profile."""
        own_profile = self.own_profiles.get(profile)
        return {"profile": str(profile), **({"own_profile": own_profile.encode()} if own_profile else {})}


BUILT_IN_PROFILES = ProfileTree()
