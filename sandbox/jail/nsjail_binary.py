"""Finds nsjail's binary.

`find` is not in `launch_nsjail`, because other modules call it too, and `launch_nsjail` is run as a program of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from sandbox.errors import IsolationError

VARIABLE = "RSTAR_NSJAIL"
INSTALL = f"install nsjail 3.1 or later (github.com/google/nsjail), or name its binary with {VARIABLE}"


def find(environ: Mapping[str, str]) -> str:
    """Return the absolute path of nsjail: the path or command in RSTAR_NSJAIL, or else nsjail on PATH.

    Raises `IsolationError` if there is none.
    """
    requested = environ.get(VARIABLE)
    path = shutil.which(requested or "nsjail", path=environ.get("PATH", os.defpath))
    if path:
        return os.path.abspath(path)
    if not requested:
        raise IsolationError(f"no nsjail on PATH, and {VARIABLE} is not set; {INSTALL}")
    raise IsolationError(f"{VARIABLE}={requested!r}: expected a command on PATH or an executable file; {INSTALL}")
