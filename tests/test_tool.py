"""Tests of the texts that a model reads: results, and errors about malformed arguments."""

from __future__ import annotations

import pytest

from sandbox.errors import InvalidCall, ServiceError
from sandbox.tool import TOOL_NAMES, TOOL_SCHEMA, parse_arguments, render, tool_schema
from sandbox.types import CallError, Result, Status, UnavailableReason, invalid_result, unavailable_result

TRACEBACK = 'Traceback (most recent call last):\n  File "main.py", line 1\nZeroDivisionError: division by zero\n'


def test_stdout_is_the_response() -> None:
    assert render(Result("", Status.OK, stdout="4\n", value="5")) == "4"


def test_without_stdout_the_last_value_is_shown() -> None:
    assert render(Result("", Status.OK, value="[1, 2]")) == "[1, 2]"


def test_a_call_without_output_is_rendered_as_no_output() -> None:
    assert render(Result("", Status.OK)) == "(no output)"


def test_an_error_shows_its_traceback_after_what_was_printed() -> None:
    error = CallError("ZeroDivisionError", "division by zero", TRACEBACK, 1)
    text = render(Result("", Status.ERROR, stdout="before\n", error=error))
    assert text == "before\n" + TRACEBACK.rstrip()


def test_an_error_without_traceback_shows_type_and_message() -> None:
    text = render(Result("", Status.ERROR, error=CallError("SyntaxError", "invalid syntax")))
    assert text == "SyntaxError: invalid syntax"


def test_an_exit_code_is_an_error() -> None:
    assert render(Result("", Status.ERROR, stderr="usage\n", exit_code=3)) == "usage\nSystemExit: 3"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Result("", Status.TIMEOUT), "TimeoutError: the code was stopped because it ran longer than its time limit"),
        (Result("", Status.MEMORY_LIMIT), "MemoryError: the code ran out of the memory"),
        (Result("", Status.OUTPUT_LIMIT), "OutputLimitError: the code was stopped because it printed too much"),
        (Result("", Status.KILLED, signal=11), "The interpreter crashed: SIGSEGV"),
    ],
)
def test_limits_and_crashes_are_rendered(result: Result, expected: str) -> None:
    assert render(result).startswith(expected)


def test_every_status_except_unavailable_and_invalid_is_rendered() -> None:
    for status in Status:
        if status not in (Status.UNAVAILABLE, Status.INVALID):
            assert render(Result("", status))


def test_a_failure_of_the_service_is_never_rendered() -> None:
    with pytest.raises(ServiceError, match="QueueTimeout: waited"):
        render(unavailable_result("", UnavailableReason.QUEUE_TIMEOUT, "waited"))
    with pytest.raises(ServiceError, match=r"the caller sent a malformed call: InvalidCall: call\.code"):
        render(invalid_result("", "call.code: expected text"))


def test_long_output_keeps_both_ends_and_the_number_of_missing_characters() -> None:
    text = render(Result("", Status.OK, stdout="a" * 1000 + "b" * 1000), max_chars=100)
    assert text == "a" * 50 + "\n... 1900 characters cut ...\n" + "b" * 50


def test_truncated_output_is_marked() -> None:
    text = render(Result("", Status.OK, stdout="aaa", truncated=("stdout",)))
    assert text == "aaa\n... the rest of the output was cut"


def test_arguments_become_a_call() -> None:
    call = parse_arguments('{"code": "print(input())", "input": "hi"}')
    assert (call.code, call.stdin) == ("print(input())", "hi")
    assert parse_arguments({"code": "1", "input": None}).stdin == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"code": "1"', "JSONDecodeError: Expecting ',' delimiter: line 1 column 13"),
        ("[" * 100_000, "RecursionError"),
        ("9" * 5000, "ValueError"),  # more digits than Python converts
        ("[]", "must be a JSON object"),
        ("{}", "missing argument 'code'"),
        ('{"code": 1}', "argument 'code' must be a string, not int"),
        ('{"code": "", "input": []}', "argument 'input' must be a string, not list"),
        ('{"code": "", "language": "c"}', "unexpected argument 'language'"),
    ],
)
def test_malformed_arguments_raise_the_text_of_the_response(arguments: str, expected: str) -> None:
    with pytest.raises(InvalidCall) as error:
        parse_arguments(arguments)
    assert expected in str(error.value)


def test_the_schema_has_the_arguments_that_parse_accepts() -> None:
    assert TOOL_SCHEMA["function"]["name"] == TOOL_NAMES[0] == "execute_python_code_with_standard_io"
    assert set(TOOL_SCHEMA["function"]["parameters"]["properties"]) == {"code", "input"}
    assert tool_schema(TOOL_NAMES[1])["function"]["name"] == "python_code_with_standard_io"
