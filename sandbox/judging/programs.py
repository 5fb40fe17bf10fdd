"""Judged programs: a program with its tests becomes calls, and the results of these calls become outcomes of its tests.

- No call of the program contains the expected output of a test. The output is compared outside of the sandbox
  (`sandbox.judging.comparison`), or by a checker in a call of its own.
- A test gives the program standard input, or calls one of its functions. The arguments are JSON in a file, and the
  result is JSON in `Result.value` (`guest/function_call.py`). Neither is evaluated as Python source.
- A failure of the service is `unavailable`, and a failure of the checker is `unjudged`. Neither says anything about the
  program: `JudgedProgram.is_scorable` is then false.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

from sandbox import dataclass_codec
from sandbox.errors import InvalidCall
from sandbox.fields import NumberRule, check_flag, check_mapping, check_names, check_number, check_text, shown
from sandbox.guest.protocol import COMPILED_FILE, FUNCTION_CALL_FILE, FUNCTION_CALL_LINE, PRELUDE_LINE
from sandbox.judging.comparison import Comparison, TextComparison, Tolerance
from sandbox.types import (
    CALL_FIELDS,
    LIMIT_FIELDS,
    MAX_CODE_CHARS,
    MAX_STDIN_CHARS,
    DocumentedEnum,
    EncodedCall,
    EncodedResult,
    Status,
    UnavailableReason,
    Usage,
    call_size,
    check_call,
    memory_bytes,
    unavailable_reason,
    with_defaults,
)

MAX_EXPECTED_VALUES = 500_000
"""Maximum number of JSON values in the expected value of a function test, counted as `[`, `{` and `,`. The server's own
process compares values, and needs 0.1 s to decode a million."""
EXCERPT_CHARS = 1000
"""Maximum characters of stdout, of stderr and of value in the result of a test."""
MAX_MESSAGE_CHARS = 500
TOLERANCE = NumberRule(0, 1e300, whole=False)
"""Rule for `abs` and `rel`. It has a maximum because with infinity all numbers would be equal."""
MAX_COMPILED_BYTES = 128 << 10
"""Maximum bytes of compiled code that is sent with each call. A call whose body exceeds 256 KiB costs its zygote more
(`guest/wiped_memory.py`) than it saves. Half of the 256 KiB is for the compiled code, the other half for the source and
the input."""
INPUT_FILE = "input"
"""File in the working directory of a checker: the input of the program."""
EXPECTED_FILE = "expected"
"""File in the working directory of a checker: the expected output, if the test has one."""
ACTUAL_FILE = "actual"
"""File in the working directory of a checker: the output of the program."""
_FUNCTION_CALL = "\n" + FUNCTION_CALL_LINE
PRELUDES = ("", "leetcode")
TEXT_OUTPUT_FACTOR = 2
"""The output limit of a test is at least this many times the length of the expected output. A right output may have
more white space."""
FREE_OUTPUT_FACTOR = 8
"""The same factor for a test with a tolerance or a checker. With a tolerance, a right output may have more digits
(0.30000000000000004 for 0.3). With a checker, it may be another, longer answer."""
_CALL_FIELDS = ("code", "limits", "profile", "priority", "tenant", "id")
"""Fields of a program that are also fields of `Call`, with the same rules."""

PROGRAM_FIELDS: dict[str, str] = {
    "code": "Python source of the program",
    "tests": "the tests; their results are in the same order",
    "compare": "how an output is compared with the expected output: exact, lines, tokens, or a tolerance for numbers",
    "checker": "Python source of a program that compares, instead of compare. Its working directory has the files "
    "input, expected and actual. Exit code 0: passed; 1: wrong answer; anything else: unjudged. Its stdout is the "
    "message of the test",
    "prelude": "`leetcode`: the program finds the names of typing, collections, heapq, math and others without "
    "imports, as on LeetCode",
    "stop_at_first_failure": "whether to skip the tests after the first one that the program fails",
    **{name: CALL_FIELDS[name] for name in ("limits", "profile", "priority", "tenant")},
    "id": "your name for the program, returned with its result",
}
TEST_FIELDS: dict[str, str] = {
    "stdin": "text on standard input; the expected output is compared with stdout",
    "call": "function to call after the program has run, instead of stdin: `solve`, or `Solution.method` for a method "
    "of a new instance of a class",
    "args": "arguments of the function",
    "expected": "the expected output: text, or with call any JSON value. Required, except with a checker",
}


class JudgeOutcome(DocumentedEnum):
    """How a program did in a test. `unjudged`, `unavailable` and `invalid` must not be scored as 0."""

    PASSED = "passed", "The output is as expected."
    WRONG_ANSWER = "wrong_answer", "The program ended, and its output is not as expected."
    FAILED = "failed", "The program raised an exception, exceeded a limit, or returned nothing (see `status`)."
    UNJUDGED = "unjudged", "The checker crashed, exceeded a limit, or ended with an exit code other than 0 and 1."
    SKIPPED = "skipped", "An earlier test failed, and `stop_at_first_failure` is set."
    UNAVAILABLE = "unavailable", "The service failed to run the program or the checker."
    INVALID = "invalid", "The program or one of its tests is malformed and nothing ran. `message` names the field."


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """One test: the input of the program (standard input, or a function with its arguments) and the expected output.

    `function_call` is JSON text with the function's name and arguments; it is empty if the test has standard input.
    `expected` is text; for a function it is JSON text. It is None if only the checker knows the right answer. JSON
    stays text, because to free millions of values would block the server.
    """

    stdin: str = ""
    function_call: str = ""
    expected: str | None = None

    @classmethod
    def decode(cls, raw: Any, where: str) -> ProgramTest:
        """Check a decoded mapping. Raises `InvalidCall`."""
        mapping = check_mapping(raw, where)
        check_names(mapping, TEST_FIELDS, where)
        expected: str | None = None
        if "call" not in mapping:
            if "args" in mapping:
                raise InvalidCall(f"{where}.args: expected call, the name of the function, beside args")
            if "expected" in mapping:
                expected = check_text(mapping["expected"], f"{where}.expected", MAX_STDIN_CHARS)
            return cls(check_text(mapping.get("stdin", ""), f"{where}.stdin", MAX_STDIN_CHARS), "", expected)
        if "stdin" in mapping:
            raise InvalidCall(f"{where}: expected stdin or call, got both; use one test for each")
        request = {"call": _function_name(mapping["call"], f"{where}.call"), "args": mapping.get("args", [])}
        if not isinstance(request["args"], (list, tuple)):
            raise InvalidCall(f"{where}.args: expected a list, got {shown(request['args'])}")
        if "expected" in mapping:
            expected = _to_json(mapping["expected"], f"{where}.expected")
            if not isinstance(mapping["expected"], str) and count_values(expected) > MAX_EXPECTED_VALUES:
                raise InvalidCall(f"{where}.expected: expected at most {MAX_EXPECTED_VALUES} values, got more")
        return cls("", _to_json(request, f"{where}.args"), expected)

    @property
    def expected_bytes(self) -> int:
        """Bytes of the expected output."""
        expected = self.expected or ""
        return len(expected) if expected.isascii() else len(expected.encode("utf-8", "surrogatepass"))

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return sum(map(memory_bytes, (self.stdin, self.function_call, self.expected or "")))


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its tests. `call` holds its code and the fields of a call that all tests share."""

    call: EncodedCall
    tests: tuple[ProgramTest, ...] = ()
    comparison: Comparison = TextComparison.LINES
    checker: str = ""
    stop_at_first_failure: bool = False
    prelude: str = ""

    @classmethod
    def decode(cls, raw: Any, defaults: Program | None = None, where: str = "program") -> Program:
        """Build a program from a decoded mapping. Missing fields come from `defaults`. Raises `InvalidCall`."""
        mapping = check_mapping(raw, where)
        check_names(mapping, PROGRAM_FIELDS, where)
        program = cls._decode_fields(mapping, defaults or _DEFAULT_PROGRAM, where)
        if not program.tests:
            raise InvalidCall(f"{where}.tests: expected a list of at least one test, but the field is missing")
        if not program.checker:
            for index, test in enumerate(program.tests):
                if test.expected is None:
                    raise InvalidCall(f"{where}.tests[{index}].expected: expected a value, or a checker")
        return program

    @classmethod
    def decode_defaults(cls, raw: Any, where: str = "defaults") -> Program:
        """Build the `defaults` of a request: all fields except `code` and `id`. Raises `InvalidCall`."""
        mapping = check_mapping({} if raw is None else raw, where)
        for name in ("code", "id"):
            if name in mapping:
                raise InvalidCall(f"{where}.{name}: belongs to a single program; move it into programs[]")
        check_names(mapping, PROGRAM_FIELDS, where)
        return cls._decode_fields({**mapping, "code": ""}, _DEFAULT_PROGRAM, where)

    @classmethod
    def _decode_fields(cls, mapping: Mapping[str, Any], base: Program, where: str) -> Program:
        call_fields = {name: mapping[name] for name in _CALL_FIELDS if name in mapping}
        call = with_defaults(check_call(call_fields, where), base.call)
        tests, comparison, checker = base.tests, base.comparison, base.checker
        if "tests" in mapping:
            tests = _decode_tests(mapping["tests"], f"{where}.tests")
        if "compare" in mapping and "checker" in mapping:
            raise InvalidCall(f"{where}: expected compare or checker, got both; send one")
        if "compare" in mapping:
            comparison, checker = _decode_comparison(mapping["compare"], f"{where}.compare"), ""
        if "checker" in mapping:
            checker = check_text(mapping["checker"], f"{where}.checker", MAX_CODE_CHARS)
            if not checker:
                raise InvalidCall(f"{where}.checker: expected Python source, got an empty text")
        prelude = mapping.get("prelude", base.prelude)
        if prelude not in PRELUDES:
            raise InvalidCall(f"{where}.prelude: expected leetcode, or an empty text, got {shown(prelude)}")
        max_chars = MAX_CODE_CHARS - len(PRELUDE_LINE) - len(_FUNCTION_CALL)
        if len(call["code"]) > max_chars and (prelude or any(test.function_call for test in tests)):
            reason = "since a prelude is added" if prelude else "since a test calls a function"
            raise InvalidCall(
                f"{where}.code: expected at most {max_chars} characters, {reason}, got {len(call['code'])}"
            )
        stop = mapping.get("stop_at_first_failure", base.stop_at_first_failure)
        check_flag(stop, f"{where}.stop_at_first_failure")
        return cls(call, tests, comparison, checker, stop, prelude)

    @property
    def size(self) -> int:
        """Approximate memory of the program and its tests in bytes."""
        return call_size(self.call) + memory_bytes(self.checker) + sum(test.size for test in self.tests)

    @property
    def id(self) -> str:
        return self.call.get("id", "")

    @property
    def tenant(self) -> str:
        return self.call.get("tenant", "")

    def with_tenant(self, tenant: str) -> Program:
        """Return this program with this tenant as its owner."""
        return replace(self, call={**self.call, "tenant": tenant})

    def calls(self, start: int = 0, end: int | None = None, *, max_output_kb: int = sys.maxsize) -> list[EncodedCall]:
        """Return the calls that run the tests from index `start` to before `end`. Calls with the same code share one
        `str`."""
        tests = self.tests[start:end]
        call: EncodedCall = {**self.call, "code": self.call["code"] + PRELUDE_LINE} if self.prelude else self.call
        function_code = call["code"] + _FUNCTION_CALL if any(test.function_call for test in tests) else ""
        limits = self.call.get("limits", {})
        output_kb = limits.get("output_kb", LIMIT_FIELDS["output_kb"].default)
        calls: list[EncodedCall] = []
        for test in tests:
            if test.function_call:
                files = {FUNCTION_CALL_FILE: test.function_call.encode()}
                calls.append({**call, "code": function_code, "echo": True, "files": files})
            else:
                calls.append({**call, "stdin": test.stdin})
            min_output_kb = min(self._min_output_kb(test), max_output_kb)
            if min_output_kb > output_kb:
                calls[-1]["limits"] = {**limits, "output_kb": min_output_kb}
        return calls

    def _min_output_kb(self, test: ProgramTest) -> int:
        """Return the smallest `output_kb` with which each right output of a test fits."""
        is_free = self.checker or isinstance(self.comparison, Tolerance)
        factor = FREE_OUTPUT_FACTOR if is_free else TEXT_OUTPUT_FACTOR
        return math.ceil(factor * test.expected_bytes / 1024)

    def checker_call(self, test: ProgramTest, result: EncodedResult) -> EncodedCall:
        """Return the call that runs the checker on the result of a test. It has the default limits."""
        files = {INPUT_FILE: test.function_call or test.stdin, ACTUAL_FILE: _answer(test, result)}
        if test.expected is not None:
            files[EXPECTED_FILE] = test.expected
        return {
            "code": self.checker,
            "files": {name: text.encode("utf-8", "surrogatepass") for name, text in files.items()},
            "echo": False,
            **_only(self.call, "priority", "tenant"),
        }


@dataclass(frozen=True, slots=True)
class JudgedTest:
    """The result of one test. `status` is the status of the program's call; None if the call did not run."""

    outcome: Annotated[JudgeOutcome, "how the program did in the test"]
    status: Annotated[Status | None, "how the program's call ended; null if it did not run"] = None
    message: Annotated[str, "the checker's output, or the reason why the test has no other outcome; else empty"] = ""
    stdout: Annotated[str, "the first 1,000 characters of stdout"] = ""
    stderr: Annotated[str, "the last 1,000 characters of stderr"] = ""
    value: Annotated[
        str | None,
        "the first 1,000 characters of the function's result as JSON; null if it returned none",
    ] = None
    usage: Annotated[Usage, "resources that the program's call used"] = Usage()  # noqa: RUF009  it is frozen
    reason: Annotated[
        UnavailableReason | None,
        "why the test is unavailable; missing if it is not, or if an internal error of the server is why",
    ] = None

    @classmethod
    def of(
        cls,
        outcome: JudgeOutcome,
        result: EncodedResult,
        message: str = "",
        reason: UnavailableReason | None = None,
    ) -> JudgedTest:
        """Return the result of a test whose call has this result."""
        value = result["value"]
        return cls(
            outcome,
            Status(result["status"]),
            message[:MAX_MESSAGE_CHARS],
            result["stdout"][:EXCERPT_CHARS],
            result["stderr"][-EXCERPT_CHARS:],
            None if value is None else value[:EXCERPT_CHARS],
            dataclass_codec.decode(Usage, result["usage"]),
            reason,
        )

    def encode(self) -> dict[str, Any]:
        """Return a mapping for JSON and msgpack."""
        encoded = dataclass_codec.encode(self)
        if self.reason is None:
            del encoded["reason"]
        return encoded

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> JudgedTest:
        """Invert `encode`. Unknown keys and an unknown reason are ignored."""
        return dataclass_codec.decode(cls, {**raw, "reason": unavailable_reason(raw.get("reason", ""))})


@dataclass(frozen=True, slots=True)
class JudgedProgram:
    """The result of one program. `is_scorable` is false if the service or a checker failed in a test, or if the program
    is malformed."""

    id: Annotated[str, "the program's id; without one, its index, from 0, or empty for a single program"]
    outcome: Annotated[
        JudgeOutcome,
        "passed if the program passed all tests; else unavailable or unjudged if a test is; else that of the first "
        "test that failed; invalid if the program is malformed",
    ]
    passed: Annotated[int, "number of tests that the program passed"] = 0
    total: Annotated[int, "number of tests"] = 0
    is_scorable: Annotated[
        bool,
        "false if a test is unavailable or unjudged, or the program is invalid: do not score it as 0",
    ] = False
    message: Annotated[str, "the reason why the program is invalid; else empty"] = ""
    tests: Annotated[tuple[JudgedTest, ...], "the results of the tests, in their order"] = ()
    clamped: Annotated[
        Mapping[str, float],
        "limits above the server's maximum, with the lower value that was used",
    ] = field(default_factory=dict)

    @classmethod
    def of(cls, program_id: str, tests: tuple[JudgedTest, ...], clamped: Mapping[str, float]) -> JudgedProgram:
        """Return the result of a program from the results of all its tests."""
        outcomes = [test.outcome for test in tests]
        unscorable = (JudgeOutcome.UNAVAILABLE, JudgeOutcome.UNJUDGED)
        worst = next((outcome for outcome in unscorable if outcome in outcomes), None)
        first_failed = next((outcome for outcome in outcomes if outcome in FAILURES), JudgeOutcome.PASSED)
        passed = outcomes.count(JudgeOutcome.PASSED)
        return cls(program_id, worst or first_failed, passed, len(tests), worst is None, "", tests, clamped)

    def with_id(self, program_id: str) -> JudgedProgram:
        """Return this result with another id."""
        return replace(self, id=program_id)

    def encode(self) -> dict[str, Any]:
        """Return a mapping for JSON and msgpack."""
        return dataclass_codec.encode(self)

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> JudgedProgram:
        """Invert `encode`. Unknown keys are ignored."""
        return dataclass_codec.decode(cls, raw)


FAILURES = (JudgeOutcome.WRONG_ANSWER, JudgeOutcome.FAILED)
"""Outcomes of a test that the program itself has failed."""


def compile_call(call: EncodedCall) -> EncodedCall:
    """Return the call that compiles the code of `call` and does not run it. It returns the compiled code as a file."""
    compiling: EncodedCall = {"code": call["code"], "return_files": [COMPILED_FILE], "compile_only": True}
    return {**_only(call, "limits", "echo", "profile", "priority", "tenant"), **compiling}


def compiled_code(result: EncodedResult) -> bytes:
    """Return the compiled code that a `compile_call` has returned. Return b"" if the other calls must compile the code
    themselves, for one of three reasons: the call failed; the compiled code is longer than `MAX_COMPILED_BYTES`; or
    the compiler printed a warning, which each call has to print."""
    if result["status"] != Status.OK or result["stderr"]:
        return b""
    compiled = result["files"].get(COMPILED_FILE, b"")
    return compiled if len(compiled) <= MAX_COMPILED_BYTES else b""


def count_values(text: str) -> int:
    """Return the number of values in JSON text, or a few more. Opening brackets and commas are counted."""
    return sum(map(text.count, "[{,"))


def unanswered_test(test: ProgramTest, result: EncodedResult) -> JudgedTest | None:
    """Return the result of a test in which the program gave no answer. Return None if there is an answer to compare."""
    if result["status"] != Status.OK:
        outcome = JudgeOutcome.UNAVAILABLE if _did_not_run(result) else JudgeOutcome.FAILED
        return JudgedTest.of(outcome, result, _error_text(result), reason_of(result))
    if not test.function_call:
        return None
    if result["value"] is None:
        return JudgedTest.of(JudgeOutcome.FAILED, result, "the program ended before the function returned")
    if "value" in result["truncated"]:
        return JudgedTest.of(JudgeOutcome.FAILED, result, "the returned value is longer than output_kb")
    return None


def checker_outcome(result: EncodedResult) -> tuple[JudgeOutcome, str]:
    """Return the outcome and message of a test from the result of its checker."""
    status, error, exit_code = result["status"], result["error"], result["exit_code"]
    if _did_not_run(result):
        return JudgeOutcome.UNAVAILABLE, _error_text(result)
    message = result["stdout"].strip()
    if status == Status.OK:
        return JudgeOutcome.PASSED, message
    if status == Status.ERROR and exit_code == 1 and error is not None and error["type"] == "SystemExit":
        return JudgeOutcome.WRONG_ANSWER, message
    return JudgeOutcome.UNJUDGED, f"the checker ended as {status}, exit code {exit_code}: {_error_text(result)}"


def reason_of(result: EncodedResult) -> UnavailableReason | None:
    """Return why a call is `unavailable`, or None if it is not."""
    error = result["error"]
    return unavailable_reason(error["type"]) if error and result["status"] == Status.UNAVAILABLE else None


def _only(call: EncodedCall, *names: str) -> EncodedCall:
    """Return the fields of a call that have these names."""
    return cast(EncodedCall, {name: value for name, value in call.items() if name in names})


def _did_not_run(result: EncodedResult) -> bool:
    return result["status"] in (Status.UNAVAILABLE, Status.INVALID)


def _error_text(result: EncodedResult) -> str:
    error = result["error"]
    return f"{error['type']}: {error['message']}" if error else result["status"]


def _answer(test: ProgramTest, result: EncodedResult) -> str:
    """Return what the program has answered: stdout, or the JSON text of the returned value."""
    return (result["value"] or "") if test.function_call else result["stdout"]


def _decode_tests(raw: Any, where: str) -> tuple[ProgramTest, ...]:
    if not isinstance(raw, list) or not raw:
        raise InvalidCall(
            f"{where}: expected a list of at least one test, got {'an empty list' if raw == [] else shown(raw)}"
        )
    return tuple(ProgramTest.decode(test, f"{where}[{index}]") for index, test in enumerate(raw))


def _decode_comparison(raw: Any, where: str) -> Comparison:
    if isinstance(raw, Mapping):
        check_names(raw, {"abs": "", "rel": ""}, where)
        if not raw:
            raise InvalidCall(f"{where}: expected abs, rel or both, got an empty object")
        return Tolerance(**{name: check_number(value, f"{where}.{name}", TOLERANCE) for name, value in raw.items()})
    try:
        return TextComparison(raw)
    except ValueError:
        expected = f'{", ".join(TextComparison)}, or an object such as {{"abs": 1e-6, "rel": 1e-6}}'
        raise InvalidCall(f"{where}: expected {expected}, got {shown(raw)}") from None


def _function_name(raw: Any, where: str) -> str:
    parts = raw.split(".") if isinstance(raw, str) else []
    if not 1 <= len(parts) <= 2 or not all(part.isidentifier() for part in parts):
        raise InvalidCall(f"{where}: expected the name of a function, or Class.method, got {shown(raw)}")
    return ".".join(parts)


def _to_json(value: Any, where: str) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidCall(f"{where}: expected JSON values, got something else: {error!s:.100}") from None
    if len(text) > MAX_STDIN_CHARS:
        raise InvalidCall(f"{where}: expected at most {MAX_STDIN_CHARS} characters of JSON, got {len(text)}")
    return text


_DEFAULT_PROGRAM = Program({"code": "", "echo": False})
"""The program from which missing fields come if a request has no `defaults`."""
