"""Compares two answers, inside a call. Code imports this module as `rstar_answer_check`.

There are two policies: `strict` is our own (`answer_comparison`), and `math-verify` is the unchanged library
math-verify.

Invariants:
- Both answers may be hostile text, and no text is executed as code. Our own reader evaluates nothing. math-verify uses
  sympy, which turns text into an expression in one place only: by `eval` in `parse_expr`. Even a plain number passes
  through this `eval`. `refuse_code` lets only numbers and their arithmetic reach it.
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
from typing import Any, NamedTuple

import answer_comparison
from answer_extraction import MAX_ANSWER_CHARS, NoAnswer, extract
from protocol import MAX_ANSWER_TEXT_CHARS

MAX_SHOWN_CHARS = 200
"""Maximum characters of an extracted answer in a report."""

_NUMBERS = re.compile(r"(?:Integer|Float|Symbol|'[\w.+-]*'|[\d\s.()+*/-])*\Z", re.ASCII)
"""Matches sympy's code for numbers, such as `Integer (1 )/Float ('2.5' )`. In this code a unit is a `Symbol`."""


class Report(NamedTuple):
    """The outcome of a check as `sandbox.judging.answers` reads it: its `repr` is JSON."""

    outcome: str
    message: str = ""
    gold: str | None = None
    """The answer that was found in the gold, shortened; None if there is none."""
    answer: str | None = None

    def __repr__(self) -> str:
        return json.dumps(self._asdict(), ensure_ascii=False)


def outcome() -> Report:
    """Return the report for the pair on standard input: a line of JSON with the options and the bytes of the gold, then
    the gold and the answer in UTF-8."""
    options, _, texts = sys.stdin.buffer.read().partition(b"\n")
    header = json.loads(options)
    gold, answer = (
        part.decode("utf-8", "surrogatepass") for part in (texts[: header["gold_bytes"]], texts[header["gold_bytes"] :])
    )
    importlib.import_module("math_verify")  # outside of `try`, because a missing library is not caused by the pair
    refuse_code()
    return compare(gold, answer, header["strictness"], header["rounding"])


def compare(gold: str, answer: str, strictness: str = "strict", rounding: bool = False) -> Report:
    """Compare two texts. The outcome is `equivalent`, `not_equivalent`, or `unparsable` with a message."""
    random.seed(0)
    importlib.import_module("sympy.core.random").seed(0)
    extracted: dict[str, str] = {}
    find = _found_by_math_verify if strictness == "math-verify" else extract
    try:
        for name, text in (("gold", gold), ("answer", answer)):
            try:
                extracted[name] = find(text)
            except NoAnswer as error:
                return Report("unparsable", f"{name} {error}", **_shown(extracted))
        if strictness == "math-verify":
            are_equal = _math_verify().verify(_parse(gold), _parse(answer), timeout_seconds=None)
        else:
            are_equal = answer_comparison.are_equal(extracted["gold"], extracted["answer"], rounding)
    except BaseException as error:  # caused by the pair, for example by its size
        return Report("unparsable", f"the comparison failed with {type(error).__name__}", **_shown(extracted))
    return Report("equivalent" if are_equal else "not_equivalent", **_shown(extracted))


def _shown(extracted: dict[str, str]) -> dict[str, str]:
    """Return the extracted answers, shortened, without characters that UTF-8 cannot represent."""
    return {
        name: (text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…")
        .encode("utf-8", "replace")
        .decode()
        for name, text in extracted.items()
    }


# math-verify as it is


def _found_by_math_verify(text: str) -> str:
    """Return the text that math-verify finds. Raises `NoAnswer`."""
    if len(text) > MAX_ANSWER_TEXT_CHARS:
        raise NoAnswer(f"has more than {MAX_ANSWER_TEXT_CHARS} characters")
    parsed = _parse(text) if text.strip() else []
    if not parsed:
        raise NoAnswer("has no answer that math-verify finds")
    return next((part for part in reversed(parsed) if isinstance(part, str)), text)


def _parse(text: str) -> list[Any]:
    """Parse a text by math-verify. The library first looks for an answer in a box, so a short text without a box is put
    into a box. The library caches what it has parsed."""
    is_boxed = "\\boxed{" in text or len(text) > MAX_ANSWER_CHARS
    parsed: list[Any] = _math_verify().parse(text if is_boxed else "\\boxed{" + text + "}", parsing_timeout=None)
    return parsed


def refuse_code() -> None:
    """Make sympy raise ValueError instead of evaluating text that is more than numbers and their arithmetic."""
    importlib.import_module("sympy.physics.units")  # `simplify` imports it, and it evaluates names of its own
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    stringify = parser.stringify_expr

    def stringify_numbers(*args: Any) -> str:
        code: str = stringify(*args)
        if not _NUMBERS.match(code):
            raise ValueError("expected numbers and arithmetic only, got other code")
        return code

    parser.stringify_expr = stringify_numbers


def _math_verify() -> Any:
    logging = importlib.import_module("logging")  # not at the top: zygotes of other profiles must not import it
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off
    return importlib.import_module("math_verify")
