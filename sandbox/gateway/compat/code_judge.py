"""The routes of code-judge (commit fbc5293). Its clients run unchanged: rStar2-Agent's tool and reward, and the client
classes in code-judge's file `judge_client.py`.

- `reason` is `worker_timeout` if the code reached its time limit, and `queue_timeout` or `internal_error` if the
  service failed. Otherwise it is empty: the code ended, perhaps with an error or at its memory or output limit.
- A result is shortened as soon as it arrives, so a batch keeps at most `MAX_TEXT_CHARS` of each text. A request also
  keeps the id and the expected output of each submission. The size of a call includes these two texts.
- Unknown fields and `options` are ignored, as code-judge does.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from aiohttp import web

from sandbox.errors import RequestRefused
from sandbox.gateway.calls.batch import Batch, result_bytes
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.compat.fastapi_bodies import (
    MAX_ERRORS,
    Error,
    Location,
    MalformedBody,
    ping_route,
    route,
    validate,
)
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.auth import TENANT
from sandbox.gateway.http.codec import JSON, Json
from sandbox.gateway.http.exchange import DISPATCHER
from sandbox.gateway.http.openapi import Route
from sandbox.gateway.http.validation import BatchHead, CallsForm, CheckedCall, Item
from sandbox.types import Call, EncodedResult, Limits, Status, check_call, memory_bytes

LIMITS = Limits(timeout_s=9.95, memory_mb=384, output_kb=4096)
"""The default limits of code-judge: 10 s, and 384 MiB (256 MiB to which it adds 128 MiB). code-judge does not limit the
output. The time here is 50 ms lower. It is virtual time (wall time without waiting for a core), which is not measured
exactly, and `sleep(10)` must exceed the limit here too."""
QUEUE_TIMEOUT_S = 4.0
"""Seconds after which a call that still waits for a slot gets `queue_timeout`."""
LONG_QUEUE_TIMEOUT_S = 3600.0
"""Seconds after which a call of a long batch that still waits for a slot gets `queue_timeout`."""
TIMEOUT_TEXT = "Suicide from timeout.\n"
"""Text that code-judge appends to the stdout of a program that reached its time limit."""
MAX_TEXT_CHARS = 1000
"""Maximum characters of stdout, and of stderr, that are returned."""
KEPT_RESULT_BYTES = 1024 + 2 * MAX_TEXT_CHARS
"""Bytes that a shortened result counts as until the response is sent. As in `result_bytes`, the mapping counts 1024
bytes, and an ASCII text one byte for each character."""

Answer = dict[str, Any]

_SHARED_FIELDS = Call("", echo=False, limits=LIMITS).encode(binary=True)
"""The fields that all calls share."""


class Mode(NamedTuple):
    """The differences between the routes that run code."""

    is_batch: bool
    with_output: bool
    """Whether results have stdout and stderr."""
    queue_timeout_s: float


class SubmissionForm(CallsForm):
    """The body of one submission. `CheckedCall.extra` has what the answer needs: the id and the expected output."""

    max_wait_s = QUEUE_TIMEOUT_S
    """Maximum of the batch's `queue_timeout_s`. `_run` replaces this value by the `queue_timeout_s` of the route."""

    def check(self, raw: Json) -> Iterator[Item]:
        """Yield the items of a decoded body. Raises `MalformedBody` or `RequestRefused`."""
        yield BatchHead(1, self.config.queue_timeout_s, defaults=_SHARED_FIELDS)
        yield from self._check_submissions([(raw, ())])

    def add(self, item: Item) -> None:
        if isinstance(item, BatchHead):
            self.sub_ids: list[str] = []
            self.expected_outputs: list[str | None] = []
            item = item._replace(queue_timeout_s=min(item.queue_timeout_s, self.max_wait_s))
        super().add(item)
        if isinstance(item, CheckedCall) and self.batch is not None:
            sub_id, expected_output = item.extra
            self.sub_ids.append(sub_id or str(uuid.uuid4()))
            self.expected_outputs.append(expected_output)
            self.batch.calls[-1].size_bytes += memory_bytes(self.sub_ids[-1]) + memory_bytes(expected_output or "")

    def _check_submissions(self, items: Iterable[tuple[Json, Location]]) -> Iterator[Item]:
        """Check submissions. Each item is a submission and its location in the body."""
        from sandbox.gateway.compat.models import CodeJudgeSubmission  # here, because importing pydantic takes 0.2 s

        errors: list[Error] = []
        for index, (item, location) in enumerate(items):
            try:
                submission = validate(CodeJudgeSubmission, item, location)
            except MalformedBody as error:
                errors += error.errors
                if len(errors) >= MAX_ERRORS:
                    break
                continue
            if not errors:
                call = check_call({"code": submission.solution, "stdin": submission.input or ""})
                yield CheckedCall(index, call, call_id="", extra=[submission.sub_id, submission.expected_output])
        if errors:
            raise MalformedBody(errors[:MAX_ERRORS])


class SubmissionsForm(SubmissionForm):
    """The body of a batch of submissions. `BatchHead.extra` is the id of the batch."""

    def check(self, raw: Json) -> Iterator[Item]:
        """Yield the items of a decoded body. Raises `MalformedBody` or `RequestRefused`. If a field of the batch is
        malformed, the submissions are not checked."""
        from sandbox.gateway.compat.models import CodeJudgeBatch  # here, because importing pydantic takes 0.2 s

        body = validate(CodeJudgeBatch, raw)
        items, max_items = body.submissions, self.config.batch_calls
        if len(items) > max_items:
            raise RequestRefused(
                f"submissions: expected at most {max_items}, got {len(items)}; "
                "send several batches, or start the server with a larger --batch-calls"
            )
        yield BatchHead(len(items), self.config.queue_timeout_s, defaults=_SHARED_FIELDS, extra=body.sub_id)
        yield from self._check_submissions((item, ("submissions", index)) for index, item in enumerate(items))


class Submissions:
    """The submissions of one request, and their answers as they arrive."""

    def __init__(
        self, mode: Mode, dispatcher: Dispatcher, form: SubmissionForm, batch: Batch, started_at: float
    ) -> None:
        self._mode = mode
        self._dispatcher = dispatcher
        self._started_at = started_at
        self._sub_id = form.head.extra or str(uuid.uuid4())
        """The id of the batch. Not used for a single submission."""
        self._sub_ids = form.sub_ids
        self._expected_outputs = form.expected_outputs
        self._answers: list[Answer] = [{}] * len(batch.results)
        """An answer for each submission; empty until it arrives."""
        batch.on_result = partial(self._on_result, batch)

    def _on_result(self, batch: Batch, index: int) -> None:
        result = batch.pop_result(index)
        expected_output, self._expected_outputs[index] = self._expected_outputs[index], None
        if result["status"] == Status.UNAVAILABLE.value:
            answer = _unavailable_answer(result, monotonic() - self._started_at)
        else:
            answer = _answer(result, expected_output)
        if not self._mode.with_output:
            del answer["stdout"], answer["stderr"]
        self._answers[index] = {"sub_id": self._sub_ids[index], **answer}
        dropped = result_bytes(result) - KEPT_RESULT_BYTES
        if dropped > 0:
            self._dispatcher.call_table.results_read(batch, dropped)

    async def encode(self) -> list[bytes]:
        """Return the parts of the response, once all answers are there."""
        if not self._mode.is_batch:
            return [codec.encode(self._answers[0], JSON)]
        return await codec.encode_results(self._answers, len(self._answers), JSON, {"sub_id": self._sub_id})


def _unavailable_answer(result: EncodedResult, waited_s: float) -> Answer:
    """Return the answer to a call that the service has not run."""
    error = result["error"]
    is_queue_timeout = error is not None and error["type"] == "QueueTimeout"
    return {
        "success": False,
        "run_success": False,
        "cost": round(waited_s, 6),
        "stdout": None,
        "stderr": None,
        "reason": "queue_timeout" if is_queue_timeout else "internal_error",
    }


def _answer(result: EncodedResult, expected_output: str | None) -> Answer:
    """Return the answer to a call that ran, with stdout and stderr."""
    status, stdout, stderr = result["status"], result["stdout"], result["stderr"]
    is_ok, is_timeout = status == Status.OK.value, status == Status.TIMEOUT.value
    if is_timeout:
        # In an answer of code-judge too, `MAX_TEXT_CHARS` include this text, so long output leaves no room for it.
        stdout = stdout[:MAX_TEXT_CHARS] + TIMEOUT_TEXT
    elif not stderr and status in (Status.MEMORY_LIMIT.value, Status.OUTPUT_LIMIT.value):
        error = result["error"]  # no other field of the answer says why the call has failed
        stderr = f"{error['type']}: {error['message']}\n" if error else ""
    return {
        "success": is_ok and (expected_output is None or stdout.strip() == expected_output.strip()),
        "run_success": is_ok,
        "cost": round(result["usage"]["run_ms"] / 1000, 6),
        "stdout": stdout[:MAX_TEXT_CHARS],
        "stderr": stderr[:MAX_TEXT_CHARS],
        "reason": "worker_timeout" if is_timeout else "",
    }


async def _run(request: web.Request, mode: Mode) -> web.StreamResponse:
    dispatcher, started_at = request.app[DISPATCHER], monotonic()
    form = (SubmissionsForm if mode.is_batch else SubmissionForm)(dispatcher.config, request[TENANT])
    form.max_wait_s = mode.queue_timeout_s
    async with exchange.AdmittedBatch(request, form) as (batch, _content_type, _status):
        submissions = Submissions(mode, dispatcher, form, batch, started_at)
        try:
            await exchange.wait_for_results(batch)
        finally:
            batch.on_result = None  # it refers to the batch, and the cycle would keep both in memory
        return await exchange.respond(request, 200, await submissions.encode(), JSON)


async def status(request: web.Request) -> web.Response:
    dispatcher = request.app[DISPATCHER]
    ready = [executor.ready_report for executor in dispatcher.executors if executor.is_ready]
    num_workers = sum(report.slots for report in ready if report)
    return web.json_response({"queue": dispatcher.call_table.waiting, "num_workers": num_workers})


_SUBMISSION = {
    "sub_id": "a",
    "type": "python",
    "solution": "print(int(input()) + 1)",
    "input": "41",
    "expected_output": "42",
}
_VERDICT = {"sub_id": "a", "success": True, "run_success": True, "cost": 0.0021, "reason": ""}
_RESULT = {**_VERDICT, "stdout": "42\n", "stderr": ""}
EXAMPLES: Mapping[str, Any] = {
    "CodeJudgeSubmission": _SUBMISSION,
    "CodeJudgeBatch": {"type": "batch", "sub_id": "b", "submissions": [_SUBMISSION]},
    "CodeJudgeResult": _RESULT,
    "CodeJudgeResults": {"sub_id": "b", "results": [_RESULT]},
    "CodeJudgeVerdict": _VERDICT,
    "CodeJudgeVerdicts": {"sub_id": "b", "results": [_VERDICT]},
    "CodeJudgeStatus": {"queue": 0, "num_workers": 32},
}
"""Examples by the name of their schema."""


def _route(path: str, summary: str, is_batch: bool, queue_timeout_s: float) -> Route:
    with_output = path.startswith("/run")
    return route(
        path,
        partial(_run, mode=Mode(is_batch, with_output, queue_timeout_s)),
        f"{summary}, with the interface of code-judge",
        "CodeJudgeBatch" if is_batch else "CodeJudgeSubmission",
        ("CodeJudgeResult" if with_output else "CodeJudgeVerdict") + ("s" if is_batch else ""),
        (429, 503),
        EXAMPLES,
    )


_LOAD = "The load, with the interface of code-judge"
ROUTES = (
    _route("/run", "Run a program", False, QUEUE_TIMEOUT_S),
    _route("/run/batch", f"Run programs that wait at most {QUEUE_TIMEOUT_S:g} s", True, QUEUE_TIMEOUT_S),
    _route("/run/long-batch", "Run programs that may wait an hour", True, LONG_QUEUE_TIMEOUT_S),
    _route("/judge", "Run a program and compare its output", False, QUEUE_TIMEOUT_S),
    _route("/judge/batch", f"Judge programs that wait at most {QUEUE_TIMEOUT_S:g} s", True, QUEUE_TIMEOUT_S),
    _route("/judge/long-batch", "Judge programs that may wait an hour", True, LONG_QUEUE_TIMEOUT_S),
    Route("GET", "/status", status, _LOAD, {JSON: "CodeJudgeStatus"}, error_statuses=(401, 403), examples=EXAMPLES),
    ping_route("/ping", "Liveness, as code-judge answers it"),
)
