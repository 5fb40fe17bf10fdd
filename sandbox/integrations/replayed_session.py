"""Variables and files that last from call to call: a session runs its earlier code again before each new code.

The server keeps no state between calls, so each call builds the state again. This has effects that users of a session
must know:
- The time limit of a call covers the earlier code too, and the cost of a session grows with the square of its length.
- If the earlier code depends on the clock or on unseeded random numbers, the state can differ from call to call.
- Code that does not end as ok leaves no variables and no files behind. `sys.exit()` ends its own step, which is ok.
- If the process ends before the new code has ended, for example by `os._exit(0)`, the step has the error `ProcessExit`.
  This also holds if the earlier code ends the process.
- Output of the earlier code is dropped. If threads or exit handlers of the earlier code print after the earlier code
  has ended, their output is part of the output of the new code.
- As in a Jupyter kernel, a step can change the interpreter that runs the later steps.
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox.types import Call, CallError, Result, Status

_SESSION_FILE = ".session.json"
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t][\w., \t]+", re.MULTILINE)
_REPLAY_CODE = f"""
import _ast, base64, contextlib, json, linecache, os, sys

def replay(step):
    if "path" in step:
        path = os.path.join(home, step["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(step["data"]))
        return
    with contextlib.suppress(SystemExit):
        exec(compile(step["code"], "<earlier code>", "exec"), session)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")

def replay_without_output(steps):
    copies = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    try:
        for step in steps:
            replay(step)
    finally:
        for fd, copy, stream in zip((1, 2), copies, (sys.stdout, sys.stderr)):
            with contextlib.suppress(Exception):
                stream.flush()
            os.dup2(copy, fd)
            os.close(copy)

def value_of(code, scope):
    tree = compile(code, "main.py", "exec", _ast.PyCF_ONLY_AST)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        lines = code.encode().split(b"\\n")[tree.body[-1].end_lineno - 1 :]
        lines[0] = lines[0][tree.body[-1].end_col_offset :]
        if not b"\\n".join(lines).lstrip(b" \\t\\f\\\\\\n").startswith(b";"):
            last = _ast.Expression(tree.body.pop().value)
    exec(compile(tree, "main.py", "exec"), scope)
    return eval(compile(last, "main.py", "eval"), scope) if last else None

home = os.getcwd()
with open({_SESSION_FILE!r}) as file:
    content = json.load(file)
os.unlink({_SESSION_FILE!r})
with contextlib.suppress(OSError):
    os.unlink("main.py")  # this program, which is no file of the session
replay_without_output(content["steps"])
code = content["code"]
linecache.cache["main.py"] = len(code), None, [line + "\\n" for line in code.split("\\n")], "main.py"
if not content["in_session"]:
    os.chdir(home)
text = content["token"]
try:
    value = value_of(code, session if content["in_session"] else {{}})
    if value is not None:
        text += ":" + repr(value)
except SystemExit as error:
    if error.code is not None and error.code != 0:
        raise
value = type("Value", (str,), {{"__repr__": str.__str__}})(text)
"""
_RUN = (
    f"(lambda scope: (exec(compile({_REPLAY_CODE!r}, '<frozen replay>', 'exec'), scope), scope['value'])[1])"
    "({'session': globals()})"
)
"""An expression that runs `_REPLAY_CODE` and returns its `value`. The file name starts with "<frozen " because
tracebacks of calls leave out the frames of such files."""


@dataclass
class ReplayedSession:
    """The earlier steps of a session. `fields` are fields of `Call` for each call, such as `limits`."""

    fields: dict[str, Any] = field(default_factory=dict)
    _steps: list[dict[str, str]] = field(default_factory=list)
    _token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A random text. The value of a call starts with it only if the code ended without an error, by `sys.exit` too."""

    def call(self, code: str, *, in_session: bool = True, **changed: Any) -> Call:
        """Return the call that runs the earlier steps and then `code`. `changed` replaces fields of the call. If
        `in_session` is false, `code` runs without the variables of the session, but in the directory of its files.
        Raises `InvalidCall`."""
        call = Call(code, **{**self.fields, **changed})
        code = code.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        content = {"steps": self._steps, "code": code, "token": self._token, "in_session": in_session}
        imports = "\n".join(_IMPORT.findall("\n".join([*(step.get("code", "") for step in self._steps), code])))
        text = "\n" * (_run_line(code) - 1) + f"({_RUN}, '''\n{imports}\n''')[0]"  # the server reads the imports
        return replace(call, code=text, files={_SESSION_FILE: json.dumps(content).encode()})

    def record(self, code: str, result: Result) -> Result:
        """Add `code` to the earlier steps if its result is ok. Returns the result as `result_of` does."""
        result = self.result_of(code, result)
        if result.status is Status.OK:
            self._steps.append({"code": code.removeprefix("\ufeff")})
        return result

    def result_of(self, code: str, result: Result) -> Result:
        """Return the result of a call as if the call had run only `code`. If the process ended before the end of
        `code`, the result has the error `ProcessExit`."""
        if result.status is Status.OK:
            token, has_value, value = (result.value or "").partition(":")
            if token == self._token:
                return replace(result, value=value if has_value else None)
            message = "the code, or earlier code of the session, ended the process; the session does not keep the code"
            end = CallError("ProcessExit", message)
            return replace(result, status=Status.ERROR, value=None, exit_code=None, error=end)
        error = result.error
        if error is not None:
            line = None if error.line == _run_line(code) else error.line
            error = replace(error, traceback=_without_run_line(error.traceback, code), line=line)
        return replace(result, stderr=_without_run_line(result.stderr, code), error=error)

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file after the earlier steps. Raises `InvalidCall` for a path that no call can have."""
        Call("", files={path: data})
        self._steps.append({"path": path, "data": base64.b64encode(data).decode("ascii")})


def _run_line(code: str) -> int:
    """Return the line number of `_RUN` in a call. It is higher than the number of each line of `code`."""
    return len(code.splitlines()) + 2


def _without_run_line(text: str, code: str) -> str:
    """Remove the frames of `_RUN` from tracebacks. If a traceback has no other frames, remove its head too."""
    head = r"(Traceback \(most recent call last\):\n)?"
    frames = rf'(?:[ |]*File "main\.py", line {_run_line(code)}, in <.*\n)+'
    return re.sub(rf"{head}{frames}(?=([ |]*File .*, in )?)", lambda match: (match[2] and match[1]) or "", text)
