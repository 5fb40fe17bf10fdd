r"""Reads a turn's text: its tool calls, its `<answer>` blocks, and the answer in the last `\boxed{}`.

The format is rStar2-Agent's (arXiv 2508.20722, 2.1): tool calls are JSON objects in `<tool_call>` tags, and thoughts
are in `<reason>` or `<think>` tags. docs/algorithm.md has examples for the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

PYTHON_TOOL_NAME = "execute_python_code_with_standard_io"
"""The Python tool's name in rStar2-Agent, as in `sandbox.tool`."""
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
RECORD_DEPTH = 20
"""In a file with episodes, a tool call lies inside at most this number of nested lists and objects."""
_BRACE = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_CALL_OR_THOUGHT_TAG = re.compile(
    rf'{TOOL_CALL_OPEN}\s*\{{(?:[^"<]++|"(?:[^"\\]++|\\.)*+")*+{TOOL_CALL_CLOSE}|<(?P<slash>/?)(?P<name>reason|think)>',
    re.DOTALL,
)
_BLANKS, _JSON = re.compile(r"[ \t\n\r]*"), json.JSONDecoder()
_FENCED_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_EXAMPLE = f'{TOOL_CALL_OPEN}{{"name": "{PYTHON_TOOL_NAME}", "arguments": {{"code": "print(1)"}}}}{TOOL_CALL_CLOSE}'


@dataclass(frozen=True, slots=True)
class ToolCallRequest:
    """A tool call that parsed. The tool itself checks its name and arguments."""

    name: str
    """The name that the model gave."""
    arguments: str | Mapping[str, Any]
    """What the model gave as arguments: an object or a text."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A tool call that did not parse."""

    text: str
    response: str
    """What the model reads instead of the response of a tool."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    tool_calls: tuple[ToolCallRequest | MalformedCall, ...] = ()
    answer_blocks: int = 0
    """The number of closed `<answer>` blocks outside thoughts and tool calls."""
    answer: str | None = None
    """The content of the last closed `\\boxed{}` in the last answer block. None if this block has none."""


def parse_turn(text: str) -> ParsedTurn:
    """Parse the text of a turn. Never raises: every text gives a `ParsedTurn`.

    1. Thoughts are removed: nothing in them is a tool call or an answer.
    2. Tool calls are found. Everything inside a call belongs to the call: an `<answer>` in its code is no answer, and a
       `</tool_call>` inside one of its JSON strings does not end it. A tool call inside an answer block is still a tool
       call.
    3. Answer blocks are found in the rest.

    A call whose JSON does not parse ends at the next `</tool_call>`. A call without a closing tag ends at the end of
    the text. Both are malformed.
    """
    calls: list[ToolCallRequest | MalformedCall] = []
    outside, position = [], 0
    text = without_thoughts(text)
    while (start := text.find(TOOL_CALL_OPEN, position)) >= 0:
        outside.append(text[position:start])
        call, position = _parse_call(text, start + len(TOOL_CALL_OPEN))
        calls.append(call)
    outside.append(text[position:])
    answers = _answer_blocks("\n".join(outside))
    return ParsedTurn(tuple(calls), len(answers), boxed_answer(answers[-1]) if answers else None)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{}` or `\fbox{}`. None if there is no box, or the box is empty.

    The last box is the one that begins last. So if a box is inside another, the inner one is the last. Braces inside a
    box must be paired. `\{` and `\}` are ordinary characters.
    """
    open_braces: list[re.Match[str]] = []
    start, end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace["box"] or brace[0] == "{":
            open_braces.append(brace)
        elif brace[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening["box"] and opening.end() > start:
                start, end = opening.end(), brace.start()
    return text[start:end].strip() or None if start >= 0 else None


def program_prompt(text: str, kind: str = "reads standard input and prints the answer") -> str:
    """Return the text of a problem with a request for a program in the form that `fenced_block` reads. `kind` says what
    the program does."""
    block = "Put the whole program into one block that begins with ```python and ends with ```, inside <answer>."
    return f"{text}\n\nWrite a Python program that {kind}. {block}"


def fenced_block(text: str) -> str | None:
    """Return the content of the last closed block between lines of three backquotes. Blocks in thoughts do not count.
    None if there is no block. The first line of a block may name a language."""
    blocks = _FENCED_BLOCK.findall(without_thoughts(text))
    return str(blocks[-1]) if blocks else None


def without_thoughts(text: str) -> str:
    """Return the text without its thoughts.

    A thought ends at its first closing tag. If the turn has no opening tag for it, the prompt has opened the thought,
    and all text before the closing tag is thought. An opening tag without a closing tag begins no thought. A tag in a
    string of a tool call is text.
    """
    kept: list[str] = []
    openings: dict[str, int] = {}
    closed: set[str] = set()
    kept_until = 0
    for tag in _CALL_OR_THOUGHT_TAG.finditer(text):
        name = tag["name"]
        if tag["slash"] == "":
            openings.setdefault(name, tag.start())
        elif name in openings or (name and name not in closed):
            if name in openings:
                kept.append(text[kept_until : openings[name]])
            else:
                kept.clear()
            openings.clear()
            closed.add(name)
            kept_until = tag.end()
    return "\n".join([*kept, text[kept_until:]])


def _parse_call(text: str, start: int) -> tuple[ToolCallRequest | MalformedCall, int]:
    """Parse the call whose content begins at `start`; return it and the index after its closing tag."""
    try:
        value, end = _JSON.raw_decode(text, _skip_blanks(text, start))
    except (ValueError, RecursionError):
        pass
    else:
        if text.startswith(TOOL_CALL_CLOSE, end := _skip_blanks(text, end)):
            return _tool_call(value, text[start:end]), end + len(TOOL_CALL_CLOSE)
    end = text.find(TOOL_CALL_CLOSE, start)
    if end < 0:
        error = f"SyntaxError: {TOOL_CALL_OPEN} is never closed by {TOOL_CALL_CLOSE}"
        return _malformed(text[start:], error), len(text)
    try:  # parsed again, so that the error is about the text before the closing tag only
        call = _tool_call(json.loads(text[start:end]), text[start:end])
    except (ValueError, RecursionError) as error:
        call = _malformed(text[start:end], f"{type(error).__name__}: {error}")
    return call, end + len(TOOL_CALL_CLOSE)


def _skip_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    assert blanks
    return blanks.end()


def _tool_call(value: Any, text: str) -> ToolCallRequest | MalformedCall:
    """Return the call in a JSON value. Missing, null and empty arguments become an empty object. A tool that requires
    an argument refuses this object itself."""
    if isinstance(value, dict):
        given = value.get("arguments")
        if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
            value["arguments"] = {}
    match value:
        case {"name": str(name), "arguments": str() | dict() as arguments}:
            try:
                _check_recordable([name, arguments])
                if isinstance(arguments, str):  # the tool parses it, and reports text that is no JSON
                    with suppress(json.JSONDecodeError):
                        _check_recordable(json.loads(arguments))
            except (ValueError, RecursionError) as error:
                return _malformed(text, f"{type(error).__name__}: {error}")
            return ToolCallRequest(name, arguments)
    return _malformed(text, 'TypeError: a tool call is a JSON object with a text "name" and an object "arguments"')


def _check_recordable(value: Any) -> None:
    """Raise `ValueError` if a file with episodes cannot hold the value: it has unpaired surrogates, or it is nested too
    deep to be read again."""
    from_json(b"[" * RECORD_DEPTH + to_json(value) + b"]" * RECORD_DEPTH)


def _malformed(text: str, error: str) -> MalformedCall:
    return MalformedCall(text, f"{error}\nA tool call is one JSON object in tags, such as {_EXAMPLE}")


def _answer_blocks(text: str) -> list[str]:
    """Return the content of each closed `<answer>` block, in linear time: a model may repeat a tag until its limit."""
    answers, position = [], 0
    while (start := text.find(ANSWER_OPEN, position)) >= 0 and (end := text.find(ANSWER_CLOSE, start)) >= 0:
        answers.append(text[start + len(ANSWER_OPEN) : end])
        position = end + len(ANSWER_CLOSE)
    return answers
