"""The profiles of an executor, and the choice of the one for a call by the import statements in its code.

The code is scanned with a regular expression, not parsed. A wrong guess costs an import inside the call and never
changes its result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from sandbox.guest.protocol import PARENT_PROFILE
from sandbox.settings.profiles import OwnProfile
from sandbox.types import Profile

PROFILE_CHAIN = tuple(Profile(name) for name in PARENT_PROFILE if name != Profile.VERIFY)
"""Built-in profiles from the smallest to the largest. Each contains the modules of those before it."""
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
    """The built-in profiles, which form a chain, and the operator's own, each a child of another profile.

    `own_profiles` lists each profile after the one that it extends.
    """

    def __init__(self, own_profiles: Sequence[OwnProfile] = ()) -> None:
        self.own = {profile.name: profile for profile in own_profiles}
        self.names: tuple[str, ...] = (*PROFILE_CHAIN, *self.own)
        """All profiles but `verify`, each after the one that it extends."""
        self._parents = PARENT_PROFILE | {name: profile.extends for name, profile in self.own.items()}
        self._modules: dict[str, frozenset[str]] = {}
        """Top-level modules of a profile and its ancestors."""
        for name in self.names:
            own = self.own.get(name)
            modules = {module.partition(".")[0] for module in own.imports} if own else _MODULES[name]
            self._modules[name] = frozenset(modules) | self._modules.get(self._parents[name] or "", frozenset())

    def choose(self, requested: str, modules: Set[str]) -> str:
        """Return the profile for a call that requests a profile and imports `modules`: the requested one; for `auto`
        and unknown names the first that contains most of `modules`."""
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
        """Yield the profiles that may run a call while the zygote of its profile is down, the best first: the larger
        ones of the chain, then the smaller ones; for an own profile its ancestors."""
        if profile in PROFILE_CHAIN:
            yield from PROFILE_CHAIN[PROFILE_CHAIN.index(Profile(profile)) + 1 :]
        elif profile == Profile.VERIFY:
            yield from (Profile.SYMBOLIC, Profile.SCIENTIFIC)
        yield from self.ancestors(profile)

    def frame_fields(self, profile: str) -> dict[str, Any]:
        """Return the fields of the frame with which a zygote is made to load a profile."""
        own = self.own.get(profile)
        return {"profile": str(profile), **({"own": own.encode()} if own else {})}


BUILT_IN_PROFILES = ProfileTree()
