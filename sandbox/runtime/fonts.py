"""Stores matplotlib's font cache in a guest runtime. Run once by the runtime's own Python while the runtime is built.

Matplotlib keeps its cache in a directory that it can write to. If it finds no such directory, it prints a warning and
builds the cache again, which takes 0.12 s of CPU time. A call has an empty home directory. A zygote, the interpreter
from which calls are forked, has no home directory. So this script makes matplotlib use its own data directory, which is
read-only for calls. If the environment variable MPLCONFIGDIR is set, matplotlib uses the directory that it names.

The cache has the fonts of matplotlib only, because calls cannot read those of the host.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

REPLACEMENTS = (
    (
        "os.environ.get('MPLCONFIGDIR')\n    if configdir:",
        "os.environ.get('MPLCONFIGDIR', get_data_path())\n    if configdir:",
    ),
    ("os.access(str(configdir), os.W_OK)", "os.access(str(configdir), os.R_OK)"),
)
"""Texts in matplotlib/__init__.py with their replacements. Each occurs once in the pinned version."""


def main() -> None:
    os.environ.pop("MPLCONFIGDIR", None)
    os.environ["MPL_IGNORE_SYSTEM_FONTS"] = "1"
    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin)
    file.write_text(patched(file.read_text(encoding="utf-8")), encoding="utf-8")
    importlib.import_module("matplotlib.font_manager")  # writes the cache


def patched(source: str) -> str:
    """Return the source of matplotlib/__init__.py with its default directory changed. Raises `ValueError`."""
    for old, new in REPLACEMENTS:
        if source.count(old) != 1:
            raise ValueError(f"expected {old!r} once in matplotlib/__init__.py; adapt REPLACEMENTS to this version")
        source = source.replace(old, new)
    return source


if __name__ == "__main__":
    main()
