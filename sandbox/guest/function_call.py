"""Calls a function that the code has defined, for the function tests of `sandbox/judging/programs.py`.

The zygote gives this module the name `rstar_function_call`. A judged program ends with a line that calls `run`. The
name of the function and its arguments are in the file `FUNCTION_CALL_FILE`. The result is JSON text, which the runner
reports as the value of that line. The code can replace all of this, which changes only its own answer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import originals
from protocol import FUNCTION_CALL_FILE

originals.use_builtins(globals())
_loads, _dumps, _modules = json.loads, json.dumps, sys.modules

MODULE = "solution"
"""`__name__` of a program with a function test. So the code of the program behind `if __name__ == "__main__":` does not
run."""


class _JsonText(str):
    """Text whose `repr`, which the runner reports, is the text itself."""

    __slots__ = ()
    __repr__ = str.__str__


def run() -> str:
    """Call the function and return its result as JSON. Raises what the function raises, and `NameError` if the code
    does not define the function."""
    with open(FUNCTION_CALL_FILE, "rb") as file:
        request = originals.call(_loads, file.read())
    outer, _, method = request["call"].partition(".")
    scope = _modules["__main__"].__dict__
    if outer not in scope:
        raise NameError(f"the test calls {request['call']}, but the code does not define {outer}")
    function = getattr(scope[outer](), method) if method else scope[outer]
    return _JsonText(originals.call(_to_json, function(*request["args"])))


def _to_json(value: Any) -> str:
    return _dumps(value, default=_as_plain)


def _as_plain(value: Any) -> Any:
    """Return an array or a number of numpy as Python's own type."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"the function returned a {type(value).__name__}, which JSON cannot represent")
    return value.tolist()
