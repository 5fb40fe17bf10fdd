"""The sandbox as a tool of a model: the tool's schema, its arguments, and the text that a model reads for a `Result`.

The texts follow rStar2-Agent (arXiv 2508.20722, section 2.1): stdout, or the value of the last expression if nothing
was printed; a traceback; a time-out. The texts for limits and crashes have the same form. `unavailable` and `invalid`
are never rendered: a model must not learn from failures of the service.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandbox.errors import InvalidCall, ServiceError
from sandbox.types import MAX_CODE_CHARS, MAX_STDIN_CHARS, Call, Result, Status, signal_name

TOOL_NAMES = ("execute_python_code_with_standard_io", "python_code_with_standard_io")
"""The tool's name in the paper, and its name in the released code."""
MAX_RESPONSE_CHARS = 4096
"""Default maximum of characters that a model reads for one call."""
_EXAMPLE = '{"code": "print(input())", "input": "hello"}'


def tool_schema(name: str = TOOL_NAMES[0]) -> dict[str, Any]:
    """Return the tool's definition in the format of OpenAI-compatible servers and chat templates."""
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
    """Return the call for a model's `arguments`. Raises `InvalidCall`, whose text is the response for the model."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidCall(
                f"{type(error).__name__}: {error}\nThe arguments must be JSON, such as {_EXAMPLE}"
            ) from None
    if not isinstance(arguments, Mapping):
        raise InvalidCall(f"TypeError: the arguments must be a JSON object, such as {_EXAMPLE}")
    unknown = [name for name in arguments if name not in ("code", "input")]
    if unknown:
        raise InvalidCall(f"TypeError: unexpected argument {unknown[0]!r:.80}; the arguments are code and input")
    if "code" not in arguments:
        raise InvalidCall("TypeError: missing argument 'code'")
    stdin = arguments.get("input")
    code = _checked_text("code", arguments["code"], MAX_CODE_CHARS)
    return Call(code=code, stdin=_checked_text("input", "" if stdin is None else stdin, MAX_STDIN_CHARS))


def render(result: Result, *, max_chars: int = MAX_RESPONSE_CHARS) -> str:
    """Return the text that the model reads. Raises `ServiceError` for `unavailable` and `invalid`. `parse_arguments`
    has checked the model's arguments before, so a malformed call is a bug of the caller."""
    if result.status in (Status.UNAVAILABLE, Status.INVALID):
        error = result.error
        reason = "the caller sent a malformed call" if result.status is Status.INVALID else "the call has no result"
        raise ServiceError(f"{reason}: {error}" if error else reason)
    parts = [_stdout(result), _failure_text(result)]
    text = "\n".join(part for part in parts if part)
    return _truncate(text or "(no output)", max_chars)


def _checked_text(name: str, value: Any, max_chars: int) -> str:
    """Return the argument `name`. Raises `InvalidCall` if it is not text or too long."""
    if not isinstance(value, str):
        raise InvalidCall(f"TypeError: argument {name!r} must be a string, not {type(value).__name__}")
    if len(value) > max_chars:
        raise InvalidCall(f"ValueError: argument {name!r} has {len(value)} characters, at most {max_chars} are allowed")
    return value


def _stdout(result: Result) -> str:
    """Return stdout, or the value of the last expression if the call ended as ok without output."""
    text, field_name = result.stdout.rstrip("\n"), "stdout"
    if not result.stdout and result.status is Status.OK:
        text, field_name = result.value or "", "value"
    return f"{text}\n... the rest of the output was cut" if field_name in result.truncated else text


def _failure_text(result: Result) -> str:
    """Return the reason why the call did not end as ok, or an empty string."""
    match result.status:
        case Status.ERROR:
            return _traceback_or_stderr(result)
        case Status.TIMEOUT:
            return "TimeoutError: the code was stopped because it ran longer than its time limit"
        case Status.MEMORY_LIMIT:
            # This line is always added: a traceback may end with a MemoryError of its own, or be absent.
            return _join_lines(_traceback_or_stderr(result), "MemoryError: the code ran out of the memory it may use")
        case Status.OUTPUT_LIMIT:
            return "OutputLimitError: the code was stopped because it printed too much"
        case Status.KILLED:
            return f"The interpreter crashed: {signal_name(result.signal)}"
    return ""


def _traceback_or_stderr(result: Result) -> str:
    """Return the traceback, or stderr and the exit code if the code ended without an exception."""
    if result.error is not None:
        error = result.error
        return error.traceback.rstrip("\n") or str(error)
    if result.exit_code:
        return _join_lines(result.stderr.rstrip("\n"), f"SystemExit: {result.exit_code}")
    return result.stderr.rstrip("\n")


def _join_lines(first: str, last: str) -> str:
    return f"{first}\n{last}" if first else last


def _truncate(text: str, max_chars: int) -> str:
    """Cut the middle out of a text longer than `max_chars`. The end stays, because the last line of a traceback matters
    most."""
    if len(text) <= max_chars:
        return text
    tail_chars = max_chars // 2
    head_chars = max_chars - tail_chars
    tail = text[len(text) - tail_chars :]
    return f"{text[:head_chars]}\n... {len(text) - max_chars} characters cut ...\n{tail}"
