"""Tests of answer checks, the calls that compare an answer with a right answer (gold).

They test the options and reports of the checks, and that no answer can forge its outcome.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.workloads.answer_pairs import labelled_pairs
from sandbox.errors import InvalidCall
from sandbox.guest.protocol import MAX_ANSWER_TEXT_CHARS
from sandbox.judging import answers as verify
from sandbox.types import Call, CallError, Limits, Outcome, Profile, Result, Status, Verdict, invalid_result
from tests.executor.calling import Caller, executor

MATH_500 = Path(__file__).parents[3] / "shared" / "data" / "math500.jsonl"
DEFAULT_FIELDS = verify.check_template({})
REPORT = '{"outcome": "equivalent"}'
EQUIVALENT, NOT_EQUIVALENT, UNPARSABLE = Outcome.EQUIVALENT, Outcome.NOT_EQUIVALENT, Outcome.UNPARSABLE


# Results of checks as verdicts


@pytest.mark.parametrize("outcome", [EQUIVALENT, NOT_EQUIVALENT, UNPARSABLE])
def test_the_value_of_a_finished_check_is_its_report(outcome: Outcome) -> None:
    report = {"outcome": outcome, "message": "why", "gold": "7", "answer": None}
    verdict = verify.verdict_of(Result("", Status.OK, value=json.dumps(report)))
    assert verdict == Verdict(outcome, message="why", extracted={"gold": "7"})


@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.MEMORY_LIMIT, Status.KILLED, Status.OUTPUT_LIMIT])
def test_a_check_that_exceeds_its_limits_is_unparsable(status: Status) -> None:
    result = Result("", status, value=REPORT, error=CallError("Timeout", "used up its 1 s"))
    assert verify.verdict_of(result) == Verdict(UNPARSABLE, status, "Timeout: used up its 1 s")


@pytest.mark.parametrize(
    "result",
    [
        Result("", Status.UNAVAILABLE, value=REPORT, error=CallError("NodeError", "tried 3 times")),
        Result("", Status.ERROR, value=REPORT, error=CallError("ModuleNotFoundError", "No module math_verify")),
        Result("", Status.OK, value="'equivalent'"),
        Result("", Status.OK, value='{"outcome": "unavailable"}'),
        Result("", Status.OK, value="[" * 100_000),
        Result("", Status.OK, stdout=REPORT),
        Result("", Status.OK),
    ],
)
def test_any_other_result_of_a_check_is_unavailable(result: Result) -> None:
    verdict = verify.verdict_of(result)
    assert (verdict.outcome, verdict.status) == (Outcome.UNAVAILABLE, Status.UNAVAILABLE)
    assert verdict.message


def test_a_malformed_pair_is_invalid() -> None:
    verdict = verify.verdict_of(invalid_result("", "pairs[0]: expected an object"))
    assert verdict == Verdict(Outcome.INVALID, Status.INVALID, "InvalidCall: pairs[0]: expected an object")


def test_a_check_is_a_call_with_both_answers_as_input() -> None:
    shared = verify.check_template({"limits": {"timeout_s": 2}, "tenant": "mine", "priority": 3})
    call = verify.build_check("1'\n", "\ud800" * (MAX_ANSWER_TEXT_CHARS + 2), shared)
    assert (call.profile, call.limits, call.tenant, call.priority) == (Profile.VERIFY, Limits(timeout_s=2), "mine", 3)
    header, _, texts = bytes(call.stdin).partition(b"\n")  # type: ignore[arg-type]
    assert json.loads(header) == {"strictness": "strict", "rounding": False, "gold_bytes": 3}
    assert texts.decode("utf-8", "surrogatepass") == "1'\n" + "\ud800" * (MAX_ANSWER_TEXT_CHARS + 1), "cut, too long"
    assert Call.decode(call.encode(binary=True)) == call
    assert verify.build_check("7", "8", DEFAULT_FIELDS).code == call.code


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (7, "pairs[3]: expected an object of gold and answer, got int"),
        ({"gold": "1"}, "pairs[3]: expected an object of gold and answer, got the fields gold"),
        ({"gold": "1", "answer": "2", "x": 3}, "pairs[3]: expected an object of gold and answer, got the fields"),
        ({"gold": "1", "answer": 2}, "pairs[3].answer: expected text of at most"),
    ],
)
def test_the_error_of_a_malformed_pair_names_the_expectation(raw: Any, message: str) -> None:
    with pytest.raises(InvalidCall) as raised:
        verify.decode_pair(raw, "pairs[3]")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strictness": "lax"}, "verify.strictness: expected one of strict, math-verify, got 'lax'"),
        ({"strictness": ["strict"]}, "verify.strictness: expected one of strict, math-verify, got"),
        ({"rounding": "yes"}, "verify.rounding: expected true or false, got 'yes'"),
        (
            {"strictness": "math-verify", "rounding": True},
            "verify.rounding: expected false with strictness=math-verify",
        ),
    ],
)
def test_the_error_of_a_malformed_option_names_the_expectation(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCall) as raised:
        verify.check_template(fields)
    assert str(raised.value).startswith(message)


def test_a_request_cannot_set_the_code_of_its_checks() -> None:
    with pytest.raises(InvalidCall, match="unknown field 'code'; the fields are limits, priority, tenant"):
        verify.check_template({"code": "1"})


# Answer checks in the sandbox


@pytest.fixture(scope="module")
def caller(guest_python: Path) -> Iterator[Caller]:
    with executor(guest_python, profiles=("bare", "numeric", "symbolic")) as caller:
        yield caller


def check(caller: Caller, pairs: Sequence[tuple[str, str]], **fields: Any) -> list[Verdict]:
    shared = verify.check_template(fields)
    return [
        verify.verdict_of(result) for result in caller.run_all([verify.build_check(*pair, shared) for pair in pairs])
    ]


def test_the_verify_zygote_is_spawned_on_first_use(guest_python: Path) -> None:
    with executor(guest_python) as caller:
        caller.run("1")
        caller.until(lambda: bool(caller.stats.get("zygotes")))
        assert caller.stats["zygotes"] == {"bare": 1}
        assert [verdict.outcome for verdict in check(caller, [("1", "1")])] == [EQUIVALENT]
        caller.until(lambda: len(caller.stats["zygotes"]) > 1)
        assert caller.stats["zygotes"] == {"bare": 1, "verify": 1}


def test_math_verify_without_alarms_logs_no_warning(guest_python: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import answer_check; "
        "print(answer_check.compare('1', '1', 'math-verify').outcome)"
    )
    argv = [guest_python, "-I", "-c", code, str(Path(verify.__file__).parents[1] / "guest")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("equivalent\n", "")


def test_the_service_finds_what_the_labelled_pairs_say(caller: Caller) -> None:
    """`test_answer_pairs.py` checks all labelled pairs without a server. This test checks some pairs of each kind
    through the service."""
    pairs = [*labelled_pairs()[::9], *(pair for pair in labelled_pairs() if pair.kind.startswith("polynomials"))]
    verdicts = check(caller, [(pair.gold, pair.answer) for pair in pairs])
    assert {verdict.status for verdict in verdicts} == {Status.OK}
    found = [(pair, verdict.outcome is EQUIVALENT) for pair, verdict in zip(pairs, verdicts, strict=True)]
    wrong = [pair for pair, is_equivalent in found if is_equivalent != pair.are_equivalent]
    assert all(pair.are_equivalent for pair in wrong), wrong
    assert len(wrong) <= 1, wrong
    assert all(verdict.usage.cpu_ms > 0 for verdict in verdicts)


def test_a_whole_completion_is_an_answer_and_the_verdict_shows_what_was_compared(caller: Caller) -> None:
    completion = "We compute {x} and more. " * 41_000 + r"So it is $\boxed{12}$."
    verdict, wrong = check(caller, [("12", completion), ("13", completion)])
    assert (verdict.outcome, verdict.extracted) == (EQUIVALENT, {"gold": "12", "answer": "12"})
    assert wrong.outcome is NOT_EQUIVALENT


def test_strictness_and_rounding_reach_the_comparison(caller: Caller) -> None:
    pairs = [(r"\sqrt{2}", "1.41421356"), ("12", "5 7")]
    outcomes = [
        [verdict.outcome for verdict in check(caller, pairs, **options)]
        for options in ({}, {"rounding": True}, {"strictness": "math-verify"})
    ]
    assert outcomes == [[NOT_EQUIVALENT] * 2, [EQUIVALENT, NOT_EQUIVALENT], [EQUIVALENT] * 2]


@pytest.mark.parametrize("text", ["", " \n", "7" * 4097, r"\boxed{}", " " * (MAX_ANSWER_TEXT_CHARS + 1)])
def test_a_text_without_an_answer_is_unparsable_on_either_side(text: str, caller: Caller) -> None:
    as_gold, as_answer = check(caller, [(text, "7"), ("7", text)])
    assert (as_gold.outcome, as_gold.status) == (as_answer.outcome, as_answer.status) == (UNPARSABLE, Status.OK)
    assert re.match("gold has (no text|more than)", as_gold.message)
    assert re.match("answer has (no text|more than)", as_answer.message)


EXIT = "__import__('os')._exit(0)"
FORGERIES = (
    "equivalent",
    "'equivalent'",
    "__import__('builtins').print('equivalent')",
    EXIT,
    rf"\text{{{EXIT}}}",
    rf"\operatorname{{{EXIT}}}(1)",
    r"\operatorname{exit}(0)",
    r"\operatorname{eval}(1)",
    r"\mathrm{print(1)}",
    f"${EXIT}$",
    f"7}} {EXIT} {{7",
    f"3 + {EXIT}",
    f"1e5{EXIT}",
    r"x_{().__class__}",
    r"\sqrt{().__class__.__base__.__subclasses__()}",
    "[x for x in ().__class__.__mro__]",
    "lambda: 7",
    "\0",
    "\ud800\udfff",
    "٧",
    r"\frac{0}{0}",
    r"\infty",
    r"\{",
    r"\boxed{",
    "}" * 100,
    "$" * 4000,
    r"\frac" * 800,
    "\n" * 4000 + "x",
    "%s%n{0}",
)


def test_no_answer_text_forges_a_verdict(caller: Caller) -> None:
    """The outcome of each text is "not equivalent" or "unparsable". No text makes the service fail."""
    pairs = [("8", text) for text in FORGERIES]
    verdicts = [*check(caller, pairs), *check(caller, pairs, strictness="math-verify")]
    for text, verdict in zip(FORGERIES * 2, verdicts, strict=True):
        assert verdict.outcome in (NOT_EQUIVALENT, UNPARSABLE), (text, verdict)


def test_sympy_evaluates_only_numbers_in_an_answer_check(caller: Caller) -> None:
    """Every text that reaches `sympify` must consist of numbers, whichever function passes the text on."""
    script = "import rstar_answer_check, sympy\nrstar_answer_check.refuse_code()\nlist(map(sympy.sympify, {}))"
    good = caller.run(script.format(["1 + 2*3", "-0.5", "1e10", "10/4"]), profile=Profile.VERIFY)
    assert good.value == "[7, -0.500000000000000, 10000000000.0000, 5/2]"
    for text in ("print(1)", "x.y", "[].append", "Integer.__class__", "'a'.upper()", EXIT):
        bad = caller.run(script.format([text]), profile=Profile.VERIFY)
        assert bad.status is Status.ERROR, text
        assert bad.error is not None and "expected numbers and arithmetic only" in bad.error.traceback


ENDLESS_ANSWERS = (
    "9^{9^{9^{9}}} + x",
    r"\binom{10^9}{10^8}",
    r"\operatorname{eye}(100000)",
    "{" * 2000,
    "(" * 999 + ")" * 999,
)


def test_an_endless_check_affects_only_its_own_pair(caller: Caller) -> None:
    pairs = [*[("7", text) for text in ENDLESS_ANSWERS], ("7", "7")]
    *hung, last = check(caller, pairs, limits={"timeout_s": 0.5}, strictness="math-verify")
    for verdict in hung:
        assert verdict.outcome in (UNPARSABLE, NOT_EQUIVALENT), verdict
        assert verdict.status in (Status.OK, Status.TIMEOUT, Status.MEMORY_LIMIT, Status.KILLED), verdict
    assert Status.TIMEOUT in {verdict.status for verdict in hung}
    assert last.outcome is EQUIVALENT


def test_a_python_without_math_verify_makes_checks_unavailable() -> None:
    with executor() as caller:
        (verdict,) = check(caller, [("7", "7")])
    assert verdict.outcome is Outcome.UNAVAILABLE
    assert "math_verify" in verdict.message


# Comparison with math-verify


def perturbed(answer: str, number: int) -> str:
    """Return the answer with one changed digit, which `number` selects. An answer without a digit gets another sign."""
    digits = [match.start() for match in re.finditer("[0-9]", answer)]
    if not digits:
        return f"-({answer})"
    index = digits[number % len(digits)]
    return f"{answer[:index]}{(int(answer[index]) + 1) % 10}{answer[index + 1 :]}"


class MathVerify:
    """Calls math-verify in this process."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.parse = cache(lambda text: library.parse(f"\\boxed{{{text}}}", parsing_timeout=None))

    def check(self, gold: str, answer: str) -> Outcome:
        is_equivalent = self.library.verify(self.parse(gold), self.parse(answer), timeout_seconds=None)
        return EQUIVALENT if is_equivalent else NOT_EQUIVALENT


@pytest.mark.slow
def test_outcomes_equal_those_of_math_verify_called_directly(caller: Caller) -> None:
    math_verify = MathVerify(pytest.importorskip("math_verify"))
    if not MATH_500.exists():
        pytest.skip(f"needs the answers of MATH-500 at {MATH_500}")
    answers = [json.loads(line)["answer"] for line in MATH_500.read_text(encoding="utf-8").splitlines()]
    pairs = [pair for n, gold in enumerate(answers) for pair in ((gold, gold), (gold, perturbed(gold, n)))]
    verdicts = check(caller, pairs, strictness="math-verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [math_verify.check(*pair) for pair in pairs]
    assert [verdict.outcome for verdict in verdicts] == expected
    assert set(expected[::2]) == {EQUIVALENT}  # the pairs of equal answers
    assert expected[1::2].count(NOT_EQUIVALENT) > 490  # of 500 changed answers; a few still mean the same
