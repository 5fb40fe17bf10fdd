"""The routes of code-judge (commit fbc5293), so that its clients run unchanged: rStar2-Agent's tool and reward, and the
clients of code-judge's `judge_client.py`.

- `reason` is empty if the code ended, also with an error or beyond its memory or output limit. It is `worker_timeout`
  if the code reached its time limit, and `queue_timeout` or `internal_error` if the service failed.
- A result is shortened as soon as it arrives, so a batch keeps at most `MAX_TEXT_CHARS` of each text. The ids and the
  expected outputs that a request keeps count as part of the size of its calls.
- Unknown fields and `options` are ignored, as code-judge does.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

from aiohttp import web

from sandbox.config import ServeConfig
from sandbox.errors import RequestRefused
from sandbox.gateway.calls.batch import Batch, result_bytes
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.code_judge_fields import (
    EXAMPLES,
    MAX_ERRORS,
    MAX_TEXT_CHARS,
    SCHEMAS,
    Fields,
    batch_errors,
    field_error,
    submission_errors,
)
from sandbox.gateway.http.codec import JSON, Json
from sandbox.gateway.http.errors import HttpError
from sandbox.gateway.http.exchange import DISPATCHER
from sandbox.gateway.http.openapi import Route
from sandbox.gateway.http.validation import CALLS_PER_YIELD, ParsedBatch
from sandbox.types import Call, EncodedResult, Limits, Status

LIMITS = Limits(timeout_s=9.95, memory_mb=384, output_kb=4096)
"""code-judge's default limits: 10 s, and 256 MiB to which it adds 128 MiB. The time is 50 ms lower, because
`sleep(10)` exceeds the limit in code-judge, and virtual time is measured with an error. code-judge has no limit of the
output."""
QUEUE_TIMEOUT_S = 4.0
"""Seconds after which a call that still waits for a slot gets `queue_timeout`."""
LONG_QUEUE_TIMEOUT_S = 3600.0
"""The same for long batches."""
TIMEOUT_TEXT = "Suicide from timeout.\n"
"""Text that code-judge appends to the stdout of a program that reached its time limit."""
KEPT_RESULT_BYTES = 1024 + 2 * MAX_TEXT_CHARS
"""Bytes of a result that a batch keeps until its response, as `result_bytes` counts them."""


class Mode(NamedTuple):
    """The differences between the routes that run code."""

    is_batch: bool
    with_output: bool
    """Whether results have stdout and stderr."""
    queue_timeout_s: float


class MalformedBody(Exception):
    """A body that is refused with 422. `errors` describe it as FastAPI does."""

    def __init__(self, errors: list[Fields]) -> None:
        super().__init__(errors[0]["msg"])
        self.errors = errors


class Submissions:
    """The submissions of one request, and their answers as they arrive."""

    def __init__(self, mode: Mode, dispatcher: Dispatcher) -> None:
        self._mode = mode
        self._dispatcher = dispatcher
        self._started_at = monotonic()
        self.sub_id = ""
        """The id of a batch."""
        self._sub_ids: list[str] = []
        self._expected_outputs: list[str | None] = []
        self.answers: list[Fields] = []
        """An answer for each submission; empty until it arrives."""

    async def parse(self, raw: Json, config: ServeConfig) -> ParsedBatch:
        """Build the batch of calls. Raises `MalformedBody` or `RequestRefused`."""
        items = self._items(raw, config.batch_calls)
        limits, clamped = LIMITS.clamped(config.max_limits)
        template = Call("", echo=False, limits=limits)
        batch = Batch(len(items), min(self._mode.queue_timeout_s, config.queue_timeout_s))
        errors: list[Fields] = []
        for index, item in enumerate(items):
            if index % CALLS_PER_YIELD == CALLS_PER_YIELD - 1:
                await asyncio.sleep(0)
            found = submission_errors(item, ("submissions", index) if self._mode.is_batch else ())
            errors += islice(found, MAX_ERRORS)
            if len(errors) > MAX_ERRORS:
                break
            if not errors:
                call = Call.decode({"code": item["solution"], "stdin": item.get("input") or ""}, template)
                batch.add(index, call, "", clamped)
                batch.calls[-1].size_bytes += self._keep(item)
        if errors:
            raise MalformedBody(errors[:MAX_ERRORS])
        self.answers = [{}] * len(items)
        batch.on_result = partial(self._on_result, batch)
        return ParsedBatch(batch, 0)

    def _items(self, raw: Json, max_items: int) -> list[Json]:
        if not self._mode.is_batch:
            return [raw]
        if errors := list(batch_errors(raw)):
            raise MalformedBody(errors)
        self.sub_id = raw.get("sub_id") or str(uuid.uuid4())
        items: list[Json] = raw["submissions"]
        if len(items) > max_items:
            raise RequestRefused(
                f"submissions: expected at most {max_items}, got {len(items)}; "
                "send several batches, or start the server with a larger --batch-calls"
            )
        return items

    def _keep(self, item: Mapping[str, Any]) -> int:
        """Keep the fields of a submission that its answer needs. Returns their approximate size in bytes."""
        sub_id = item.get("sub_id") or str(uuid.uuid4())
        expected_output: str | None = item.get("expected_output")
        self._sub_ids.append(sub_id)
        self._expected_outputs.append(expected_output)
        return len(sub_id) + len(expected_output or "")

    def _on_result(self, batch: Batch, index: int) -> None:
        result = batch.pop_result(index)
        expected_output, self._expected_outputs[index] = self._expected_outputs[index], None
        if result["status"] == Status.UNAVAILABLE.value:
            answer = _unavailable_answer(result, monotonic() - self._started_at)
        else:
            answer = _answer(result, expected_output)
        if not self._mode.with_output:
            del answer["stdout"], answer["stderr"]
        self.answers[index] = {"sub_id": self._sub_ids[index], **answer}
        dropped = result_bytes(result) - KEPT_RESULT_BYTES
        if dropped > 0:
            self._dispatcher.call_table.results_read(batch, dropped)


def _unavailable_answer(result: EncodedResult, waited_s: float) -> Fields:
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


def _answer(result: EncodedResult, expected_output: str | None) -> Fields:
    """Return the answer to a call that ran, with both texts."""
    status, stdout, stderr = result["status"], result["stdout"], result["stderr"]
    is_ok, is_timeout = status == Status.OK.value, status == Status.TIMEOUT.value
    if is_timeout:
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
    dispatcher = request.app[DISPATCHER]
    try:
        submissions = Submissions(mode, dispatcher)
        async with exchange.admitted_batch(request, submissions.parse) as (batch, _, _):
            try:
                await exchange.wait_for_results(batch)
            finally:
                batch.on_result = None  # it refers to the batch, and the cycle would keep both in memory
            body = await _encode(submissions, mode)
            return await exchange.respond(request, 200, body, JSON)
    except MalformedBody as error:
        errors = error.errors
    except HttpError as error:
        if error.status != 400:
            raise
        errors = [field_error("json_invalid", (), str(error), {})]
    dispatcher.counters.refused[422] += 1
    return await exchange.respond(request, 422, codec.encode({"detail": errors}, JSON), JSON)


async def _encode(submissions: Submissions, mode: Mode) -> bytes:
    if not mode.is_batch:
        return codec.encode(submissions.answers[0], JSON)
    results = await codec.encode_results(submissions.answers, JSON)
    return b'{"sub_id":' + codec.encode(submissions.sub_id, JSON) + b"," + results[1:]


async def ping(request: web.Request) -> web.Response:
    return web.json_response("pong")


async def status(request: web.Request) -> web.Response:
    dispatcher = request.app[DISPATCHER]
    ready = [executor.ready_report for executor in dispatcher.executors if executor.is_ready]
    num_workers = sum(report.slots for report in ready if report)
    return web.json_response({"queue": dispatcher.call_table.waiting, "num_workers": num_workers})


_ERROR_STATUSES = (401, 403, 408, 413, 415, 422, 429, 503)


def _route(path: str, summary: str, is_batch: bool, queue_timeout_s: float) -> Route:
    with_output = path.startswith("/run")
    mode = Mode(is_batch, with_output, queue_timeout_s)

    async def handler(request: web.Request) -> web.StreamResponse:
        return await _run(request, mode)

    response = ("CodeJudgeResult" if with_output else "CodeJudgeVerdict") + ("s" if is_batch else "")
    return Route(
        "POST",
        path,
        handler,
        f"{summary}, with the interface of code-judge",
        {JSON: response},
        "CodeJudgeBatch" if is_batch else "CodeJudgeSubmission",
        (JSON,),
        _ERROR_STATUSES,
        error_schemas={422: "CodeJudgeMalformed"},
        schemas=SCHEMAS,
        examples=EXAMPLES,
    )


ROUTES = (
    _route("/run", "Run a program", False, QUEUE_TIMEOUT_S),
    _route("/run/batch", f"Run programs that wait at most {QUEUE_TIMEOUT_S:g} s", True, QUEUE_TIMEOUT_S),
    _route("/run/long-batch", "Run programs that may wait an hour", True, LONG_QUEUE_TIMEOUT_S),
    _route("/judge", "Run a program and compare its output", False, QUEUE_TIMEOUT_S),
    _route("/judge/batch", f"Judge programs that wait at most {QUEUE_TIMEOUT_S:g} s", True, QUEUE_TIMEOUT_S),
    _route("/judge/long-batch", "Judge programs that may wait an hour", True, LONG_QUEUE_TIMEOUT_S),
    Route(
        "GET",
        "/status",
        status,
        "The load, with the interface of code-judge",
        {JSON: "CodeJudgeStatus"},
        error_statuses=(401, 403),
    ),
    Route("GET", "/ping", ping, "Liveness, as code-judge answers it", {JSON: None}, error_statuses=(401, 403)),
)
