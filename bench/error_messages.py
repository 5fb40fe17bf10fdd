"""The error messages of both packages, as the code has them, for a page that a reader searches by a message.

A message is the text argument of an error that is raised, or of `_require`. Parts that are computed become `...`.
A message is left out if it has too little fixed text, such as `...: expected ..., got ...`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ERRORS = {
    "ClusterError": 0,
    "ConfigError": 0,
    "HttpError": 1,
    "InvalidCall": 0,
    "IsolationError": 0,
    "Overloaded": 0,
    "SandboxUnavailable": 0,
    "ServiceError": 0,
    "TooLarge": 0,
    "_require": 1,
}
"""Position of the message in the arguments of each error."""
MIN_WORDS = 2
"""Words that a message has besides computed parts and those of `GENERIC`."""
GENERIC = frozenset({"expected", "got", "of", "a", "an", "the", "or", "and", "to", "it"})


def messages(root: Path, folder: str) -> list[str]:
    """Return the messages of the files below a folder, in their order, each once."""
    found = (
        text
        for path in sorted((root / folder).rglob("*.py"))
        for text in _messages_of(ast.parse(path.read_text(encoding="utf-8")))
    )
    return list(dict.fromkeys(text for text in found if _is_specific(text)))


def _messages_of(tree: ast.Module) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in sorted(calls, key=lambda node: node.lineno):
        position = ERRORS.get(ast.unparse(call.func), len(call.args))
        if position < len(call.args):
            yield _text(call.args[position])


def _text(node: ast.expr) -> str:
    """Return a message whose computed parts are `...`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return re.sub(r"(\.\.\.)+", "...", "".join(map(_text, parts)))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
    return "..."


def _is_specific(message: str) -> bool:
    words = re.findall(r"[A-Za-z_]{2,}", message)
    return len([word for word in words if word not in GENERIC]) >= MIN_WORDS
