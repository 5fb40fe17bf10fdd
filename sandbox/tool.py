"""The sandbox as a tool for a model: its schema, its arguments, and how a `Result` reads to the model.

The outcomes are rStar2-Agent's (arXiv 2508.20722, 2.1): stdout; without any, the last expression's value; a traceback;
a time-out. Limits and crashes speak in the same voice. `unavailable` is no outcome and is never rendered: the model
must not learn from our failures.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from typing import Any

from sandbox.errors import InvalidCall, ServiceError
from sandbox.types import MAX_CODE_BYTES, MAX_STDIN_BYTES, Call, Result, Status

TOOL_NAMES = ("execute_python_code_with_standard_io", "python_code_with_standard_io")
"""The paper's name for it, and the one in the code released with it."""
MAX_RESPONSE_CHARS = 4096
_EXAMPLE = '{"code": "print(input())", "input": "hello"}'


def tool_schema(name: str = TOOL_NAMES[0]) -> dict[str, Any]:
    """The function tool, as OpenAI-compatible servers and chat templates take it."""
    properties = {
        "code": {
            "type": "string",
            "description": "Python code. Print what you want to see; if it prints nothing, the value of its last "
            "expression is shown. numpy, scipy and sympy are installed. Every call starts afresh.",
        },
        "input": {"type": "string", "description": "What the code reads from standard input.", "default": ""},
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Run Python code with the given standard input and return what it prints.",
            "parameters": {"type": "object", "properties": properties, "required": ["code"]},
        },
    }


TOOL_SCHEMA = tool_schema()


def parse_arguments(arguments: str | Mapping[str, Any]) -> Call:
    """The call that a model's `arguments` ask for. Raises `InvalidCall` with a text that is fit to be its response."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as why:
            raise InvalidCall(f"{type(why).__name__}: {why}\nThe arguments must be JSON, such as {_EXAMPLE}") from None
    if not isinstance(arguments, Mapping):
        raise InvalidCall(f"TypeError: the arguments must be a JSON object, such as {_EXAMPLE}")
    unknown = [name for name in arguments if name not in ("code", "input")]
    if unknown:
        raise InvalidCall(f"TypeError: unexpected argument {unknown[0]!r:.80}; there are code and input")
    if "code" not in arguments:
        raise InvalidCall("TypeError: missing argument 'code'")
    stdin = arguments.get("input")
    code = _text("code", arguments["code"], MAX_CODE_BYTES)
    return Call(code=code, stdin=_text("input", "" if stdin is None else stdin, MAX_STDIN_BYTES))


def render(result: Result, *, max_chars: int = MAX_RESPONSE_CHARS) -> str:
    """`result` as the model reads it. Raises `ServiceError` for `unavailable` and `invalid`, which it must never read:
    the model's arguments have been checked by then (`parse_arguments`), so a malformed call is the caller's bug."""
    if result.status in (Status.UNAVAILABLE, Status.INVALID):
        error = result.error
        whose = "the caller sent a malformed call" if result.status is Status.INVALID else "no verdict on the call"
        raise ServiceError(f"{whose}: {error.type}: {error.message}" if error else whose)
    parts = [_stdout(result), _reason(result)]
    text = "\n".join(part for part in parts if part)
    return _cut(text or "(no output)", max_chars)


def _text(name: str, value: Any, most: int) -> str:
    if not isinstance(value, str):
        raise InvalidCall(f"TypeError: argument {name!r} must be a string, not {type(value).__name__}")
    if len(value) > most:
        raise InvalidCall(f"ValueError: argument {name!r} has {len(value)} characters, at most {most} are taken")
    return value


def _stdout(result: Result) -> str:
    """What was printed; of code that ended well and printed nothing, the value of its last expression."""
    shown, name = result.stdout.rstrip("\n"), "stdout"
    if not result.stdout and result.status is Status.OK:
        shown, name = result.value or "", "value"
    return f"{shown}\n... the rest of the output was cut" if name in result.truncated else shown


def _reason(result: Result) -> str:
    """Why it did not end well; empty when it did."""
    match result.status:
        case Status.ERROR:
            return _error(result)
        case Status.TIMEOUT:
            return "TimeoutError: the code was stopped because it ran longer than its time limit"
        case Status.MEMORY_LIMIT:
            return _joined(_error(result), "MemoryError: the code ran out of the memory it may use")
        case Status.OUTPUT_LIMIT:
            return "OutputLimitError: the code was stopped because it printed too much"
        case Status.KILLED:
            return f"The interpreter crashed: {_signal(result.signal)}"
    return ""


def _error(result: Result) -> str:
    if result.error is not None:
        error = result.error
        return error.traceback.rstrip("\n") or f"{error.type}: {error.message}"
    if result.exit_code:
        return _joined(result.stderr.rstrip("\n"), f"SystemExit: {result.exit_code}")
    return result.stderr.rstrip("\n")


def _joined(first: str, last: str) -> str:
    return f"{first}\n{last}" if first else last


def _signal(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _cut(text: str, max_chars: int) -> str:
    """At most `max_chars` of `text`, from both ends: a traceback says what happened in its last line."""
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    head = max_chars - tail
    return f"{text[:head]}\n... {len(text) - max_chars} characters cut ...\n{text[len(text) - tail :]}"
