"""Tests of the comparison of a program's output with the expected one: its rules, and its bounded work. Slow versions
that are easy to check give the same results."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.judging.comparison import (
    PIECES_PER_STEP,
    Comparison,
    Steps,
    TextComparison,
    Tolerance,
    compare_json,
    compare_texts,
)

EXACT, LINES, TOKENS = TextComparison
NEAR = Tolerance(abs=1e-6, rel=1e-6)
TEXTS = st.text(st.sampled_from("ab1.\n \t\r\x00\ud800\x1c"), max_size=12)


def finish(steps: Steps) -> bool:
    """Run a comparison to its end."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return bool(end.value)


def is_same(expected: str, actual: str, comparison: Comparison) -> bool:
    return finish(compare_texts(expected, actual, comparison))


def is_same_json(expected: Any, actual: Any, comparison: Comparison = LINES) -> bool:
    return finish(compare_json(expected, actual, comparison))


@pytest.mark.parametrize(
    ("expected", "actual", "same_in"),
    [
        ("3\n", "3\n", {EXACT, LINES, TOKENS}),
        ("3", "3\n", {EXACT, LINES, TOKENS}),
        ("3\n\n", "3\n", {LINES, TOKENS}),
        ("3", "3\n\n", {LINES, TOKENS}),
        ("1 2 \n3", "1 2\n3\n", {LINES, TOKENS}),
        ("1\r\n2\r\n", "1\n2\n", {LINES, TOKENS}),
        (" 1", "1", {TOKENS}),
        ("1  2", "1 2", {TOKENS}),
        ("1\n2", "1 2", {TOKENS}),
        ("1\n\n2", "1\n2", {TOKENS}),
        ("", "", {EXACT, LINES, TOKENS}),
        ("", "\n", {EXACT, LINES, TOKENS}),
        ("", " \n\n", {LINES, TOKENS}),
        ("", "0", set()),
        ("1", "1 2", set()),
        ("1 2", "1", set()),
        ("1.0", "1", set()),
        ("\ud800\x00", "\ud800\x00\n", {EXACT, LINES, TOKENS}),
        ("YES", "yes", set()),
    ],
)
def test_each_mode_of_comparison_accepts_exactly_the_documented_differences(
    expected: str, actual: str, same_in: set[TextComparison]
) -> None:
    assert {comparison for comparison in TextComparison if is_same(expected, actual, comparison)} == same_in


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("0.3333333", "0.33333334", True),
        ("0.333", "0.334", False),
        ("1e9", "1000000000.5", True),
        ("1e9", "1000002000", False),
        ("0", "0.0000005", True),
        ("0", "-0", True),
        ("1 2", "1.0 2", True),
        ("1 2", "1", False),
        ("x 1", "x 1.0000000001", True),
        ("x", "y", False),
        ("nan", "NaN", True),
        ("nan", "0", False),
        ("0", "nan", False),
        ("inf", "Infinity", True),
        ("inf", "-inf", False),
        ("1", "inf", False),
        ("inf", "1", False),
        ("9" * 320, "9" * 320, True),
        ("9" * 320, "8" * 320, False),
        ("9" * 320, "inf", False),
        ("inf", "1e400", False),
        ("-1e999", "-inf", False),
        ("1000", "1_000", False),
        ("1", "١", False),
        ("1", "\ud800", False),
        ("9" * 500, "9" * 500, True),
        ("9" * 500, "8" + "9" * 499, False),
    ],
)
def test_a_tolerance_applies_to_tokens_that_are_numbers(expected: str, actual: str, same: bool) -> None:
    assert is_same(expected, actual, NEAR) is same


def test_whole_numbers_are_compared_as_such() -> None:
    assert not is_same(str(2**53), str(2**53 + 1), Tolerance(abs=0))
    assert not is_same(str(10**18), str(10**18 + 5), Tolerance(abs=1e-6))
    assert is_same(str(10**18), f"+{10**18 + 5}", Tolerance(abs=5))
    assert is_same(str(10**18), "1e18", Tolerance(abs=0))
    assert not is_same("1", "+-1", Tolerance(abs=2))


def test_relative_tolerance_refers_to_the_expected_number() -> None:
    assert is_same("100", "110", Tolerance(rel=0.1))
    assert not is_same("110", "99", Tolerance(rel=0.09))
    assert not is_same("0", "1e-300", Tolerance(rel=0.5))


@given(TEXTS, TEXTS)
def test_comparisons_equal_their_obvious_versions(expected: str, actual: str) -> None:
    def lines(text: str) -> list[str]:
        split = [line.rstrip() for line in text.split("\n")]
        while split and not split[-1]:
            split.pop()
        return split

    def without_newline(text: str) -> str:
        return text[:-1] if text.endswith("\n") else text

    assert is_same(expected, actual, LINES) == (lines(expected) == lines(actual))
    assert is_same(expected, actual, TOKENS) == (expected.split() == actual.split())
    assert is_same(expected, actual, EXACT) == (without_newline(expected) == without_newline(actual))
    assert is_same(expected, expected, NEAR)


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ([1, [2, "x"], None], [1, [2, "x"], None], True),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        ([1, 2], [1], False),
        ([1], [1, 2], False),
        ([], {}, False),
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (False, None, False),
        ("1", 1, False),
        ("a ", "a", False),
        (10**60, 10**60, True),
        (10**60, 10**60 + 1, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.inf, 1, False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_json_values_are_compared_by_type_and_value(expected: Any, actual: Any, same: bool) -> None:
    assert is_same_json(expected, actual) is same


def test_a_tolerance_applies_to_numbers_in_json() -> None:
    assert is_same_json([{"x": 0.3}, 10**400], [{"x": 0.1 + 0.2}, 10**400], NEAR)
    assert not is_same_json([0.3, "0.3"], [0.3, "0.30"], NEAR)
    assert not is_same_json(1.0, True, NEAR)
    assert not is_same_json(10**400, 1.5, NEAR)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=2), children, max_size=3),
    max_leaves=6,
)


@given(JSON_VALUES, JSON_VALUES)
def test_json_comparison_equals_that_of_canonical_texts(expected: Any, actual: Any) -> None:
    same = json.dumps(expected, sort_keys=True) == json.dumps(actual, sort_keys=True)
    assert is_same_json(expected, actual) == same
    assert is_same_json(expected, json.loads(json.dumps(expected)))


def test_deep_nesting_does_not_recurse() -> None:
    def nested(leaf: Any) -> Any:
        for _ in range(100_000):
            leaf = [leaf]
        return leaf

    one, other = nested(1), nested(2)
    assert is_same_json(one, one)
    assert not is_same_json(one, other)
    for value in (one, other):  # free the lists level by level, since their deallocation recurses
        while isinstance(value, list):
            value = value.pop()


@pytest.mark.parametrize("comparison", [LINES, TOKENS, NEAR])
def test_a_long_comparison_is_done_in_steps(comparison: Comparison) -> None:
    text = "1\n" * (10 * PIECES_PER_STEP)
    steps = compare_texts(text, text, comparison)
    assert sum(1 for _ in steps) == 10
    assert count_steps(compare_json([1] * (10 * PIECES_PER_STEP), [1] * (10 * PIECES_PER_STEP), comparison)) == 10


def test_a_comparison_ends_at_the_first_difference() -> None:
    assert count_steps(compare_texts("1\n", "2\n" * 1_000_000, LINES)) == 0


def count_steps(steps: Steps) -> int:
    return sum(1 for _ in steps)
