"""Original builtins and modules for the guest's own code.

The code of a call may replace any builtin and any attribute of a module. The end of the call must still be reported in
the same way. Guards such as `builtins.open = os._exit = None` are common at the head of judged programs.

- A module of the guest that runs after the code begins with `use_builtins`, so its functions find the original
  builtins. If it needs single functions of a module, it takes them from a copy of the module (`own`). Both cost a call
  nothing.
- The standard library looks its names up in the modules that the code may have changed. `call` calls a function. If the
  function raises an exception, `call` calls it again while the modules that reports need have their original
  attributes. `call` does not restore the attributes before the first try, because that would copy pages of memory in
  every call, which takes 2 ms.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

_MODULES = (
    "builtins os posixpath stat io codecs re json json.decoder json.encoder json.scanner traceback linecache tokenize "
    "token keyword types collections itertools functools contextlib operator textwrap fnmatch ast enum pprint sys"
)
"""Modules whose attributes the standard library uses to format tracebacks, to encode JSON, and to find files."""
_LIVE = ("stdin", "stdout", "stderr", "excepthook", "displayhook", "unraisablehook", "path", "argv")
"""Attributes of `sys` that the code replaces on purpose."""
_Value = TypeVar("_Value")
_builtins = dict(vars(builtins))
_modules = sys.modules
_copies: dict = {}
_originals: list = []


def use_builtins(scope: dict) -> None:
    """Make the functions that a module defines from now on find the original builtins. `scope` is the namespace of the
    module. A function takes its builtins from this namespace when it is defined."""
    scope["__builtins__"] = _builtins


use_builtins(globals())


def own(module: types.ModuleType) -> Any:
    """Return the guest's own copy of a module. The code of a call cannot replace attributes of the copy."""
    name = module.__name__
    if name not in _copies:
        _copies[name] = types.ModuleType(name)
        _copies[name].__dict__.update(module.__dict__)
    return _copies[name]


def keep() -> None:
    """Keep the imported modules and the attributes of `_MODULES`. Called once in a zygote, after all imports."""
    _originals[:] = [(_modules, dict(_modules))]
    for name in _MODULES.split():
        if name in _modules:
            scope = _modules[name].__dict__
            kept = {key: value for key, value in scope.items() if name != "sys" or key not in _LIVE}
            _originals.append((scope, kept))


def call(function: Callable[..., _Value], *arguments: Any) -> _Value:
    """Call a function. If it raises an exception, call it again with the original attributes in place."""
    try:
        return function(*arguments)
    except Exception:
        replaced = [(scope, kept, dict(scope)) for scope, kept in _originals]
    for scope, kept, _ in replaced:
        scope.update(kept)
    try:
        return function(*arguments)
    finally:
        for scope, kept, before in replaced:
            for name in kept:
                if name not in before:
                    del scope[name]
            scope.update(before)
