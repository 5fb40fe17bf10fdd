"""Chooses the zygote profile for a call from the import statements in its code.

The code is scanned with a regular expression, not parsed. A wrong guess costs an import inside the call and never
changes its result.
"""

from __future__ import annotations

import re
from collections.abc import Set

from sandbox.types import Profile

PROFILE_CHAIN = (Profile.BARE, Profile.NUMERIC, Profile.SYMBOLIC, Profile.SCIENTIFIC)
"""Profiles from the smallest to the largest. Each contains the modules of those before it."""
MAX_SCANNED_CHARS = 1 << 16
"""Number of characters of the code that are scanned. To scan millions would delay all other calls."""
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([^\n#;]+))", re.MULTILINE)
_PROFILE_OF_MODULE = {
    "numpy": Profile.NUMERIC,
    "sympy": Profile.SYMBOLIC,
    "mpmath": Profile.SYMBOLIC,
    "scipy": Profile.SCIENTIFIC,
    "networkx": Profile.SCIENTIFIC,
    "pandas": Profile.SCIENTIFIC,
    "matplotlib": Profile.SCIENTIFIC,
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


def smallest_profile(modules: Set[str]) -> Profile:
    """Return the smallest profile that contains all of `modules`, except those that no profile contains."""
    needed = [_PROFILE_OF_MODULE[name] for name in modules if name in _PROFILE_OF_MODULE]
    return max(needed, key=PROFILE_CHAIN.index, default=Profile.BARE)
