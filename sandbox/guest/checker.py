"""Compares two answers with the math-verify library, inside a call. Code imports this module as `rstar_checker`.

Invariants:
- Both answers are hostile text, and none of it is executed. sympy turns text into an expression in one place only, by
  `eval` in `parse_expr`; even a plain number passes through that `eval`. `refuse_code` lets only numbers and their
  arithmetic reach it.
- The same pair always has the same outcome, because sympy's random number generator, which it uses to compare
  expressions, is seeded.
- Only the limits of the call end a comparison. The alarms of math-verify are off, because they measure wall time, which
  depends on the load of the machine.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from typing import Any

MAX_ANSWER_CHARS = 4096
"""Maximum characters of an answer; `sandbox.verify` has the same number."""

_NUMBERS = re.compile(r"(?:Integer|Float|Symbol|'[\w.+-]*'|[\d\s.()+*/-])*\Z", re.ASCII)
"""Matches sympy's code for numbers, such as `Integer (1 )/Float ('2.5' )`. In this code a unit is a `Symbol`."""


def outcome() -> str:
    """Return the outcome for the pair on standard input, a JSON list of the correct answer and the given one.

    The outcome is that of `compare`, or `failed` if the comparison raised an exception.
    """
    gold, answer = json.loads(sys.stdin.read())
    _libraries()  # outside of `try`, because a missing library is not caused by the pair
    refuse_code()
    try:
        return compare(gold, answer)
    except BaseException:  # caused by the pair, for example by its size
        return "failed"


def compare(gold: str, answer: str) -> str:
    """Return `equivalent` or `not_equivalent`.

    Return `no gold` if `gold` is empty, too long or no mathematics, and `no answer` if `answer` is.
    """
    math_verify, sympy_random = _libraries()
    random.seed(0)
    sympy_random.seed(0)
    parsed = []
    for name, text in (("gold", gold), ("answer", answer)):
        expressions = []
        if 0 < len(text.strip()) <= MAX_ANSWER_CHARS:
            expressions = math_verify.parse(boxed(text), parsing_timeout=None)
        if not expressions:
            return "no " + name
        parsed.append(expressions)
    return "equivalent" if math_verify.verify(*parsed, timeout_seconds=None) else "not_equivalent"


def boxed(text: str) -> str:
    """Return the text inside `\\boxed{}`, where math-verify looks for the answer. Add no second box."""
    return text if "\\boxed{" in text else "\\boxed{" + text + "}"


def refuse_code() -> None:
    """Make sympy raise ValueError instead of evaluating text that is more than numbers and their arithmetic."""
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    stringify = parser.stringify_expr

    def stringify_numbers(*args: Any) -> str:
        code: str = stringify(*args)
        if not _NUMBERS.match(code):
            raise ValueError("expected numbers and arithmetic only, got other code")
        return code

    parser.stringify_expr = stringify_numbers


def _libraries() -> tuple[Any, Any]:
    logging = importlib.import_module("logging")  # not at the top: zygotes without the checker must not import it
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    return importlib.import_module("math_verify"), importlib.import_module("sympy.core.random")
