"""Strict answer checks on labelled pairs, on golds of public data sets, and on hostile text.

They are compared in a process of its own, which imports the module as the guest does. Some pairs also pass through the
service.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.workloads.answer_pairs import LabelledPair, labelled_pairs
from sandbox.guest.protocol import MAX_ANSWER_TEXT_CHARS
from sandbox.judging import answers as verify

pytest.importorskip("math_verify")

GUEST = Path(verify.__file__).parents[1] / "guest"
DATA = Path(__file__).parents[3] / "shared" / "data"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
PAIRS = labelled_pairs()
COMPARE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import answer_check
for line in sys.stdin:
    reports = []
    for gold, answer, options in json.loads(line):
        begun = time.process_time()
        report = answer_check.compare(gold, answer, **options)
        reports.append([*report, time.process_time() - begun])
    print(json.dumps(reports), flush=True)
"""


@cache
def checking_process() -> subprocess.Popen[str]:
    """Return a process that compares the pairs of each line on its standard input. It ends with this process."""
    argv = [sys.executable, "-W", "ignore", "-I", "-c", COMPARE, str(GUEST)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module", autouse=True)
def _end_the_process() -> Iterator[None]:
    yield
    with checking_process() as process:
        assert process.stdin
        process.stdin.close()
    checking_process.cache_clear()


def compare(pairs: Sequence[tuple[str, str]], **options: Any) -> list[tuple[str, str, str | None, str | None, float]]:
    """Return outcome, message, both extracted answers and CPU seconds of each check."""
    process = checking_process()
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps([[gold, answer, options] for gold, answer in pairs]) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "the process that compares answers has ended"
    return [tuple(report) for report in json.loads(line)]


def outcomes(pairs: Sequence[tuple[str, str]], **options: Any) -> list[str]:
    return [report[0] for report in compare(pairs, **options)]


# Labelled pairs


def texts(pairs: Sequence[LabelledPair]) -> list[tuple[str, str]]:
    return [(pair.gold, pair.answer) for pair in pairs]


def test_the_labelled_pairs_are_distinct_and_each_kind_has_pairs_that_are_not_equivalent() -> None:
    assert len(PAIRS) >= 400
    assert [pair for pair, n in Counter(texts(PAIRS)).items() if n > 1] == []
    for kind in {pair.kind for pair in PAIRS}:
        assert {pair.are_equivalent for pair in PAIRS if pair.kind == kind} >= {False}, kind


def test_no_pair_is_a_false_equivalent_and_at_most_one_in_a_hundred_is_wrong() -> None:
    found = outcomes(texts(PAIRS))
    wrong = [
        pair for pair, outcome in zip(PAIRS, found, strict=True) if (outcome == "equivalent") != pair.are_equivalent
    ]
    assert [pair for pair in wrong if not pair.are_equivalent] == [], "false equivalents"
    assert len(wrong) <= len(PAIRS) / 100, wrong


def test_an_answer_in_markup_or_in_a_completion_equals_the_answer_alone() -> None:
    golds = sorted(
        {pair.gold for pair in PAIRS if len(pair.gold) < 60 and not re.search(r"\n|boxed|####|^\$|\*", pair.gold)}
    )
    forms = (
        "**{}**",
        "${}$",
        r"\({}\)",
        "{}.",
        r"Then $x = 1$, so it is $\boxed{{{}}}$. I am sure.",
        "#### {}",
        "<answer>{}</answer>",
    )
    pairs = [(gold, form.format(gold)) for gold in golds for form in forms]
    found = outcomes(pairs)
    assert [pair for pair, outcome in zip(pairs, found, strict=True) if outcome != "equivalent"] == []


@pytest.mark.parametrize("name", ["math500", "aime2024", "aime2025", "gsm8k_test", "train_integer"])
def test_every_gold_of_a_data_set_equals_itself_and_no_gold_with_another_digit(name: str) -> None:
    file = DATA / f"{name}.jsonl"
    if not file.exists():
        pytest.skip(f"needs the answers of {name} at {file}")
    golds = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    found = outcomes([(gold, gold) for gold in golds])
    assert [gold for gold, outcome in zip(golds, found, strict=True) if outcome != "equivalent"] == []
    changed = [(gold, re.sub(r"[0-9](?=\D*\Z)", lambda digit: str((int(digit[0]) + 1) % 10), gold)) for gold in golds]
    changed = [pair for pair in changed if pair[0] != pair[1]]
    found = outcomes(changed)
    assert [pair for pair, outcome in zip(changed, found, strict=True) if outcome == "equivalent"] == []


# Options


ROUNDED = [
    (r"\frac{1}{3}", "0.33", True),
    (r"\frac{1}{3}", "0.3333333", True),
    (r"\frac{2}{3}", "0.67", True),
    (r"\sqrt{2}", "1.41421356", True),
    (r"\sqrt{2}", r"x = 1.414", False),
    (r"\pi", "3.14", True),
    (r"\frac{1}{3}", r"33.3\%", True),
    (r"6.02214 \times 10^{23}", r"6.02 \times 10^{23}", True),
    (r"\frac{1}{3}", "0.34", False),
    (r"\frac{1}{3}", "0.3", False),
    (r"\frac{1}{3}", "0", False),
    (r"0.001", "0.00", False),
    (r"\sqrt{2}", "1.42", False),
    (r"\sqrt{2}", "1", False),
    ("3.14", "3.14159", False),
    ("42", "42.4", False),
    ("100000", "100001", False),
    ("x", "1.41", False),
    (r"1, \sqrt{2}", "1.41", False),
]


def test_with_rounding_a_decimal_equals_a_gold_that_rounds_to_it() -> None:
    pairs = [(gold, answer) for gold, answer, _ in ROUNDED]
    expected = ["equivalent" if is_equal else "not_equivalent" for *_, is_equal in ROUNDED]
    assert list(zip(pairs, outcomes(pairs, rounding=True), strict=True)) == list(zip(pairs, expected, strict=True))
    assert set(outcomes(pairs)) == {"not_equivalent"}, "without the option no decimal is rounded"


def test_math_verify_has_its_own_verdicts() -> None:
    pairs = [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("12", "5 7"),
        ("12", "13"),
        (r"The sum is $\boxed{12}$.", "12"),
    ]
    expected = ["equivalent", "equivalent", "not_equivalent", "equivalent"]
    assert outcomes(pairs, strictness="math-verify") == expected


# Extraction


@pytest.mark.parametrize(
    ("text", "extracted"),
    [
        (r"First \boxed{11}, then \boxed{12}. Now \boxed{13", "12"),
        (r"\boxed{\frac{1}{2}} and more}", r"\frac{1}{2}"),
        (r"\boxed{5 \boxed{12}}", r"5 \boxed{12}"),
        (r"\boxed{5 \boxed{12}", "12"),
        (r"\boxed{\boxed{12}}", "12"),
        (r"\fbox {7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("a } b { \\boxed{3}", "3"),
        ("so\n#### 18\nThanks", "18"),
        ("#### 1\n<answer>2</answer>", "2"),
        ("<answer>2</answer>\n#### 1", "1"),
        ("<answer>1</answer> no <answer>2", "2"),
        (r"\boxed{3} <answer>4</answer>", "3"),
        ("  42 ", "42"),
    ],
)
def test_the_answer_of_a_text_is_the_last_box_or_mark(text: str, extracted: str) -> None:
    ((_, _, gold, answer, _), *_) = compare([(text, text)])
    assert (gold, answer) == (extracted, extracted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no text and no \boxed{}, #### or <answer>"),
        (r"so \boxed{ }", "has no text in its last closed box"),
        ("####", "has no text behind its last mark"),
        ("x" * 4097, r"has more than 4096 characters and no \boxed{}, #### or <answer>"),
        (r"\boxed{" + "7" * 4097 + "}", "has more than 4096 characters in its last closed box"),
        (" " * (MAX_ANSWER_TEXT_CHARS + 1), f"has more than {MAX_ANSWER_TEXT_CHARS} characters"),
    ],
)
def test_a_text_without_an_answer_is_unparsable_and_the_message_has_the_limit(text: str, message: str) -> None:
    as_gold, as_answer = compare([(text, "7"), ("7", text)])
    assert as_gold[:2] == ("unparsable", "gold " + message)
    assert as_answer[:3] == ("unparsable", "answer " + message, "7")


def test_an_answer_is_found_in_a_completion_of_a_megabyte() -> None:
    text = "We compute {x} and more. " * 41_000 + r"So it is $\boxed{12}$."
    assert 1_000_000 < len(text) < MAX_ANSWER_TEXT_CHARS
    ((outcome, _, _, answer, _),) = compare([("12", text)])
    assert (outcome, answer) == ("equivalent", "12")


def test_a_long_answer_is_shown_shortened() -> None:
    ((_, _, gold, answer, _),) = compare([("7" * 200, "1+" * 200 + "\ud800")])
    assert gold == "7" * 200
    assert answer == ("1+" * 100)[:199] + "…"


HOSTILE_UNITS = ("{", "{}", "\\", r"\boxed{", r"\boxed{1}", r"\boxed ", "####", "<answer>", r"\{", "\\boxed{1\\")


def test_the_time_to_find_an_answer_grows_with_the_length_of_the_text() -> None:
    """If the time were quadratic, a text of four times the length would take 16 times the time."""
    sizes = (1 << 16, 1 << 18)
    hostile = [r"\boxed{" + unit * (size // len(unit)) for unit in HOSTILE_UNITS for size in sizes]
    cpu_s = [report[4] for report in compare([("7", text) for text in hostile])]
    for unit, short_s, long_s in zip(HOSTILE_UNITS, cpu_s[::2], cpu_s[1::2], strict=True):
        assert long_s < 8 * short_s + 0.05, (unit, short_s, long_s)


HUGE = (
    "9^{9^{9^{9}}}",
    r"\binom{10^9}{10^8}",
    "10^{1000000000}",
    "1000000!",
    "1e999999",
    "(" * 2000,
    "{" * 2000,
    "2^" * 2000 + "2",
    r"\sqrt{" * 600,
    "(x+1)^{100000}",
    "7" + "!" * 2000,
    r"\sin(10^{70000})",
    r"\sin(e^{e^{e^{e}}})",
    r"\lfloor e^{e^{e^{e}}} \rfloor",
    r"\sqrt{10^{6000}+1}",
    r"\binom{n}{10^9}",
    r"\binom{\pi}{200000}",
    "x" + "^{x" * 10 + "}" * 10,
    "2^{-" * 30 + r"\sqrt2" + "}" * 30,
    r"\ln(" * 38 + "x" + ")" * 38,
    "f(" * 38 + "x" + ")" * 38,
    r"{\pm " * 38 + "1" + "}" * 38,
    r"\{\pm 1 \cup " * 30 + "1" + r"\}" * 30,
    r"\{" + ",".join(rf"\sqrt{{{n}}}" for n in range(300)) + r"\}",
)


def test_huge_numbers_and_deep_brackets_are_compared_as_text() -> None:
    alone = compare([(text, text) for text in HUGE])
    assert {report[0] for report in alone} == {"equivalent"}
    different = compare([pair for text in HUGE for pair in (("7", text), (text, f"{text}+1"))])
    assert {report[0] for report in different} == {"not_equivalent"}


# The document


def test_each_row_of_the_documents_table_holds() -> None:
    lines = DOCUMENT.split("| kind | equal |")[1].split("\n\n")[0].splitlines()[2:]
    pairs, expected, library, by_library = [], [], [], []
    for line in lines:
        _, kind, equal, different, differs, _ = line.split("|")
        for cell, outcome in ((equal, "equivalent"), (different, "not_equivalent")):
            for pair in re.findall("`([^`]+)` `([^`]+)`", cell.replace("`` `73` ``", "")):
                pairs.append(pair)
                expected.append((kind.strip(), *pair, outcome))
        listed = different if "all" in differs else differs
        library += [pair for pair in re.findall("`([^`]+)` `([^`]+)`", listed) if "equal:" in differs]
    assert len(lines) > 20
    found = [(*row[:3], outcome) for row, outcome in zip(expected, outcomes(pairs), strict=True)]
    assert found == expected
    by_library = outcomes(library, strictness="math-verify")
    assert [pair for pair, outcome in zip(library, by_library, strict=True) if outcome != "equivalent"] == []


def test_the_example_of_the_document_has_the_outcomes_that_it_shows() -> None:
    request, response = re.findall(r"-d '(\{.*?\})'\n(\{.*?\]\})\n", DOCUMENT, re.DOTALL)[0]
    shown = json.loads(response.replace(",...}", "}"))["results"]
    reports = compare([(pair["gold"], pair["answer"]) for pair in json.loads(request)["pairs"]])
    assert [report[:2] for report in reports] == [(row["outcome"], row["message"]) for row in shown]
    assert [row["extracted"].get("answer") for row in shown] == [report[3] for report in reports]
    assert [row["extracted"]["gold"] for row in shown] == [report[2] for report in reports]
