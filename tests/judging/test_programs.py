"""Tests of judged programs as data: what is accepted, which calls a program becomes, and what its results mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox.errors import InvalidCall
from sandbox.judging import programs as judge
from sandbox.judging.comparison import TextComparison, Tolerance
from sandbox.judging.programs import JudgedProgram, JudgedTest, JudgeOutcome, Program, ProgramTest
from sandbox.types import (
    MAX_CODE_CHARS,
    Call,
    CallError,
    EncodedResult,
    Profile,
    Result,
    Status,
    UnavailableReason,
    Usage,
    call_size,
    unavailable_result,
)

STDIN_TEST = {"stdin": "1 2", "expected": "3"}
FUNCTION_TEST = {"call": "solve", "args": [1, 2], "expected": 3}


def encoded(status: Status = Status.OK, **fields: Any) -> EncodedResult:
    return Result("", status, **fields).encode(binary=True)


def program(**fields: Any) -> Program:
    return Program.decode({"code": "print(3)", "tests": [STDIN_TEST], **fields})


# What is accepted


def test_fields_of_a_program_come_from_the_defaults() -> None:
    shared = {"tests": [STDIN_TEST], "limits": {"timeout_s": 2, "memory_mb": 64}, "tenant": "mine", "compare": "tokens"}
    defaults = Program.decode_defaults(shared)
    decoded = Program.decode({"code": "1", "id": "a", "limits": {"timeout_s": 3}}, defaults)
    assert decoded.tests is defaults.tests
    assert decoded.comparison is TextComparison.TOKENS
    assert (decoded.call["code"], decoded.id, decoded.tenant) == ("1", "a", "mine")
    assert decoded.call["limits"] == {"timeout_s": 3, "memory_mb": 64}
    assert not decoded.call["echo"]


def test_a_program_replaces_the_comparison_of_the_defaults() -> None:
    with_checker = Program.decode_defaults({"tests": [STDIN_TEST], "checker": "1"})
    assert Program.decode({"code": "", "compare": "exact"}, with_checker).checker == ""
    with_tolerance = Program.decode_defaults({"tests": [{"stdin": ""}], "compare": {"abs": 1, "rel": 0.5}})
    assert with_tolerance.comparison == Tolerance(abs=1, rel=0.5)
    assert Program.decode({"code": "", "checker": "1"}, with_tolerance).checker == "1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tests": []}, "program.tests: expected a list of at least one test, got an empty list"),
        ({"tests": 1}, "program.tests: expected a list of at least one test, got 1"),
        ({"tests": [{"stdin": ""}]}, "program.tests[0].expected: expected a value, or a checker"),
        ({"tests": [{**STDIN_TEST, "call": "f"}]}, "program.tests[0]: expected stdin or call, got both"),
        ({"tests": [STDIN_TEST, {"args": []}]}, "program.tests[1].args: expected call, the name of the function"),
        ({"tests": [{**STDIN_TEST, "expected": 3}]}, "program.tests[0].expected: expected text, got 3"),
        ({"tests": [{**STDIN_TEST, "input": ""}]}, "program.tests[0]: unknown field 'input'"),
        ({"tests": [{**FUNCTION_TEST, "args": {}}]}, "program.tests[0].args: expected a list, got dict of 0"),
        ({"tests": [{**FUNCTION_TEST, "args": [b"x"]}]}, "program.tests[0].args: expected JSON values"),
        ({"tests": [{**FUNCTION_TEST, "expected": {"x": b""}}]}, "program.tests[0].expected: expected JSON values"),
        *(
            ({"tests": [{**FUNCTION_TEST, "call": name}]}, "program.tests[0].call: expected the name of a function")
            for name in ("", "a.b.c", "f()", "1f", "a.", 7)
        ),
        ({"compare": "fuzzy"}, "program.compare: expected exact, lines, tokens, or an object such as"),
        ({"compare": {}}, "program.compare: expected abs, rel or both, got an empty object"),
        ({"compare": {"abs": -1}}, "program.compare.abs: expected a number from 0"),
        ({"compare": {"abs": float("nan")}}, "program.compare.abs: expected a number from 0"),
        ({"compare": {"ulp": 1}}, "program.compare: unknown field 'ulp'"),
        ({"compare": "exact", "checker": "1"}, "program: expected compare or checker, got both"),
        ({"checker": ""}, "program.checker: expected Python source, got an empty text"),
        ({"stop_at_first_failure": 1}, "program.stop_at_first_failure: expected true or false"),
        ({"limits": {"timeout_s": "x"}}, "program.limits.timeout_s: expected a number"),
        ({"stdin": ""}, "program: unknown field 'stdin'"),
        ({"code": None}, "program.code: expected text, got None"),
    ],
)
def test_the_error_of_a_malformed_program_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCall) as raised:
        program(**fields)
    assert str(raised.value).startswith(message)


def test_defaults_have_no_code_and_no_id() -> None:
    for name in ("code", "id"):
        with pytest.raises(InvalidCall, match=f"defaults.{name}: belongs to a single program"):
            Program.decode_defaults({name: "x"})
    assert Program.decode_defaults(None) == Program.decode_defaults({})


def test_arguments_nested_too_deeply_are_refused() -> None:
    args: list[Any] = []
    for _ in range(100_000):
        args = [args]
    with pytest.raises(InvalidCall, match="expected JSON values"):
        program(tests=[{"call": "f", "args": args, "expected": 1}])
    while args:
        args = args.pop()


# The calls of a program


def test_no_call_of_a_program_has_an_expected_output() -> None:
    tests = [{"stdin": "1", "expected": "canary"}, {"call": "solve", "args": ["x"], "expected": ["canary"]}]
    calls = program(tests=tests, profile="numeric", limits={"timeout_s": 3}).calls()
    for call in (*calls, judge.compile_call(calls[0])):
        assert "canary" not in repr(call)
        assert (call["profile"], call["limits"]) == (Profile.NUMERIC, {"timeout_s": 3})


def test_a_stdin_test_is_a_call_without_echo() -> None:
    (call,) = program().calls()
    assert call == {"code": "print(3)", "stdin": "1 2", "echo": False}


def test_function_tests_share_their_code_whose_lines_keep_their_numbers() -> None:
    first, second = program(tests=[FUNCTION_TEST, {**FUNCTION_TEST, "args": [[5], {"a": 1}]}]).calls()
    assert first["code"] is second["code"]
    assert first["code"].startswith("print(3)\n")
    assert first["echo"]
    assert json.loads(second["files"][judge.FUNCTION_CALL_FILE]) == {"call": "solve", "args": [[5], {"a": 1}]}


def test_compiled_code_is_an_internal_field() -> None:
    assert call_size({"code": "1", "compiled": b"blob"}) == call_size({"code": "1"}) + 4
    for name in ("compiled", "compile_only"):
        with pytest.raises(InvalidCall, match=f"unknown field '{name}'"):
            Call.decode({"code": "1", name: b""})


@pytest.mark.parametrize(
    ("result", "compiled"),
    [
        (encoded(files={"compiled": b"blob"}), b"blob"),
        (encoded(Status.ERROR, files={"compiled": b"blob"}), b""),
        (encoded(files={"compiled": b"blob"}, stderr="main.py:1: SyntaxWarning: each call must print it"), b""),
        (encoded(files={"compiled": bytes(judge.MAX_COMPILED_BYTES + 1)}), b""),
        (encoded(), b""),
    ],
)
def test_compiled_code_is_used_only_if_all_calls_would_behave_the_same(result: EncodedResult, compiled: bytes) -> None:
    assert judge.compiled_code(result) == compiled


def test_a_checker_gets_three_files_and_the_default_limits() -> None:
    judged = program(tests=[STDIN_TEST, {"stdin": "x"}, FUNCTION_TEST], checker="check", limits={"timeout_s": 1})
    result = encoded(stdout="out\ud800", value="[3]")
    checks = [judged.checker_call(test, result) for test in judged.tests]
    assert checks[0]["files"] == {"input": b"1 2", "expected": b"3", "actual": b"out\xed\xa0\x80"}
    assert checks[1]["files"] == {"input": b"x", "actual": b"out\xed\xa0\x80"}
    assert checks[2]["files"]["actual"] == b"[3]"
    assert json.loads(checks[2]["files"]["input"]) == {"call": "solve", "args": [1, 2]}
    assert all(check["code"] == "check" and "limits" not in check for check in checks)


# What results mean

ANSWERS_STDIN = ProgramTest("1", "", "2")
ANSWERS_FUNCTION = ProgramTest("", "{}", "2")


@pytest.mark.parametrize("status", [s for s in Status if s not in (Status.OK, Status.UNAVAILABLE, Status.INVALID)])
def test_code_that_fails_is_failed(status: Status) -> None:
    judged = judge.unanswered_test(ANSWERS_STDIN, encoded(status, stdout="2", error=CallError("E", "why")))
    assert judged is not None
    assert (judged.outcome, judged.status, judged.message) == (JudgeOutcome.FAILED, status, "E: why")


def test_a_failure_of_the_service_is_unavailable() -> None:
    result = unavailable_result("", UnavailableReason.NODE_ERROR, "failed 3 times").encode(binary=True)
    judged = judge.unanswered_test(ANSWERS_STDIN, result)
    assert judged is not None
    assert (judged.outcome, judged.message) == (JudgeOutcome.UNAVAILABLE, "NodeError: failed 3 times")
    assert (judged.reason, judged.encode()["reason"]) == (UnavailableReason.NODE_ERROR, "NodeError")


def test_only_a_test_that_is_unavailable_has_a_reason() -> None:
    failed = judge.unanswered_test(ANSWERS_STDIN, encoded(Status.ERROR, error=CallError("Poison", "the code's own")))
    assert failed is not None
    assert failed.reason is None
    assert "reason" not in failed.encode()
    assert judge.reason_of(encoded()) is None


def test_a_function_test_needs_a_whole_value() -> None:
    assert judge.unanswered_test(ANSWERS_STDIN, encoded()) is None
    assert judge.unanswered_test(ANSWERS_FUNCTION, encoded(value="2")) is None
    for result in (encoded(), encoded(value="[2", truncated=("value",))):
        judged = judge.unanswered_test(ANSWERS_FUNCTION, result)
        assert judged is not None
        assert judged.outcome is JudgeOutcome.FAILED
        assert judged.message


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (encoded(stdout=" close \n"), JudgeOutcome.PASSED),
        (encoded(Status.ERROR, exit_code=1, error=CallError("SystemExit", "1")), JudgeOutcome.WRONG_ANSWER),
        (encoded(Status.ERROR, exit_code=1, error=CallError("ZeroDivisionError", "x")), JudgeOutcome.UNJUDGED),
        (encoded(Status.ERROR, exit_code=2, error=CallError("SystemExit", "2")), JudgeOutcome.UNJUDGED),
        (encoded(Status.TIMEOUT, error=CallError("Timeout", "10 s")), JudgeOutcome.UNJUDGED),
        (encoded(Status.MEMORY_LIMIT), JudgeOutcome.UNJUDGED),
        (encoded(Status.OUTPUT_LIMIT), JudgeOutcome.UNJUDGED),
        (encoded(Status.KILLED), JudgeOutcome.UNJUDGED),
        (unavailable_result("", UnavailableReason.STOPPED, "x").encode(binary=True), JudgeOutcome.UNAVAILABLE),
    ],
)
def test_the_end_of_the_checker_decides(result: EncodedResult, outcome: JudgeOutcome) -> None:
    decided, message = judge.checker_outcome(result)
    assert decided is outcome
    assert message == "close" if outcome is JudgeOutcome.PASSED else outcome is JudgeOutcome.WRONG_ANSWER or message


PASSED, WRONG, FAILED, UNJUDGED, SKIPPED, UNAVAILABLE, _INVALID = JudgeOutcome


@pytest.mark.parametrize(
    ("outcomes", "summary", "is_scorable"),
    [
        ((PASSED, PASSED), PASSED, True),
        ((PASSED, WRONG, FAILED), WRONG, True),
        ((FAILED, WRONG, SKIPPED), FAILED, True),
        ((WRONG, UNJUDGED), UNJUDGED, False),
        ((UNJUDGED, UNAVAILABLE, WRONG), UNAVAILABLE, False),
    ],
)
def test_the_outcome_of_a_program_summarises_its_tests(
    outcomes: tuple[JudgeOutcome, ...], summary: JudgeOutcome, is_scorable: bool
) -> None:
    judged = JudgedProgram.of("p", tuple(map(JudgedTest, outcomes)), {})
    assert (judged.outcome, judged.is_scorable) == (summary, is_scorable)
    assert (judged.passed, judged.total) == (outcomes.count(PASSED), len(outcomes))


def test_results_are_the_same_after_encoding_and_decoding() -> None:
    test = JudgedTest(WRONG, Status.OK, "message", "out", "err", "[1]", Usage(1, 2, 3, 4))
    tests = (test, JudgedTest(SKIPPED), JudgedTest(UNAVAILABLE, reason=UnavailableReason.STOPPED))
    judged = JudgedProgram("p", WRONG, 1, 3, False, "why", tests, {"timeout_s": 300.0})
    assert JudgedProgram.decode(json.loads(json.dumps(judged.encode()))) == judged
    assert JudgedProgram.decode({**judged.encode(), "later": 1}) == judged


def test_a_result_has_excerpts_of_bounded_length() -> None:
    long = "head" + "x" * 100_000 + "tail"
    judged = JudgedTest.of(WRONG, encoded(stdout=long, stderr=long, value=long), long)
    assert judged.stdout.startswith("head")
    assert judged.stderr.endswith("tail")
    assert judged.value is not None
    assert max(map(len, (judged.stdout, judged.stderr, judged.value, judged.message))) == judge.EXCERPT_CHARS


def test_code_that_is_too_long_with_its_function_call_is_malformed() -> None:
    code = "#" * (MAX_CODE_CHARS - 10)
    with pytest.raises(
        InvalidCall, match=r"program\.code: expected at most \d+ characters, since a test calls a function"
    ):
        Program.decode({"code": code, "tests": [{"call": "f", "expected": 1}]})
    assert len(Program.decode({"code": code, "tests": [{"expected": "1"}]}).calls()) == 1
