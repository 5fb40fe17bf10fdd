"""Where nsjail's binary is. Apart from the launcher, which must not have been imported before it runs as a script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from sandbox.errors import IsolationError

VARIABLE = "RSTAR_NSJAIL"
INSTALL = f"install nsjail 3.1 or later (github.com/google/nsjail), or name its binary with {VARIABLE}"


def find(environ: Mapping[str, str]) -> str:
    """The path of nsjail's binary: what RSTAR_NSJAIL names (a path, or a name on PATH), or else nsjail on PATH."""
    asked = environ.get(VARIABLE)
    found = shutil.which(asked or "nsjail", path=environ.get("PATH", os.defpath))
    if found:
        return os.path.abspath(found)
    if not asked:
        raise IsolationError(f"no nsjail on PATH, and {VARIABLE} is not set; {INSTALL}")
    came = "nothing there" if "/" in asked else "nothing of that name on PATH"
    if os.path.isdir(asked):
        came = "a folder"
    elif "/" in asked and os.path.exists(asked):
        came = "a file that may not be executed"
    raise IsolationError(f"{VARIABLE}={asked!r}: expected a program, got {came}; {INSTALL}")
