"""Compares two answers by the math-verify library, in a call of its own. The profile `verify` calls it `rstar_checker`.

Invariants:
- Both answers are hostile text. Of what they say only digits and operators are ever compiled as Python, which is what
  math-verify does with plain arithmetic; an audit hook refuses everything else, whatever path it came by. So no text
  can run, and what has not run cannot forge what this says.
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

MAX_CHARS = 4096
"""The longest answer that is looked at (`sandbox.verify` has the same number)."""

_ARITHMETIC = re.compile(r"(?:Integer|Float|Rational|[\d\s.()+\-*/,'])*\Z", re.ASCII)
"""What sympy makes of plain arithmetic before it compiles it: `Integer (1 )/Integer (2 )`."""


def outcome() -> str:
    """Of the pair on standard input, a JSON list of the right answer and the given one."""
    gold, answer = json.loads(sys.stdin.read())
    sys.addaudithook(_refuse_code)
    try:
        return compare(gold, answer)
    except BaseException:  # all that happens in here is the pair's doing
        return "failed"


def compare(gold: str, answer: str) -> str:
    """`equivalent`, `not_equivalent`, or which of the two says nothing: `no gold`, `no answer`."""
    math_verify: Any = importlib.import_module("math_verify")
    random.seed(0)
    importlib.import_module("sympy.core.random").seed(0)
    parsed = []
    for name, text in (("gold", gold), ("answer", answer)):
        found = math_verify.parse(boxed(text), parsing_timeout=None) if 0 < len(text.strip()) <= MAX_CHARS else []
        if not found:
            return "no " + name
        parsed.append(found)
    return "equivalent" if math_verify.verify(*parsed, timeout_seconds=None) else "not_equivalent"


def boxed(text: str) -> str:
    """As math-verify looks for answers: what is in a box is one, all of it."""
    return text if "\\boxed{" in text else "\\boxed{" + text + "}"


def _refuse_code(event: str, args: tuple) -> None:
    """Modules have files; what has none (`<string>`) is text that somebody put together."""
    if event == "compile" and isinstance(args[0], (str, bytes)) and str(args[1])[:1] == "<":
        text = args[0] if isinstance(args[0], str) else args[0].decode("utf-8", "replace")
        if not _ARITHMETIC.match(text):
            raise ValueError("an answer is no code")
