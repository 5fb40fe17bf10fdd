"""Tests of `/v1/judge` over real HTTP with fake executors: waves, order, streams, limits, failures of the service.

A wave is a part of a program's tests that is submitted at once. With `stop_at_first_failure` the waves have 1, 2, 4,
... tests. Without it all tests are one wave, unless they are very many or very large.

A fake executor runs no code. It answers each call with the call's standard input as the output (`_answer`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from sandbox.gateway import judging
from sandbox.gateway.http.exchange import BODY_READER
from sandbox.gateway.http.judge import JUDGED_BYTES
from sandbox.judging.comparison import Steps, Tolerance
from sandbox.judging.programs import JudgedProgram, ProgramTest
from sandbox.settings.profiles import OwnProfile
from sandbox.types import CallError, Limits, Result, Status, UnavailableReason, unavailable_result
from tests import fakes
from tests.fakes import FakeFleet
from tests.gateway.http.test_openapi import SCHEMAS, assert_fits
from tests.gateway.http.test_tenants import BEARER_A, serving_tenants
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio

COMPILED = b"compiled"


@pytest.fixture(autouse=True)
def _fake_executors_echo_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "ok_result", _answer)


def _answer(call: dict[str, Any]) -> dict[str, Any]:
    """Answer as if the code printed its input.

    The code "check" is that of a checker, a program which decides whether the output of another program is right. The
    fake checker ends with the exit code that this output (its file `actual`) names: 0 accepts the output, 1 rejects it.
    """
    if "compile_only" in call:
        return Result("", Status.OK, exit_code=0, files={"compiled": COMPILED}).encode(binary=True)
    if call["code"] == "check":
        exit_code = int(call["files"]["actual"])
        error = CallError("SystemExit", str(exit_code)) if exit_code else None
        status = Status.ERROR if exit_code else Status.OK
        return Result("", status, stdout="said\n", exit_code=exit_code, error=error).encode(binary=True)
    if call.get("stdin") == "crash":
        return Result("", Status.ERROR, error=CallError("ValueError", "bad")).encode(binary=True)
    if "function_call.json" in call.get("files", {}):
        args = json.loads(call["files"]["function_call.json"])["args"]
        return Result("", Status.OK, exit_code=0, value=json.dumps(args[0])).encode(binary=True)
    return Result("", Status.OK, exit_code=0, stdout=call.get("stdin", "")).encode(binary=True)


def make_tests(*outcomes: str) -> list[dict[str, str]]:
    """Tests that pass ("p"), have a wrong answer ("w") or fail ("f")."""
    stdin = {"p": "x", "w": "y", "f": "crash"}
    return [{"stdin": stdin[outcome], "expected": "x"} for outcome in outcomes]


def outcome_initials(judged: dict[str, Any]) -> str:
    """Return the first letter of each test's outcome: passed, wrong_answer, failed, skipped, unjudged, unavailable."""
    return "".join(test["outcome"][0] for test in judged["tests"])


async def judge(served: Served, body: Any) -> dict[str, Any]:
    status, judged = await served.post("/v1/judge", body)
    assert status == 200, judged
    assert_fits(judged, SCHEMAS["Judged"])
    answer: dict[str, Any] = judged
    return answer


def calls_of(served: Served) -> list[dict[str, Any]]:
    return list(served.fleet.last_executor.calls.values())


async def test_each_test_has_its_own_outcome() -> None:
    async with serving() as served:
        judged = await judge(served, {"code": "code", "tests": make_tests(*"pwfp"), "id": "mine"})
    assert outcome_initials(judged) == "pwfp"
    assert [judged[name] for name in ("id", "outcome", "passed", "total", "is_scorable")] == [
        "mine", "wrong_answer", 2, 4, True
    ]  # fmt: skip
    assert judged["tests"][2]["message"] == "ValueError: bad"
    assert judged["tests"][1]["stdout"] == "y"


async def test_the_program_is_compiled_once_and_each_test_is_a_call() -> None:
    async with serving() as served:
        await judge(served, {"code": "code", "tests": make_tests(*"ppp"), "tenant": "t", "limits": {"timeout_s": 2}})
        first, *tests = calls_of(served)
    assert (first["code"], first["compile_only"]) == ("code", True)
    assert len(tests) == 3
    for call in tests:
        assert (call["compiled"], call["stdin"], call["tenant"]) == (COMPILED, "x", "t")
        assert call["limits"] == {"timeout_s": 2}
        assert "expected" not in json.dumps(call, default=str)


async def test_a_program_with_two_tests_gets_no_call_that_only_compiles() -> None:
    async with serving() as served:
        await judge(served, {"code": "code", "tests": make_tests(*"pp")})
        assert not any("compiled" in call or "compile_only" in call for call in calls_of(served))
        assert len(calls_of(served)) == 2


async def test_code_that_cannot_be_compiled_runs_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(call: dict[str, Any]) -> dict[str, Any]:
        if "compile_only" in call:
            return Result("", Status.MEMORY_LIMIT, files={"compiled": COMPILED}).encode(binary=True)
        return _answer(call)

    monkeypatch.setattr(fakes, "ok_result", answer)
    async with serving() as served:
        assert outcome_initials(await judge(served, {"code": "code", "tests": make_tests(*"pppp")})) == "pppp"
        assert not any("compiled" in call for call in calls_of(served))


@pytest.mark.parametrize(
    ("outcomes", "expected", "max_calls"),
    # The waves have 1, 2, 4 and 1 tests. From the wave of 4 on, one more call only compiles.
    [
        ("wppppppp", "wsssssss", 1),
        ("pfpppppp", "pfssssss", 1 + 2),
        ("pppwpwpp", "pppwssss", 1 + 2 + 4 + 1),
        ("pppppppp", "pppppppp", 1 + 2 + 4 + 1 + 1),
        ("pppppppw", "pppppppw", 1 + 2 + 4 + 1 + 1),
    ],
)
async def test_tests_after_the_first_failure_are_skipped(outcomes: str, expected: str, max_calls: int) -> None:
    body = {"code": "code", "tests": make_tests(*outcomes), "stop_at_first_failure": True}
    async with serving() as served:
        judged = await judge(served, body)
        assert len(calls_of(served)) <= max_calls
    assert outcome_initials(judged) == expected
    assert judged["is_scorable"]


async def test_a_checker_decides_about_programs_that_ended_ok() -> None:
    tests = [{"stdin": text} for text in ("0", "1", "2", "crash")]
    async with serving() as served:
        judged = await judge(served, {"code": "code", "tests": tests, "checker": "check"})
        checks = [call for call in calls_of(served) if call["code"] == "check" and "compile_only" not in call]
    assert outcome_initials(judged) == "pwuf"
    assert (judged["outcome"], judged["is_scorable"]) == ("unjudged", False)
    assert judged["tests"][0]["message"] == "said"
    assert len(checks) == 3
    assert all(check["compiled"] == COMPILED for check in checks)


async def test_function_tests_compare_json() -> None:
    tests = [{"call": "f", "args": [{"a": [1, 10**60]}], "expected": {"a": [1, 10**60 + wrong]}} for wrong in (0, 1)]
    async with serving() as served:
        assert outcome_initials(await judge(served, {"code": "code", "tests": tests})) == "pw"


async def test_a_forged_value_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter(["{", "[" * 100_000, "9" * 5000, "NaN"])

    def answer(call: dict[str, Any]) -> dict[str, Any]:
        return Result("", Status.OK, value=next(values)).encode(binary=True)

    monkeypatch.setattr(fakes, "ok_result", answer)
    monkeypatch.setattr(judging, "MIN_CALLS_TO_COMPILE", 100)
    tests = [{"call": "f", "expected": 1}] * 4
    async with serving() as served:
        assert outcome_initials(await judge(served, {"code": "code", "tests": tests})) == "wwww"


async def test_returned_json_with_far_more_values_than_expected_is_wrong_and_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = ProgramTest(function_call="f", expected="[]")
    # Each text has more than MAX_UNEXPECTED_VALUES, 50,000, of the characters "[", "{" and ",".
    for text in ("[" + "[]," * 50_000 + "0]", "[" + "{}," * 50_000 + "0]", "[" + "0," * 50_001 + "0]"):
        result = Result("", Status.OK, value=text).encode(binary=True)
        with monkeypatch.context() as patch:
            patch.setattr(json, "loads", lambda text: pytest.fail("decoded"))
            assert not await judging._is_right(test, result, Tolerance())


@pytest.mark.parametrize(
    "expected", [[], {"[,{": ["[{,\n", {}, [[], 1.5, None]]}, ["," * 9, '\\",'], [[0, {"": 1}]] * 9]
)
@pytest.mark.parametrize(
    "spell",
    [
        json.dumps,
        lambda value: json.dumps(value, indent=1),
        lambda value: json.dumps(value, separators=(" ,\n", " : ")),
        lambda value: json.dumps(value).replace("[{,", r"\u005b\u007B\u002c"),
    ],
)
async def test_a_right_value_is_right_in_any_spelling(
    expected: Any, spell: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway counts the values of a JSON text by the characters "[", "{" and ",". The expected values have these
    characters in strings and keys as well, where they are no values. A spelling may escape them or add white space."""
    monkeypatch.setattr(judging, "MAX_UNEXPECTED_VALUES", 0)
    result = Result("", Status.OK, value=spell(expected)).encode(binary=True)
    assert await judging._is_right(ProgramTest(function_call="f", expected=json.dumps(expected)), result, Tolerance())


# Many programs


async def test_results_are_in_the_order_of_the_programs() -> None:
    programs = [{"code": "code", "tests": make_tests("p" if number % 3 else "w")} for number in range(100)]
    async with serving() as served:
        body = await judge(served, {"programs": programs})
    assert [judged["id"] for judged in body["results"]] == [str(number) for number in range(100)]
    assert [judged["passed"] for judged in body["results"]] == [int(bool(number % 3)) for number in range(100)]


async def test_an_internal_error_with_one_program_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_one = judging.ProgramRun.judge

    async def fail_for_a(run: judging.ProgramRun) -> JudgedProgram:
        if run.program.id == "a":
            raise ValueError("unexpected")
        return await judge_one(run)

    monkeypatch.setattr(judging.ProgramRun, "judge", fail_for_a)
    programs = [{"id": name, "code": "x", "tests": make_tests("p")} for name in "ab"]
    async with serving() as served:
        _, body = await served.post("/v1/judge", {"programs": programs})
    first, second = body["results"]
    assert (first["outcome"], first["is_scorable"], second["outcome"]) == ("unavailable", False, "passed")


async def test_a_malformed_program_does_not_affect_the_others() -> None:
    programs: list[Any] = [{"code": 1}, {"code": "code", "id": "b"}, 7, {"code": "code", "tests": []}]
    async with serving() as served:
        body = await judge(served, {"programs": programs, "defaults": {"tests": make_tests("p")}})
        status, all_malformed = await served.post("/v1/judge", {"programs": [{}]})
    assert [judged["outcome"] for judged in body["results"]] == ["invalid", "passed", "invalid", "invalid"]
    assert [judged["is_scorable"] for judged in body["results"]] == [False, True, False, False]
    assert body["results"][3]["message"].startswith("programs[3].tests: expected a list of at least one test")
    assert (status, all_malformed["results"][0]["outcome"]) == (400, "invalid")


async def test_a_program_can_name_a_profile_of_the_server_and_no_other() -> None:
    programs = [{"code": "code", "tests": make_tests("p"), "profile": name} for name in ("ml", "mm")]
    async with serving(own_profiles=(OwnProfile("ml"),)) as served:
        body = await judge(served, {"programs": programs})
        status, refused = await served.post("/v1/judge", programs[1])
    assert [judged["outcome"] for judged in body["results"]] == ["passed", "invalid"]
    assert body["results"][1]["message"].endswith("verify, ml, got 'mm'")
    assert (status, refused["error"]["message"].startswith("program.profile: expected one of auto")) == (400, True)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"code": "1"}, 400, "program.tests: expected a list of at least one test"),
        ([], 400, "program: expected an object"),
        ({"programs": []}, 400, "judge.programs: expected a list of at least one program, got an empty list"),
        ({"programs": [{}], "code": "1"}, 400, "judge: unknown field 'code'"),
        ({"programs": [{}], "defaults": {"tests": []}}, 400, "defaults.tests: expected a list of at least one test"),
        ({"code": "1", "tests": make_tests(*"p" * 9)}, 413, "expected at most 8 tests in one request, got 9 or more"),
        ({"programs": [{"code": "1"}] * 3, "defaults": {"tests": make_tests(*"ppp")}}, 413, "expected at most 8 tests"),
        ({"code": "1", "tests": [0] * 9}, 413, "expected at most 8 tests"),
        ({"programs": [{"code": "1", "tests": [0] * 5}] * 2}, 413, "expected at most 8 tests"),
        ({"programs": [{"code": "1"}], "defaults": {"tests": [0] * 9}}, 413, "expected at most 8 tests"),
        (
            {"code": "1", "tests": make_tests("p"), "queue_timeout_s": 0},
            400,
            "program.queue_timeout_s: expected seconds",
        ),
        ({"code": "1", "tests": make_tests("p"), "queue_timeout_s": 10**4000}, 200, ""),
    ],
)
async def test_the_error_of_a_malformed_request_names_the_field(body: Any, status: int, message: str) -> None:
    async with serving(batch_calls=8) as served:
        received, answer = await served.post("/v1/judge", body)
    assert received == status
    assert status == 200 or answer["error"]["message"].startswith(message)


@pytest.mark.parametrize("accept", ["application/x-ndjson", "application/x-msgpack-stream"])
async def test_a_stream_has_each_program_when_it_is_judged(accept: str) -> None:
    programs = [{"code": "hang", "tests": make_tests("p")}, {"code": "code", "tests": make_tests("p")}, {"code": 1}]
    async with serving() as served:
        body = {"programs": programs}
        async with served.http.post(served.url + "/v1/judge", json=body, headers={"Accept": accept}) as response:
            lines: list[Any] = []
            unpacker = msgpack.Unpacker()
            async for line in response.content.iter_any():
                if "json" in accept:
                    lines += map(json.loads, line.splitlines())
                else:
                    unpacker.feed(line)
                    lines += unpacker
                if len(lines) == 2:
                    executor = served.fleet.last_executor
                    executor.finish(*(seq for seq, call in executor.calls.items() if call["code"] == "hang"))
    assert [line["index"] for line in lines] == [2, 1, 0]
    for line in lines:
        assert_fits(line, SCHEMAS["JudgedLine"])
    assert [line["outcome"] for line in lines] == ["invalid", "passed", "passed"]


async def test_msgpack_arguments_may_have_many_objects() -> None:
    edges = [[number, number + 1] for number in range(2000)]
    body = msgpack.packb({"code": "code", "tests": [{"call": "f", "args": [edges], "expected": edges}]})
    async with serving(batch_calls=8) as served:
        status, judged = await served.post(
            "/v1/judge", body, Content_Type="application/msgpack", Accept="application/json"
        )
    assert (status, judged["passed"]) == (200, 1)


# Failures of the service


async def test_a_full_queue_is_refused_at_once() -> None:
    async with serving(FakeFleet(slots=1), queue_calls=10, tenant_share=1) as served:
        hanging = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 8}))
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 8)
        status, refusal = await served.post("/v1/judge", {"code": "code", "tests": make_tests(*"ppp")})
        assert (status, refusal["error"]["type"]) == (429, "Overloaded")
        status, refusal = await served.post("/v1/judge", {"code": "code", "tests": make_tests(*"p" * 11)})
        assert status == 413
        hanging.cancel()


async def test_a_wave_waits_for_room_in_the_queue() -> None:
    async with serving(FakeFleet(slots=8), queue_calls=10, tenant_share=1) as served:
        body = {"code": "hang", "tests": make_tests(*"p" * 9)}
        judging_first = asyncio.create_task(judge(served, body))
        await until(lambda: len(served.fleet.executors[0].calls) == 1)  # the call that compiles
        second = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 9}))
        executor = served.fleet.last_executor
        await until(lambda: len(executor.calls) == 10)
        executor.finish(1)
        await asyncio.sleep(2 * judging.ADMISSION_RETRY_S)  # the wave has no room, and must not become unavailable
        assert not judging_first.done()
        executor.finish(*range(2, 11))
        await second
        await until(lambda: len(executor.calls) == 19)
        executor.finish(*range(11, 20))
        assert outcome_initials(await judging_first) == "p" * 9


async def test_a_full_buffer_of_unread_results_does_not_keep_the_checkers_of_these_results_from_running() -> None:
    """The outputs of all tests together exceed the limit of unread results, and only their checkers can read them."""
    tests = [{"stdin": "0" + " " * (64 << 10)}] * 5
    body = {"programs": [{"code": "code", "tests": tests, "checker": "check"}] * 20, "queue_timeout_s": 5}
    async with serving(FakeFleet(slots=8), results_mb=1) as served:
        _, judged = await served.post("/v1/judge", json.dumps(body).encode(), Content_Type="application/json")
        results = judged["results"]
        assert served.dispatcher.call_table.unread_result_bytes == 0
    outcomes = {(test["outcome"], test["message"].partition(":")[0]) for judged in results for test in judged["tests"]}
    # A batch that has used its part of the limit loses its further results. But no test waits for `queue_timeout_s`.
    assert outcomes <= {("passed", "said"), ("passed", ""), ("unavailable", "ResultsUnread")}
    assert any(test["outcome"] == "passed" for judged in results for test in judged["tests"])


async def test_a_disconnect_while_a_wave_waits_for_room_is_a_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeFleet(slots=8), queue_calls=10, tenant_share=1) as served:
        body = {"code": "hang", "tests": make_tests(*"p" * 9)}
        request = asyncio.create_task(served.post("/v1/judge", body))
        executor = served.fleet.last_executor
        await until(lambda: len(executor.calls) == 1)  # the call that compiles
        other = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 9}))
        await until(lambda: len(executor.calls) == 10)
        executor.finish(1)
        await asyncio.sleep(2 * judging.ADMISSION_RETRY_S)  # now the wave waits
        request.cancel()
        await until(lambda: served.app[JUDGED_BYTES].total == served.app[BODY_READER].budget.total == 0)
        assert "failed" not in caplog.text
        other.cancel()


async def test_a_wave_without_room_becomes_unavailable() -> None:
    async with serving(FakeFleet(slots=8), queue_calls=10, tenant_share=1) as served:
        body = {"code": "hang", "tests": make_tests(*"p" * 9), "queue_timeout_s": 0.3}
        judging_first = asyncio.create_task(judge(served, body))
        executor = served.fleet.last_executor
        await until(lambda: len(executor.calls) == 1)
        other = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 9}))
        await until(lambda: len(executor.calls) == 10)
        executor.finish(1)
        judged = await judging_first
        assert outcome_initials(judged) == "u" * 9
        assert (judged["outcome"], judged["is_scorable"]) == ("unavailable", False)
        assert judged["tests"][0]["message"].startswith("QueueTimeout: ")
        assert judged["tests"][0]["reason"] == "QueueTimeout"
        other.cancel()


async def test_the_calls_of_a_program_have_the_bounds_of_its_tenant(tmp_path: Path) -> None:
    tests = [{"stdin": "0"}] * 3
    body = {"code": "code", "tests": tests, "checker": "check", "limits": {"timeout_s": 9}, "priority": -1}
    async with serving_tenants(tmp_path) as served:
        status, judged = await served.post("/v1/judge", body, Authorization=BEARER_A)
        calls = calls_of(served)
        refused, refusal = await served.post("/v1/judge", {**body, "tenant": "b"}, Authorization=BEARER_A)
    assert (status, judged["passed"], judged["clamped"]) == (200, 3, {"timeout_s": 3})
    assert (refused, "the token is that of tenant 'a'" in refusal["error"]["message"]) == (400, True)
    assert len(calls) == 8  # the program and the checker: each is compiled, and runs three times
    assert {(call["tenant"], call["limits"]["timeout_s"]) for call in calls if call["code"] == "code"} == {("a", 3)}
    assert {call["limits"]["timeout_s"] for call in calls} == {3}
    assert sum("compiled" in call for call in calls) == 6


async def test_a_disconnect_cancels_the_calls() -> None:
    async with serving(FakeFleet(slots=8)) as served:
        request = asyncio.create_task(served.post("/v1/judge", {"code": "hang", "tests": make_tests(*"pp")}))
        executor = served.fleet.last_executor
        await until(lambda: len(executor.calls) == 2)
        request.cancel()
        await until(lambda: len(executor.cancelled) == 2)
        assert served.dispatcher.call_table.outstanding.calls == 0
        await until(lambda: served.app[JUDGED_BYTES].total == served.app[BODY_READER].budget.total == 0)


@pytest.mark.parametrize("what", ["program", "checker"])
async def test_a_poisonous_test_or_check_ends_its_program_and_no_other(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has four tests, in waves of 1, 2 and 1. The call of the second test, or of the second check, is
    poisonous: all its attempts were lost, and its code may have started."""
    poison = unavailable_result("", UnavailableReason.POISON, "the reason").encode(binary=True)

    def answer(call: dict[str, Any]) -> dict[str, Any]:
        is_poisonous = call["code"] == "check" if what == "checker" else call.get("stdin") == "second"
        return poison if is_poisonous and call.get("files", {}).get("input", b"second") == b"second" else _answer(call)

    monkeypatch.setattr(fakes, "ok_result", answer)
    monkeypatch.setattr(judging, "MIN_CALLS_TO_COMPILE", 99)
    tests = [{"stdin": stdin, "expected": stdin} for stdin in ("0", "second", "0", "0")]
    checker = {"checker": "check"} if what == "checker" else {}
    async with serving(FakeFleet(slots=8)) as served:
        first = {"code": "code", "tests": tests, "stop_at_first_failure": True, **checker}
        _, body = await served.post("/v1/judge", {"programs": [first, {"code": "code", "tests": make_tests("p")}]})
    poisonous, other = body["results"]
    messages = [test["message"] for test in poisonous["tests"]]
    assert messages[1] == messages[3] == "Poison: the reason", "the last wave does not run"
    assert poisonous["tests"][1]["reason"] == poisonous["tests"][3]["reason"] == "Poison"
    assert (outcome_initials(other), poisonous["outcome"], poisonous["total"]) == ("p", "unavailable", 4)


async def test_a_lost_executor_makes_tests_unavailable_not_failed() -> None:
    async with serving(attempts=1) as served:
        judged = await judge(served, {"code": "die", "tests": make_tests("p")})
    assert outcome_initials(judged) == "u"
    assert judged["tests"][0]["message"].startswith("Poison: ")
    assert judged["tests"][0]["reason"] == "Poison"
    assert not judged["is_scorable"]


async def test_a_stopping_server_answers_all_tests() -> None:
    async with serving(FakeFleet(slots=1)) as served:
        body = {"programs": [{"code": "hang", "tests": make_tests(*"pppp")}] * 3}
        request = asyncio.create_task(judge(served, body))
        await until(lambda: len(served.fleet.last_executor.calls) == 2)
        await served.dispatcher.drain(0.01)
        results = (await request)["results"]
    assert [outcome_initials(judged) for judged in results] == ["uuuu"] * 3
    assert {test["reason"] for judged in results for test in judged["tests"]} == {"Stopped"}


async def test_bodies_and_results_are_released() -> None:
    async with serving() as served:
        await judge(served, {"code": "code", "tests": make_tests(*"ppwf")})
        await judge(served, {"code": "code", "tests": [{"stdin": "0"}] * 4, "checker": "check"})
        assert served.app[JUDGED_BYTES].total == served.app[BODY_READER].budget.total == 0
        table = served.dispatcher.call_table
        assert (table.unread_result_bytes, table.outstanding.calls, table.outstanding.bytes) == (0, 0, 0)


async def test_large_programs_are_split_into_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "MAX_WAVE_BYTES", 3000)
    async with serving() as served:
        assert outcome_initials(await judge(served, {"code": "#" * 1000, "tests": make_tests(*"pppppppp")})) == "p" * 8


async def test_very_many_tests_are_split_into_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "MAX_WAVE_CALLS", 10)
    assert list(judging._waves([1] * 25, doubling=False)) == [(0, 10), (10, 20), (20, 25)]
    assert list(judging._waves([1] * 30, doubling=True)) == [(0, 1), (1, 3), (3, 7), (7, 15), (15, 25), (25, 30)]
    async with serving() as served:
        assert outcome_initials(await judge(served, {"code": "code", "tests": make_tests(*"pw" * 15)})) == "pw" * 15


async def test_other_tasks_run_between_the_steps_of_a_comparison() -> None:
    turns: list[str] = []

    def steps() -> Steps:
        for _ in range(3):
            turns.append("step")
            yield
        return True

    async def other() -> None:
        for _ in range(3):
            turns.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    assert await judging._finish(steps())
    await running
    assert turns == ["step", "other"] * 3


async def test_an_expected_number_that_is_too_long_is_refused() -> None:
    body = b'{"code": "1", "tests": [{"call": "f", "args": [], "expected": ' + b"7" * 5000 + b"}]}"
    async with serving() as served:
        status, answer = await served.post("/v1/judge", body, Content_Type="application/json")
    assert status == 400
    assert answer["error"]["message"].startswith("a whole number has more than 4300 digits")


async def test_a_single_call_does_not_wait_for_all_programs_of_an_earlier_request() -> None:
    async with serving(FakeFleet(slots=1)) as served:
        executor = served.fleet.last_executor
        body = {"programs": [{"code": "hang", "tests": make_tests("p")}] * 20}
        judging_all = asyncio.create_task(served.post("/v1/judge", body))
        await until(lambda: len(executor.calls) == 2 and served.dispatcher.call_table.waiting == 18)
        single = asyncio.create_task(served.post("/v1/execute", {"code": "single"}))
        await until(lambda: served.dispatcher.call_table.waiting == 19)
        executor.finish(1)
        assert (await single)[0] == 200
        judging_all.cancel()
        await asyncio.wait([judging_all])


async def test_an_expected_output_longer_than_the_maximum_of_output_kb_makes_a_program_invalid() -> None:
    body = {"code": "1", "tests": [{"expected": "x" * 1024}, {"expected": "x" * 1025}]}
    async with serving(max_limits=Limits(output_kb=1)) as served:
        judged = (await served.post("/v1/judge", body))[1]
        assert judged["outcome"] == "invalid" and judged["is_scorable"] is False
        assert judged["message"].startswith("tests[1].expected has 1025 bytes, and the maximum of output_kb is 1;")
        with_checker = (await served.post("/v1/judge", {**body, "checker": "1"}))[1]
        assert with_checker["outcome"] != "invalid"
