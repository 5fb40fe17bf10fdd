"""Tests of the routes with which this server replaces code-judge, another sandbox service.

The answers to the same submissions equal those that code-judge gave (a committed file has them), except for documented
differences. The tests also run the clients of code-judge, send malformed bodies, and cause failures.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest
import pytest_asyncio

from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.compat import code_judge
from sandbox.gateway.compat.fastapi_bodies import MAX_ERRORS
from sandbox.gateway.compat.models import MAX_SUB_ID_CHARS
from sandbox.local import local_service
from sandbox.types import CallError, Limits, Result, Status, UnavailableReason, Usage, unavailable_result
from tests import fakes
from tests.gateway.compat.code_judge_programs import DIFFERENT, SUBMISSIONS, comparable
from tests.gateway.compat.record_code_judge import ANSWERS, post
from tests.gateway.http.test_openapi import SCHEMAS, assert_fits
from tests.gateway.serving import serving, until

RECORD = json.loads(ANSWERS.read_text())
CODE_JUDGE = os.environ.get("RSTAR_CODE_JUDGE")
RSTAR = os.environ.get("RSTAR_RSTAR")
PATHS = [prefix + suffix for prefix in ("/run", "/judge") for suffix in ("", "/batch", "/long-batch")]
PROGRAM = {"type": "python", "solution": "hello"}

needs_code_judge = pytest.mark.skipif(CODE_JUDGE is None, reason="RSTAR_CODE_JUDGE names no checkout of code-judge")
needs_rstar = pytest.mark.skipif(RSTAR is None, reason="RSTAR_RSTAR names no checkout of rStar")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(guest_python: Path, needs_isolation: None) -> AsyncIterator[str]:
    async with local_service() as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(url: str) -> dict[str, Any]:
    """The answers of `/run/long-batch` to all submissions, by name."""
    submissions = SUBMISSIONS | {name: submission for name, (submission, _) in DIFFERENT.items()}
    body = {"type": "batch", "submissions": list(submissions.values())}
    results = (await asyncio.to_thread(post, f"{url}/run/long-batch", body))["results"]
    return dict(zip(submissions, results, strict=True))


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_the_response_equals_the_recorded_response_of_code_judge(name: str, answers: dict[str, Any]) -> None:
    assert_fits(answers[name], SCHEMAS["CodeJudgeResult"])
    assert comparable(answers[name]) == RECORD["same"][name]


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_response_that_differs_from_code_judge_differs_as_documented(name: str, answers: dict[str, Any]) -> None:
    expected = DIFFERENT[name][1]
    recorded, answer = RECORD["different"][name], comparable(answers[name])
    assert {field: answer[field] for field in expected} == expected
    if expected:
        assert answer != recorded, "the response no longer differs; move the program to SUBMISSIONS"
    document = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()
    assert f"`{name}`" in document, f"docs/compatibility.md does not explain the difference {name}"


def test_the_other_routes_give_the_same_results_as_the_route_of_long_batches(url: str, answers: dict[str, Any]) -> None:
    fast = [name for name in SUBMISSIONS if not RECORD["same"][name]["reason"]]
    body = {"submissions": [SUBMISSIONS[name] for name in fast]}
    judged = post(f"{url}/judge/long-batch", body)["results"]
    for name, verdict in zip(fast, judged, strict=True):
        assert_fits(verdict, SCHEMAS["CodeJudgeVerdict"])
        same = ("success", "run_success", "reason")
        assert {field: verdict[field] for field in same} == {field: answers[name][field] for field in same}
    name = "long_output_is_compared_whole"
    plain = post(f"{url}/run/batch", {"submissions": [SUBMISSIONS[name]] * 2})["results"]
    alone = post(f"{url}/run", SUBMISSIONS[name])
    assert {str(comparable(answer)) for answer in (*plain, alone)} == {str(comparable(answers[name]))}
    assert post(f"{url}/judge", SUBMISSIONS[name])["success"]


def test_the_cost_of_a_submission_that_timed_out_is_at_least_the_time_limit(answers: dict[str, Any]) -> None:
    timeouts = [answer for answer in answers.values() if answer["reason"] == "worker_timeout"]
    assert len(timeouts) >= 6, f"only {len(timeouts)} of the submissions timed out"
    costs = [answer["cost"] for answer in timeouts]
    assert all(code_judge.LIMITS.timeout_s <= cost < 100 for cost in costs), f"costs out of range: {costs}"
    assert answers["short_sleep"]["cost"] >= 0.3


def import_file(path: Path) -> ModuleType:
    """Import one file of a checkout as a module, without an import of its package."""
    spec = importlib.util.spec_from_file_location(f"checkout_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL_CALLS: list[tuple[str, str, str]] = [  # name of rStar's tool, code, expected beginning of the text for the model
    ("jupyter_code", "x = 20\nx + 1", "Tool call success\nstdout: 21\n\nexecution time: 0."),
    ("jupyter_code", "print('a')\n1 / 0", "Tool call failure\nreason: \nstdout: a\n\nstderr: ZeroDivisionError"),
    ("jupyter_code", "import sympy\nsympy.sqrt(8)", "Tool call success\nstdout: 2*sqrt(2)\n\nexecution time: "),
    ("jupyter_code", "x = (", "Tool call failure\nreason: \nstderr: SyntaxError at line 1: '(' was never closed"),
    (
        "jupyter_code",
        "while True: pass",
        "Tool call failure\nreason: worker_timeout\nstdout: Suicide from timeout.\n\n",
    ),
    ("python_code_with_standard_io", "print(int(input()) * 2)", "Tool call success\nstdout: 42\n\nexecution time: 0."),
]


@needs_rstar
@pytest.mark.asyncio(loop_scope="module")
async def test_the_tool_of_rstar2_agent_runs_unchanged(url: str) -> None:
    import aiohttp

    caller = import_file(Path(str(RSTAR)) / "rstar2_agent/tools/code_judge_utils.py")
    calls = [{"name": name, "arguments": {"code": code, "input": "21"}} for name, code, _ in TOOL_CALLS]
    calls[0]["history_tool_calls"] = [{"name": "jupyter_code", "arguments": {"code": "print('earlier')"}}]
    address, _, port = url.removeprefix("http://").rpartition(":")
    async with aiohttp.ClientSession() as session:
        texts = await caller.run_tool_calls_on_server_async(
            calls,
            session,
            generate_tool_call_code=caller.generate_tool_call_code,
            generate_tool_call_input=caller.generate_tool_call_input,
            host_addr=address,
            host_port=port,
        )
    for text, (_, _, expected) in zip(texts, TOOL_CALLS, strict=True):
        assert text.startswith(expected)


@needs_code_judge
def test_the_clients_of_code_judge_run_unchanged(url: str) -> None:
    clients = import_file(Path(str(CODE_JUDGE)) / "judge_client.py")
    programs = [
        clients.Submission(
            sub_id=f"id {n}", type="python", solution="print(input())", input=str(n), expected_output="7"
        )
        for n in range(20)
    ]
    results = clients.JudgeClient(url, max_workers=2).judge(programs)
    assert [result.sub_id for result in results] == [program.sub_id for program in programs]
    assert [n for n, result in enumerate(results) if result.success] == [7]
    assert all(result.run_success and result.reason == "" for result in results)
    state = clients.JudgeClient(url).get_status()
    assert (state.queue, state.num_workers > 0) == (0, True)
    with clients.BufferedJudgeClient(url, max_batch_size=8, max_workers=2) as client:
        assert [result.stdout for result in client.judge(programs)] == [f"{n}\n" for n in range(20)]
    with clients.QueuedJudgeClient(url, max_batch_size=8, max_workers=2) as client:
        client.submit(programs)
        assert [result.success for _, result in client.get_results()] == [n == 7 for n in range(20)]


@needs_code_judge
@pytest.mark.asyncio(loop_scope="module")
async def test_the_asynchronous_clients_of_code_judge_run_unchanged(url: str) -> None:
    clients = import_file(Path(str(CODE_JUDGE)) / "judge_client.py")
    programs = [clients.Submission(sub_id=None, type="python", solution=f"print({n})") for n in range(5)]
    async with clients.QueuedAsyncJudgeClient(url, max_workers=2) as client:
        await client.submit(programs)
        assert [result.stdout for _, result in await client.get_results()] == [f"{n}\n" for n in range(5)]


@needs_code_judge
def test_the_quick_test_of_code_judge_passes_for_python(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = import_file(Path(str(CODE_JUDGE)) / "quick_test.py")
    send = quick.requests.post
    monkeypatch.setattr(quick.requests, "post", lambda address, **body: send(address.replace(OWN_URL, url), **body))
    for route in ("run", "judge"):
        for check in ("python", "python_timeout", "batch_timeout", "multi_process", "io_valid", "io_invalid"):
            getattr(quick, f"test_{check}")(route)


OWN_URL = "http://localhost:8000"
"""The address to which the quick test of code-judge sends its requests."""


@pytest.mark.asyncio
async def test_status_and_ping_answer_as_code_judge() -> None:
    async with serving(fakes.FakeFleet(slots=3, window=3)) as served:
        assert json.loads((await served.get("/ping"))[1]) == "pong"
        assert json.loads((await served.get("/status"))[1]) == {"queue": 0, "num_workers": 3}
        waiting = asyncio.create_task(served.post("/run/batch", {"submissions": [{**PROGRAM, "solution": "hang"}] * 7}))
        await until(lambda: served.dispatcher.call_table.waiting == 4)
        state = json.loads((await served.get("/status"))[1])
        assert state == {"queue": 4, "num_workers": 3}
        assert_fits(state, SCHEMAS["CodeJudgeStatus"])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: not served.dispatcher.call_table.waiting)


@pytest.mark.asyncio
async def test_a_submission_becomes_a_call_with_the_limits_of_code_judge() -> None:
    async with serving() as served:
        status, answer = await served.post(
            "/run", {**PROGRAM, "input": "line", "sub_id": "mine", "options": {"a": "b"}}
        )
        (call,) = served.fleet.last_executor.calls.values()
        _, nameless = await served.post("/run", {**PROGRAM, "sub_id": None, "input": None})
    assert (status, answer["sub_id"], answer["stdout"]) == (200, "mine", "hello")
    limits = {"timeout_s": 9.95, "memory_mb": 384, "output_kb": 4096}
    assert call == {"code": "hello", "stdin": "line", "echo": False, "limits": limits}
    assert len(nameless["sub_id"]) == 36


@pytest.mark.asyncio
async def test_limits_above_the_maximum_of_the_operator_are_lowered() -> None:
    async with serving(max_limits=Limits(timeout_s=2, memory_mb=100, output_kb=8192)) as served:
        await served.post("/judge", PROGRAM)
        (call,) = served.fleet.last_executor.calls.values()
    assert call["limits"] == {"timeout_s": 2, "memory_mb": 100, "output_kb": 4096}


@pytest.mark.asyncio
async def test_answers_are_in_the_order_of_the_submissions() -> None:
    async with serving() as served:
        submissions = [{**PROGRAM, "solution": f"{n}", "sub_id": f"s{n}", "expected_output": "7"} for n in range(600)]
        _, ran = await served.post("/run/long-batch", {"submissions": submissions, "sub_id": "all"})
        _, judged = await served.post("/judge/batch", {"submissions": submissions})
    assert ran["sub_id"] == "all"
    assert [(r["sub_id"], r["stdout"]) for r in ran["results"]] == [(f"s{n}", f"{n}") for n in range(600)]
    assert [n for n, r in enumerate(judged["results"]) if r["success"]] == [7]
    assert "stdout" not in judged["results"][0]


USAGE = Usage(run_ms=12.3456789)
# The result of a call, and the fields in which the answer for this result differs from the answer for a failure.
ENDS: dict[str, tuple[Result, dict[str, Any]]] = {
    "ok": (Result("", Status.OK, "out", exit_code=0), {"success": True, "run_success": True}),
    "error": (Result("", Status.ERROR, "out", "err", exit_code=1), {"stderr": "err"}),
    "timeout": (
        Result("", Status.TIMEOUT, "out"),
        {"reason": "worker_timeout", "stdout": "outSuicide from timeout.\n"},
    ),
    "memory": (
        Result("", Status.MEMORY_LIMIT, "out", error=CallError("MemoryLimit", "used up")),
        {"stderr": "MemoryLimit: used up\n"},
    ),
    "memory error": (Result("", Status.MEMORY_LIMIT, "out", "MemoryError\n", exit_code=1), {"stderr": "MemoryError\n"}),
    "output": (
        Result("", Status.OUTPUT_LIMIT, "out", error=CallError("OutputLimit", "wrote much"), exit_code=0),
        {"stderr": "OutputLimit: wrote much\n"},
    ),
    "killed": (Result("", Status.KILLED, "out", signal=11, error=CallError("SIGSEGV", "killed")), {}),
}
FAILED = {"success": False, "run_success": False, "cost": 0.012346, "stdout": "out", "stderr": "", "reason": ""}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ENDS)
async def test_each_status_of_a_call_has_its_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, difference = ENDS[name]
    ended = Result(**{**{f: getattr(result, f) for f in result.__slots__}, "usage": USAGE})
    monkeypatch.setattr(fakes, "ok_result", lambda call: ended.encode(binary=True))
    async with serving() as served:
        _, answer = await served.post("/run", {**PROGRAM, "sub_id": "s"})
    assert answer == {"sub_id": "s", **FAILED, **difference}


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_an_unavailable_call_is_answered_with_internal_error_and_no_output(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = unavailable_result("", UnavailableReason.STARVED, "the machine is overloaded")
    monkeypatch.setattr(fakes, "ok_result", lambda call: lost.encode(binary=True))
    program = {**PROGRAM, "expected_output": ""}
    async with serving() as served:
        status, body = await served.post(path, {"submissions": [program]} if "batch" in path else program)
    answer = body["results"][0] if "batch" in path else body
    assert (status, answer["reason"], answer["success"], answer["run_success"]) == (200, "internal_error", False, False)
    assert [answer.get("stdout"), answer.get("stderr")] == [None, None]


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_a_submission_that_waits_too_long_for_a_slot_gets_queue_timeout(path: str) -> None:
    async with serving(fakes.FakeFleet(slots=1, window=1), queue_timeout_s=0.05) as served:
        running = asyncio.create_task(served.post("/run", {**PROGRAM, "solution": "hang"}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        status, reply = await served.post(path, {"submissions": [PROGRAM]} if "batch" in path else PROGRAM)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    answer = reply["results"][0] if "batch" in path else reply
    assert (status, answer["reason"], answer["success"]) == (200, "queue_timeout", False)
    assert answer["cost"] >= 0.05


@pytest.mark.asyncio
async def test_submissions_wait_four_seconds_for_a_slot_and_those_of_long_batches_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as served:
        batches: list[Batch] = []
        submit = served.dispatcher.submit
        monkeypatch.setattr(served.dispatcher, "submit", lambda batch: (batches.append(batch), submit(batch)))
        for path in PATHS:
            await served.post(path, {"submissions": [PROGRAM]} if "batch" in path else PROGRAM)
    assert [batch.queue_timeout_s for batch in batches] == [4, 4, 3600, 4, 4, 3600]


MALFORMED: dict[str, tuple[str, Any, list[tuple[str, list[Any]]]]] = {  # path, body, type and place of each error
    "no JSON": ("/run", b"{", [("json_invalid", ["body"])]),
    "no UTF-8": ("/run/batch", b'{"a": "\xff"}', [("json_invalid", ["body"])]),
    "a list": ("/judge", [PROGRAM], [("model_attributes_type", ["body"])]),
    "null": ("/judge/batch", b"null", [("model_attributes_type", ["body"])]),
    "C++": ("/run", {"type": "cpp", "solution": ""}, [("literal_error", ["body", "type"])]),
    "no fields": ("/judge", {}, [("missing", ["body", "type"]), ("missing", ["body", "solution"])]),
    "null solution": ("/run", {**PROGRAM, "solution": None}, [("string_type", ["body", "solution"])]),
    "a number": ("/run", {**PROGRAM, "input": 5}, [("string_type", ["body", "input"])]),
    "options": ("/run", {**PROGRAM, "options": {"a": 1}}, [("string_type", ["body", "options", "a"])]),
    "options list": ("/run", {**PROGRAM, "options": []}, [("dict_type", ["body", "options"])]),
    "long id": ("/run", {**PROGRAM, "sub_id": "x" * 9999}, [("string_too_long", ["body", "sub_id"])]),
    "no batch": ("/run/batch", PROGRAM, [("literal_error", ["body", "type"]), ("missing", ["body", "submissions"])]),
    "empty": ("/judge/long-batch", {"submissions": []}, [("too_short", ["body", "submissions"])]),
    "text": ("/run/batch", {"submissions": "a"}, [("list_type", ["body", "submissions"])]),
    "one of two": (
        "/run/long-batch",
        {"submissions": [PROGRAM, {"type": "cpp", "solution": 1}]},
        [
            ("literal_error", ["body", "submissions", 1, "type"]),
            ("string_type", ["body", "submissions", 1, "solution"]),
        ],
    ),
    "bytes": ("/run", msgpack.packb({**PROGRAM, "input": b"a"}), [("string_type", ["body", "input"])]),
    "batch id": ("/run/batch", {"submissions": [PROGRAM], "sub_id": 1}, [("string_type", ["body", "sub_id"])]),
    "long batch id": (
        "/run/batch",
        {"submissions": [PROGRAM], "sub_id": "x" * (MAX_SUB_ID_CHARS + 1)},
        [("string_too_long", ["body", "sub_id"])],
    ),
    "many": ("/run/batch", {"submissions": [1] * 9999}, [("model_attributes_type", ["body", "submissions", 0])]),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_body_is_answered_with_422_in_the_form_of_fastapi(name: str) -> None:
    path, body, expected = MALFORMED[name]
    async with serving() as served:
        content_type = "application/msgpack" if name == "bytes" else "application/json"
        status, reply = await served.post(path, body, Content_Type=content_type)
        assert (status, served.dispatcher.counters.refused) == (422, {422: 1})
        assert not served.fleet.last_executor.calls
    assert_fits(reply, SCHEMAS["Malformed"])
    errors = [(error["type"], error["loc"]) for error in reply["detail"]]
    assert errors[: len(expected)] == expected
    assert len(errors) == (MAX_ERRORS if name == "many" else len(expected))


@pytest.mark.asyncio
async def test_a_batch_with_too_many_submissions_is_answered_with_413() -> None:
    async with serving(batch_calls=2) as served:
        status, reply = await served.post("/run/batch", {"submissions": [PROGRAM] * 3})
    assert status == 413
    assert "expected at most 2, got 3" in reply["error"]["message"]


@pytest.mark.asyncio
async def test_a_full_queue_answers_a_submission_with_429() -> None:
    async with serving(queue_calls=1) as served:
        waiting = asyncio.create_task(served.post("/run", {**PROGRAM, "solution": "hang"}))
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 1)
        status, reply = await served.post("/run", PROGRAM)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert (status, reply["error"]["type"]) == (429, "Overloaded")


@pytest.mark.asyncio
async def test_a_submission_whose_expected_output_does_not_fit_in_the_queue_is_answered_with_429() -> None:
    program = {**PROGRAM, "solution": "hang", "expected_output": "x" * 700_000}
    async with serving(queue_mb=1, body_mb=1, tenant_share=1) as served:  # room for one such expected output
        first = asyncio.create_task(served.post("/judge", program))
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 1)
        assert served.dispatcher.call_table.outstanding.bytes > 700_000
        status, _ = await served.post("/judge", program)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: not served.dispatcher.call_table.outstanding.bytes)
    assert status == 429


@pytest.mark.asyncio
async def test_long_outputs_do_not_stay_in_memory_until_the_batch_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Result("", Status.OK, "x" * 900_000, exit_code=0).encode(binary=True)
    monkeypatch.setattr(fakes, "ok_result", lambda call: {**printed, "usage": dict(printed["usage"])})
    programs = [PROGRAM] * 20
    async with serving(results_mb=1) as served:
        hanging = [*programs, {**PROGRAM, "solution": "hang"}]
        request = asyncio.create_task(served.post("/run/long-batch", {"submissions": hanging}))
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 1)
        unread_bytes = served.dispatcher.call_table.unread_result_bytes
        assert unread_bytes < len(programs) * 4000, f"{unread_bytes} bytes of outputs are kept, more than 4000 each"
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        _, body = await served.post("/run/long-batch", {"submissions": programs})
    assert {(answer["reason"], len(answer["stdout"])) for answer in body["results"]} == {("", 1000)}


@pytest.mark.asyncio
async def test_the_submissions_of_a_request_are_freed_without_a_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[weakref.ref[code_judge.Submissions]] = []
    init = code_judge.Submissions.__init__

    def remember(self: code_judge.Submissions, *args: Any) -> None:
        init(self, *args)
        batches.append(weakref.ref(self))

    monkeypatch.setattr(code_judge.Submissions, "__init__", remember)
    gc.disable()
    try:
        async with serving() as served:
            await served.post("/run/batch", {"submissions": [PROGRAM] * 3})
            await until(lambda: batches[0]() is None)
    finally:
        gc.enable()
