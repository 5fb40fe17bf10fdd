"""Compares the output of a program with the expected output: text by lines, tokens or numbers, and JSON.

The output is hostile. A comparison takes time linear in the length of both sides, and does not recurse into nested
values. It is a generator that returns whether both sides are equal. It yields after each `PIECES_PER_STEP` pieces, so
that an event loop can do other work.

    compare         two texts are equal if                                   two JSON values are equal if
    exact           they are the same, apart from one newline at the end     they are equal
    lines           their lines are the same, without white space at the     they are equal
                    end of a line and without blank lines at the end
    tokens          their parts between white space are the same             they are equal
    Tolerance       each two tokens are the same text, or numbers within     they are equal, numbers within
                    the tolerance                                            the tolerance

A number is within the tolerance if it differs from the expected number by at most `abs`, or by at most `rel` times the
expected number. Two NaN are equal, and an infinity equals itself only. A token that is too large for a float (1e400) is
compared as text. In JSON, 1 equals 1.0, and true does not equal 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from sandbox.types import DocumentedEnum

Steps = Generator[None, None, bool]
"""A running comparison. It yields None after each step, and returns whether both sides are equal."""
PIECES_PER_STEP = 4096
"""Lines, tokens or JSON values that one step compares, which takes about a millisecond."""
MAX_NUMBER_CHARS = 400
"""Maximum characters of a token that is read as a number. A longer token is compared as text."""
_TOKEN = re.compile(r"\S+")
_WHOLE = re.compile(r"[+-]?[0-9]+")


class TextComparison(DocumentedEnum):
    """How the output of a program is compared with the expected output. White space is defined by `str.isspace`."""

    EXACT = "exact", "The whole text, apart from one newline at its end."
    LINES = "lines", "The lines, without white space at the end of a line and without blank lines at the end."
    TOKENS = "tokens", "The parts between white space."


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Numbers are equal if they differ by at most `abs`, or by at most `rel` times the expected number."""

    abs: float = 0.0
    rel: float = 0.0

    def accepts(self, expected: float, actual: float) -> bool:
        if expected == actual or (expected != expected and actual != actual):  # only NaN differs from itself
            return True
        try:
            difference = abs(expected - actual)
            return math.isfinite(difference) and difference <= max(self.abs, self.rel * abs(expected))
        except OverflowError:  # a whole number that no float can represent
            return False


Comparison = TextComparison | Tolerance


def compare_texts(expected: str, actual: str, comparison: Comparison) -> Steps:
    """Compare two texts."""
    if isinstance(comparison, Tolerance):

        def is_same(one: str, other: str) -> bool:
            return one == other or _is_number_within(comparison, one, other)

        return _compare_pieces(_tokens(expected), _tokens(actual), is_same)
    if comparison is TextComparison.TOKENS:
        return _compare_pieces(_tokens(expected), _tokens(actual), str.__eq__)
    if comparison is TextComparison.LINES:
        return _compare_pieces(_lines(expected), _lines(actual), str.__eq__)
    return _compare_pieces(iter([expected.removesuffix("\n")]), iter([actual.removesuffix("\n")]), str.__eq__)


def compare_json(expected: Any, actual: Any, comparison: Comparison) -> Steps:
    """Compare two decoded JSON values."""
    tolerance = comparison if isinstance(comparison, Tolerance) else Tolerance()
    pending: list[Iterator[tuple[Any, Any]]] = [iter([(expected, actual)])]
    compared = 0
    while pending:
        pair = next(pending[-1], None)
        if pair is None:
            pending.pop()
            continue
        one, other = pair
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pending.append(zip(one.values(), map(other.__getitem__, one), strict=True))
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pending.append(zip(one, other, strict=True))
        elif not _is_same_leaf(one, other, tolerance):
            return False
        compared += 1
        if compared % PIECES_PER_STEP == 0:
            yield
    return True


def _compare_pieces(expected: Iterator[str], actual: Iterator[str], is_same: Callable[[str, str], bool]) -> Steps:
    for number, (one, other) in enumerate(zip_longest(expected, actual), 1):
        if one is None or other is None or not is_same(one, other):
            return False
        if number % PIECES_PER_STEP == 0:
            yield
    return True


def _tokens(text: str) -> Iterator[str]:
    return (match[0] for match in _TOKEN.finditer(text))


def _lines(text: str) -> Iterator[str]:
    start, end = 0, len(text.rstrip())
    while start < end:
        stop = text.find("\n", start, end)
        stop = end if stop < 0 else stop
        yield text[start:stop].rstrip()
        start = stop + 1


def _is_number_within(tolerance: Tolerance, expected: str, actual: str) -> bool:
    one, other = _number(expected), _number(actual)
    return one is not None and other is not None and tolerance.accepts(one, other)


def _number(token: str) -> float | None:
    if len(token) > MAX_NUMBER_CHARS or not token.isascii() or "_" in token:
        return None
    if _WHOLE.fullmatch(token):
        return int(token)  # as in JSON; as floats, two large numbers that differ by 1 would be equal
    try:
        number = float(token)
    except ValueError:
        return None
    # A token such as 1e400 is no number: it would be equal to all other such tokens, and to "inf".
    is_too_large = math.isinf(number) and token[-1].isdigit()
    return None if is_too_large else number


def _is_same_leaf(expected: Any, actual: Any, tolerance: Tolerance) -> bool:
    if _is_number(expected) and _is_number(actual):
        return tolerance.accepts(expected, actual)
    return type(expected) is type(actual) and expected == actual


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
