"""Imports the packages that are named as arguments. Run once by a guest runtime's own Python after they are installed.

The modules of a package follow from the list of its files. The exit code is 1 if a module cannot be imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys

NOT_IMPORTED = ("benchmarks", "docs", "examples", "scripts", "setup", "test", "tests")
"""Names that packages install beside their modules by mistake."""


def modules_of(package: str) -> list[str]:
    """Return the names of the top-level modules of an installed package. Empty if it does not list its files."""
    names = set()
    for file in importlib.metadata.files(package) or ():
        if len(file.parts) == 1 and file.suffix == ".py":
            names.add(file.stem)
        elif len(file.parts) == 2 and file.name == "__init__.py":
            names.add(file.parts[0])
    return sorted(name for name in names if name.isidentifier() and name[0] != "_" and name not in NOT_IMPORTED)


def main() -> int:
    failed = 0
    for requirement in sys.argv[1:]:
        package = re.split(r"[\s\[<>=!~]", requirement, maxsplit=1)[0]
        for module in modules_of(package):
            try:
                importlib.import_module(module)
            except BaseException as error:  # packages may call sys.exit
                print(f"ERROR: {package}: import {module}: {type(error).__name__}: {error}", file=sys.stderr)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
