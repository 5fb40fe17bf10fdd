"""Variables and files that last from call to call: a session runs its earlier code again before each new code.

The server keeps no state between calls, so each call builds the state again. This has three effects, which users of a
session must know:
- The time limit of a call covers the earlier code too, and the cost of a session grows with the square of its length.
- Code that depends on the clock or on unseeded random numbers can give another state.
- Code that does not end as ok leaves no variables and no files behind.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox.types import Call, CallError, Result, Status

_STEPS, _REPLAY = ".earlier_steps.json", ".replay.py"
_FIRST_LINE = f"exec(open({_REPLAY!r}).read(), {{'session': globals()}})\n"
_REPLAY_CODE = f"""
import base64, contextlib, io, json, os, pathlib, sys
steps = json.loads(pathlib.Path({_STEPS!r}).read_text())
for name in ({_STEPS!r}, {_REPLAY!r}):
    os.unlink(name)
real_stdin, sys.stdin = sys.stdin, io.StringIO()
for step in steps:
    if "path" in step:
        path = pathlib.Path(step["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(step["data"]))
        continue
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(step["code"], "<earlier code>", "exec"), session)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
sys.stdin = real_stdin
"""


@dataclass
class ReplayedSession:
    """The earlier steps of a session. `fields` are fields of `Call` for each call, such as `limits`."""

    fields: dict[str, Any] = field(default_factory=dict)
    _steps: list[dict[str, str]] = field(default_factory=list)

    def call(self, code: str, **changed: Any) -> Call:
        """Return the call that runs the earlier steps and then `code`; `changed` replaces fields. Raises
        `InvalidCall`."""
        fields = {**self.fields, **changed}
        if not self._steps:
            return Call(code, **fields)
        files = {_REPLAY: _REPLAY_CODE.encode(), _STEPS: json.dumps(self._steps).encode()}
        return Call(_FIRST_LINE + code, files=files, **fields)

    def record(self, code: str, result: Result) -> Result:
        """Add `code` to the earlier steps if its result is ok. Returns the result, with line numbers that count from
        the start of `code`."""
        if self._steps:
            result = _with_lines_of_code(result)
        if result.status is Status.OK:
            self._steps.append({"code": code})
        return result

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file after the earlier steps. Raises `InvalidCall` for a path that no call can have."""
        Call("", files={path: data})
        self._steps.append({"path": path, "data": base64.b64encode(data).decode("ascii")})


def _with_lines_of_code(result: Result) -> Result:
    """Return the result with line numbers that do not count the first line, which runs the earlier steps."""
    error = result.error
    if error is None:
        return result
    traceback = re.sub(r'(File "main\.py", line )(\d+)', _previous_line, error.traceback)
    line = None if error.line is None else max(error.line - 1, 1)
    return replace(result, error=CallError(error.type, error.message, traceback, line))


def _previous_line(match: re.Match[str]) -> str:
    return f"{match[1]}{max(int(match[2]) - 1, 1)}"
