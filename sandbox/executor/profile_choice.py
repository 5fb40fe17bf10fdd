"""Which zygote a call is forked from, read off the text of its imports.

A glance, not a parser: a wrong guess costs an import in the call, never a wrong answer.
"""

from __future__ import annotations

import re

from sandbox.types import Profile

_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([^\n#;]+))", re.MULTILINE)
_NEEDS = {
    "numpy": Profile.NUMERIC,
    "sympy": Profile.SYMBOLIC,
    "mpmath": Profile.SYMBOLIC,
    "scipy": Profile.SCIENTIFIC,
    "networkx": Profile.SCIENTIFIC,
    "pandas": Profile.SCIENTIFIC,
}
ORDER = (Profile.BARE, Profile.NUMERIC, Profile.SYMBOLIC, Profile.SCIENTIFIC)
"""From the leanest to the richest; each holds what those before it hold."""


GLANCE = 1 << 16
"""Characters that are looked at. Code of millions would hold up all other calls."""


def imported(code: str) -> set[str]:
    """The top-level names of the modules that the code seems to import."""
    if "import" not in code[:GLANCE]:
        return set()
    names: set[str] = set()
    for origin, listed in _IMPORT.findall(code[:GLANCE]):
        if origin:
            names.add(origin.partition(".")[0])
        else:
            names.update(part.split()[0].partition(".")[0] for part in listed.split(",") if part.strip())
    return names


def choose(names: set[str]) -> Profile:
    """The leanest profile that has everything it could have."""
    needed = [_NEEDS[name] for name in names if name in _NEEDS]
    return max(needed, key=ORDER.index, default=Profile.BARE)
