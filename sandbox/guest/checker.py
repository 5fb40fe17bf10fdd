"""Compares two answers by the math-verify library, in a call of its own. To the `verify` profile it is `rstar_checker`.

Invariants:
- Both answers are hostile text, and no text runs, so none can say what this says. There is one place where sympy makes
  an expression of text, and it does so by `eval`: `parse_expr`, which even numbers pass. There nothing gets through but
  numbers and arithmetic of numbers.
- The same pair gets the same outcome: sympy's random numbers, with which it tells expressions apart, start from a seed.
- Time and memory are the call's own. math-verify's alarms are off, since they would measure the load of the machine.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from typing import Any

MAX_ANSWER_CHARS = 4096
"""The longest answer that is looked at (`sandbox.verify` has the same number)."""

_NUMBERS = re.compile(r"(?:Integer|Float|Symbol|'[\w.+-]*'|[\d\s.()+*/-])*\Z", re.ASCII)
"""What sympy makes of numbers before it evaluates them: `Integer (1 )/Float ('2.5' )`. Symbols are its units' own."""


def outcome() -> str:
    """Of the pair on standard input, a JSON list of the right answer and the given one."""
    gold, answer = json.loads(sys.stdin.read())
    _libraries()  # what is missing is ours
    refuse_code()
    try:
        return compare(gold, answer)
    except BaseException:  # all that happens in here is the pair's doing
        return "failed"


def compare(gold: str, answer: str) -> str:
    """`equivalent`, `not_equivalent`, or which of the two says nothing: `no gold`, `no answer`."""
    math_verify, sympy_random = _libraries()
    random.seed(0)
    sympy_random.seed(0)
    parsed = []
    for name, text in (("gold", gold), ("answer", answer)):
        found = (
            math_verify.parse(boxed(text), parsing_timeout=None) if 0 < len(text.strip()) <= MAX_ANSWER_CHARS else []
        )
        if not found:
            return "no " + name
        parsed.append(found)
    return "equivalent" if math_verify.verify(*parsed, timeout_seconds=None) else "not_equivalent"


def boxed(text: str) -> str:
    """As math-verify looks for answers: what is in a box is one, all of it."""
    return text if "\\boxed{" in text else "\\boxed{" + text + "}"


def refuse_code() -> None:
    """From here on sympy evaluates no text but numbers."""
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    stringify = parser.stringify_expr

    def stringify_numbers(*args: Any) -> str:
        code: str = stringify(*args)
        if not _NUMBERS.match(code):
            raise ValueError("an answer is no code")
        return code

    parser.stringify_expr = stringify_numbers


def _libraries() -> tuple[Any, Any]:
    logging = importlib.import_module("logging")  # as math_verify does; zygotes that verify nothing do without it
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that its alarms are off
    return importlib.import_module("math_verify"), importlib.import_module("sympy.core.random")
