"""Environment variables of the Python interpreter that a call may set, as far as a running interpreter can honour them.

An interpreter reads these variables when it starts. A call is a fork of an interpreter that has started before, so the
functions in `HONOURED` do the same later.
docs/python.md names the variables that have no effect in a call, with the reason.
"""

from __future__ import annotations

import codecs
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def apply(env: dict) -> None:
    """Honour the variables of a call. Raises `ValueError` if one is malformed, as the interpreter's start fails."""
    for name in HONOURED.keys() & env.keys():
        if env[name]:  # the interpreter ignores an empty variable
            try:
                HONOURED[name](env[name])
            except (ValueError, LookupError, OverflowError) as error:
                raise ValueError(f"{name}={env[name]!r:.80}: {error}") from None


def _limit_int_digits(text: str) -> None:
    set_limit: Any = getattr(sys, "set_int_max_str_digits", int)  # since Python 3.11 and in patches of older ones
    set_limit(int(text))


def _filter_warnings(text: str) -> None:
    options = text.split(",")
    sys.warnoptions.extend(options)
    warnings._processoptions(options)  # type: ignore[attr-defined]


def _add_paths(text: str) -> None:
    sys.path[1:1] = map(os.path.abspath, text.split(os.pathsep))


def _encode_streams(text: str) -> None:
    encoding, _, errors = text.partition(":")
    name_of_codec = codecs.lookup(encoding).name if encoding else None
    for name in ("stdin", "stdout", "stderr"):
        handler = None if name == "stderr" else errors or ("strict" if encoding else None)
        stream: Any = getattr(sys, name)
        stream.reconfigure(encoding=name_of_codec, errors=handler or stream.errors)


def _write_no_bytecode(_text: str) -> None:
    sys.dont_write_bytecode = True


HONOURED: dict[str, Callable[[str], object]] = {
    "PYTHONINTMAXSTRDIGITS": _limit_int_digits,
    "PYTHONWARNINGS": _filter_warnings,
    "PYTHONPATH": _add_paths,
    "PYTHONIOENCODING": _encode_streams,
    "PYTHONDONTWRITEBYTECODE": _write_no_bytecode,
    "PYTHONFAULTHANDLER": lambda _text: import_module("faulthandler").enable(),
    "PYTHONTRACEMALLOC": lambda text: import_module("tracemalloc").start(int(text)),
    "PYTHONPYCACHEPREFIX": lambda text: setattr(sys, "pycache_prefix", text),
}
"""What the interpreter does at its start for each variable, done for its text."""
