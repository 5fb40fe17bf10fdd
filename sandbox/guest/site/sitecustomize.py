"""Every interpreter that a call starts imports this module (`site`), which is on PYTHONPATH.

Such an interpreter runs under the seccomp filter of its call. So its modules need the same replacements as in the
call's first process. A replacement is made when the code imports the module. To import `socket` at the start would make
the start of the interpreter take half as long again.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # of `typing`, whose import takes longer than this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

_REPLACED_BY = {"socket": "sockets", "fcntl": "file_locks"}
"""Module of the guest that replaces functions of a module."""
_USED = ("protocol", "replacements", *_REPLACED_BY.values())
_SITE_DIR = os.path.dirname(__file__)


class _Finder:
    """Finds the modules of `_REPLACED_BY` as usual, and has their functions replaced after their import."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in _REPLACED_BY:
            return None
        finders = [finder for finder in sys.meta_path if finder is not cls]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _REPLACED_BY[name])  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, loader: Any, replacing: str) -> None:
        self._loader, self._replacing = loader, replacing

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # The code may have modules of the same names.
        others = {name: sys.modules.pop(name) for name in _USED if name in sys.modules}
        sys.path.insert(0, os.path.dirname(_SITE_DIR))
        try:
            __import__(self._replacing).install()
        finally:
            del sys.path[0]
            for name in _USED:
                sys.modules.pop(name, None)
            sys.modules.update(others)


sys.path[:] = [path for path in sys.path if path != _SITE_DIR]
sys.meta_path.insert(0, _Finder)
