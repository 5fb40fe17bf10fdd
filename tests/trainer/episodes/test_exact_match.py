"""Tests of the scoring rule of GAIA (exact match after normalization): edge cases, and equality with the published
code."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.episodes.exact_match import is_exact_match, plain_answer


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        # Numbers
        ("17", "17"),
        ("17.0", "17"),
        ("$17", "17"),
        ("17%", "17"),
        ("1,700", "1700"),
        (" 17 ", "17"),
        ("1000", "1e3"),
        ("1000", "1_000"),
        ("1_7", "17"),
        ("-0", "0"),
        ("0.30", ".3"),
        ("inf", "inf"),
        ("no number", "inf"),  # text that is no number becomes infinity
        # Lists
        ("a, b", "a,b"),
        ("a; b", "a,b"),
        ("A,  b c", "a, BC"),
        ("1,000", "1,000"),  # the list 1, 000
        ("1, 0", "1,000"),
        ("$5, 7%", "5; 7"),
        ("a,", "a,"),
        ("no number,x", "inf,x"),
        # Strings
        ("The Cat", "thecat"),
        ("the\tcat\n", "The cat"),
        ("St. John's!", "st johns"),
        ("a-b", "ab"),
        ("", "!"),
        ("17%", "17 %."),
        ("None", "None"),
        (None, "None"),
    ],
)
def test_exact_match_accepts_an_answer_that_is_equal_after_normalization(answer: str | None, truth: str) -> None:
    assert is_exact_match(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("17 m", "17"),
        ("17.0000001", "17"),  # there is no tolerance
        ("seventeen", "17"),
        ("", "17"),
        ("€17", "17"),
        ("17", "17 m"),
        ("nan", "nan"),
        ("0", "nan"),
        ("1000", "1,000"),  # the right answer is a list of two
        ("b, a", "a, b"),
        ("a, b, c", "a, b"),
        ("a", "a, b"),
        ("5,876, b", "5876, b"),  # a separator of thousands breaks the list
        ("a., b", "a, b"),  # punctuation counts in an element
        ("a b", "a, b"),
        ("the cat", "cat"),
        ("cafe", "café"),
        ("cafe\u0301", "café"),  # there is no Unicode normalisation
        ("a–b", "ab"),  # only ASCII punctuation is removed
        (None, "0"),
        (None, ""),
    ],
)
def test_exact_match_rejects_an_answer_that_differs_after_normalization(answer: str | None, truth: str) -> None:
    assert not is_exact_match(answer, truth)


def is_float(element):
    try:
        float(element)
        return True
    except ValueError:
        return False


def normalize_number(number):
    for char in ["$", "%", ","]:
        number = number.replace(char, "")
    return float(number) if is_float(number) else float("inf")


def normalize_text(text, remove_punct=True):
    text = re.sub(r"\s", "", text)
    if remove_punct:
        return text.lower().translate(str.maketrans("", "", string.punctuation))
    return text.lower()


def published_rule(model_answer, ground_truth):
    """Apply the rule as the leaderboard's scorer does, in the same order of steps."""
    if model_answer is None:
        model_answer = "None"
    if is_float(ground_truth):
        return normalize_number(model_answer) == float(ground_truth)
    if any(char in ground_truth for char in [",", ";"]):
        truths, answers = re.split("[,;]", ground_truth), re.split("[,;]", model_answer)
        if len(truths) != len(answers):
            return False
        return all(
            normalize_number(answer) == float(truth)
            if is_float(truth)
            else normalize_text(answer, remove_punct=False) == normalize_text(truth, remove_punct=False)
            for answer, truth in zip(answers, truths, strict=True)
        )
    return normalize_text(model_answer) == normalize_text(ground_truth)


TEXTS = st.one_of(
    st.text("aA1.,;$% -_eniİ\n", max_size=8), st.text(max_size=8), st.integers().map(str), st.floats().map(str)
)


@given(st.one_of(st.none(), TEXTS), TEXTS)
def test_the_rule_gives_the_results_of_the_published_code(answer: str | None, truth: str) -> None:
    assert is_exact_match(answer, truth) == published_rule(answer, truth)


@pytest.mark.parametrize(
    ("boxed", "expected"),
    [
        ("42", "42"),
        (r"\text{New York}", "New York"),
        (r"\mathrm{Ada}, \textbf{Bela}", "Ada, Bela"),
        (r"\$5 \& 7\%", "$5 & 7%"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("", ""),
    ],
)
def test_a_plain_answer_has_no_latex_that_only_marks_text(boxed: str, expected: str) -> None:
    assert plain_answer(boxed) == expected


@pytest.mark.parametrize(
    ("boxed", "plain"),
    [
        (r"\textbf{\text{Paris}}", "Paris"),
        (r"\text{Braintree},\ \text{Honolulu}", "Braintree, Honolulu"),
        ("17{,}000", "17,000"),
        (r"\mbox{a} \textrm{b}\,\boldsymbol{c}", "a b c"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_marks_of_latex_are_removed(boxed: str, plain: str) -> None:
    assert plain_answer(boxed) == plain
