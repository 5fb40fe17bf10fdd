"""The routes of code-judge (commit fbc5293), so that its clients run unchanged: rStar2-Agent's tool and reward, and the
clients of code-judge's `judge_client.py`.

- `reason` is empty if the code ended by itself or by its own fault, whatever it did. A failure of the service is
  `queue_timeout` or `internal_error`, and a time limit that the code reached is `worker_timeout`.
- A result is shortened as soon as it arrives, so a batch keeps at most `MAX_TEXT_CHARS` of each text. What a request
  keeps besides its calls counts as part of their size.
- Unknown fields and `options` are ignored, as code-judge does.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from aiohttp import web

from sandbox.config import ServeConfig
from sandbox.errors import RequestRefused
from sandbox.fields import shown
from sandbox.gateway.calls.batch import Batch, result_bytes
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.codec import JSON, Json
from sandbox.gateway.http.errors import HttpError
from sandbox.gateway.http.exchange import DISPATCHER
from sandbox.gateway.http.openapi import Route, Schema
from sandbox.gateway.http.validation import CALLS_PER_YIELD, ParsedBatch
from sandbox.types import MAX_CODE_CHARS, MAX_STDIN_CHARS, Call, EncodedResult, Limits, Status

LIMITS = Limits(timeout_s=10.0, memory_mb=384, output_kb=4096)
"""`MAX_EXECUTION_TIME`, and `MAX_MEMORY` with the 128 MiB that code-judge adds to it. code-judge has no limit of the
output; what exceeds this one is `output_limit`."""
MAX_TEXT_CHARS = 1000
"""Characters of stdout and of stderr that are returned."""
QUEUE_TIMEOUT_S = 4.0
"""Seconds after which a call that still waits for a slot gets `queue_timeout`."""
LONG_QUEUE_TIMEOUT_S = 3600.0
"""The same for long batches."""
TIMEOUT_TEXT = "Suicide from timeout.\n"
"""What code-judge appends to the stdout of a call that reached its time limit."""
MAX_SUB_ID_CHARS = 1024
MAX_ERRORS = 100
"""Errors that the response to a malformed body lists."""
KEPT_RESULT_BYTES = 1024 + 2 * MAX_TEXT_CHARS
"""Bytes of a result that a batch keeps until its response, as `result_bytes` counts them."""

Fields = dict[str, Any]


class Mode(NamedTuple):
    """What distinguishes the routes that run code."""

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
            errors += _submission_errors(item, ("submissions", index) if self._mode.is_batch else ())
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
        if errors := list(_batch_errors(raw)):
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
        """Keep what the answer needs of a submission. Returns its approximate size in bytes."""
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
        error = result["error"]  # nothing else in the answer says why the call has failed
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
            await exchange.wait_for_results(batch)
            batch.on_result = None  # it refers to the batch, and the cycle would keep the answers in memory
            body = await _encode(submissions, mode)
            return await exchange.respond(request, 200, body, JSON)
    except MalformedBody as error:
        errors = error.errors
    except HttpError as error:
        if error.status != 400:
            raise
        errors = [_error("json_invalid", (), str(error), {})]
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


_TEXT_FIELDS = {
    "solution": MAX_CODE_CHARS,
    "input": MAX_STDIN_CHARS,
    "expected_output": None,
    "sub_id": MAX_SUB_ID_CHARS,
}
"""Fields of a submission that are text, with their maximum length. All except `solution` may be null."""


def _submission_errors(raw: Json, location: tuple[str | int, ...]) -> Iterator[Fields]:
    if not isinstance(raw, Mapping):
        yield _not_an_object(raw, location)
        return
    if "type" not in raw:
        yield _missing("type", raw, location)
    elif raw["type"] != "python":
        yield _not_one_of("python", raw["type"], (*location, "type"))
    if "solution" not in raw:
        yield _missing("solution", raw, location)
    for name, max_chars in _TEXT_FIELDS.items():
        value = raw.get(name)
        if isinstance(value, str):
            if max_chars is not None and len(value) > max_chars:
                yield _too_long(value, max_chars, (*location, name))
        elif value is not None or (name == "solution" and name in raw):
            yield _not_text(value, (*location, name))
    options = raw.get("options")
    if options is not None:
        yield from _options_errors(options, (*location, "options"))


def _options_errors(options: Json, location: tuple[str | int, ...]) -> Iterator[Fields]:
    if not isinstance(options, Mapping):
        yield _error("dict_type", location, "Input should be a valid dictionary", options)
        return
    for name, value in options.items():
        if not isinstance(value, str):
            yield _not_text(value, (*location, name[:MAX_TEXT_CHARS]))


def _batch_errors(raw: Json) -> Iterator[Fields]:
    """Check all of a batch except its submissions."""
    if not isinstance(raw, Mapping):
        yield _not_an_object(raw, ())
        return
    sub_id = raw.get("sub_id")
    if sub_id is not None and not isinstance(sub_id, str):
        yield _not_text(sub_id, ("sub_id",))
    elif sub_id is not None and len(sub_id) > MAX_SUB_ID_CHARS:
        yield _error(
            "string_too_long", ("sub_id",), f"String should have at most {MAX_SUB_ID_CHARS} characters", sub_id
        )
    if raw.get("type", "batch") != "batch":
        yield _not_one_of("batch", raw["type"], ("type",))
    if "submissions" not in raw:
        yield _missing("submissions", raw, ())
    elif not isinstance(raw["submissions"], list):
        yield _error("list_type", ("submissions",), "Input should be a valid list", raw["submissions"])
    elif not raw["submissions"]:
        message = "List should have at least 1 item after validation, not 0"
        yield _error("too_short", ("submissions",), message, raw["submissions"])


def _not_an_object(value: Json, location: tuple[str | int, ...]) -> Fields:
    message = "Input should be a valid dictionary or object to extract fields from"
    return _error("model_attributes_type", location, message, value)


def _missing(name: str, raw: Json, location: tuple[str | int, ...]) -> Fields:
    return _error("missing", (*location, name), "Field required", raw)


def _not_one_of(expected: str, value: Json, location: tuple[str | int, ...]) -> Fields:
    return _error("literal_error", location, f"Input should be '{expected}'", value)


def _not_text(value: Json, location: tuple[str | int, ...]) -> Fields:
    return _error("string_type", location, "Input should be a valid string", value)


def _too_long(value: str, max_chars: int, location: tuple[str | int, ...]) -> Fields:
    return _error("string_too_long", location, f"String should have at most {max_chars} characters", value)


def _error(kind: str, location: tuple[str | int, ...], message: str, value: Json) -> Fields:
    """Return one error as FastAPI describes it, but with a shortened `input`."""
    return {"type": kind, "loc": ["body", *location], "msg": message, "input": shown(value)}


_TEXT = {"type": "string"}
_SUB_ID = {"anyOf": [{"type": "null"}, {**_TEXT, "maxLength": MAX_SUB_ID_CHARS}]}
_SUBMISSION: Schema = {
    "type": "object",
    "description": "A program of code-judge. Other fields are ignored.",
    "required": ["type", "solution"],
    "properties": {
        "sub_id": {**_SUB_ID, "description": "returned with the result; a UUID if it is missing"},
        "type": {**_TEXT, "enum": ["python"], "description": "the language"},
        "solution": {**_TEXT, "description": "Python source, run as a script"},
        "input": {"anyOf": [{"type": "null"}, _TEXT], "description": "text on standard input"},
        "expected_output": {
            "anyOf": [{"type": "null"}, _TEXT],
            "description": "what stdout must be for success, without white space at both ends",
        },
        "options": {
            "anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": _TEXT}],
            "description": "ignored",
        },
    },
}
_VERDICT: Schema = {
    "type": "object",
    "description": "How a program of code-judge ended. Look at reason first: with queue_timeout and internal_error the "
    "program has no result, and success says nothing about it.",
    "required": ["sub_id", "success", "run_success", "cost", "reason"],
    "properties": {
        "sub_id": {**_TEXT, "description": "the id of the submission"},
        "success": {"type": "boolean", "description": "run_success, and stdout is the expected output if there is one"},
        "run_success": {"type": "boolean", "description": "whether the program ended with exit code 0"},
        "cost": {"type": "number", "description": "seconds of wall time"},
        "reason": {
            **_TEXT,
            "enum": ["", "worker_timeout", "queue_timeout", "internal_error"],
            "description": "empty: the program ended; worker_timeout: it reached the time limit; queue_timeout: it "
            "waited too long and did not run; internal_error: the service failed to run it",
        },
    },
}
_RESULT: Schema = {
    **_VERDICT,
    "required": ["sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"],
    "properties": {
        **_VERDICT["properties"],
        **{
            name: {
                "anyOf": [{"type": "null"}, {**_TEXT, "maxLength": MAX_TEXT_CHARS}],
                "description": f"the first {MAX_TEXT_CHARS} characters of {name}; null if the program has no result",
            }
            for name in ("stdout", "stderr")
        },
    },
}


def _batch_schema(field: str, item: str, description: str, sub_id: Schema) -> Schema:
    items = {"type": "array", "items": {"$ref": f"#/components/schemas/{item}"}, "minItems": 1}
    return {
        "type": "object",
        "description": description,
        "required": [field],
        "properties": {
            "sub_id": {**sub_id, "description": "the id of the batch"},
            field: {**items, "description": "one for each submission, in their order"},
        },
    }


_BATCH = _batch_schema("submissions", "CodeJudgeSubmission", "Programs. Other fields are ignored.", _SUB_ID)
_BATCH["properties"]["type"] = {**_TEXT, "enum": ["batch"], "default": "batch", "description": "always batch"}
_STATUS: Schema = {
    "type": "object",
    "description": "The load of the server.",
    "required": ["queue", "num_workers"],
    "properties": {
        "queue": {"type": "integer", "description": "calls that wait for a slot"},
        "num_workers": {"type": "integer", "description": "calls that can run at once"},
    },
}
_MALFORMED: Schema = {
    "type": "object",
    "description": "A malformed body, described as FastAPI does.",
    "required": ["detail"],
    "properties": {
        "detail": {
            "type": "array",
            "description": f"the first {MAX_ERRORS} errors",
            "items": {
                "type": "object",
                "required": ["type", "loc", "msg", "input"],
                "properties": {
                    "type": _TEXT,
                    "loc": {"type": "array", "items": {"anyOf": [_TEXT, {"type": "integer"}]}},
                    "msg": _TEXT,
                    "input": _TEXT,
                },
            },
        }
    },
}
_SCHEMAS: Mapping[str, Schema] = {
    "CodeJudgeSubmission": _SUBMISSION,
    "CodeJudgeBatch": _BATCH,
    "CodeJudgeResult": _RESULT,
    "CodeJudgeResults": _batch_schema("results", "CodeJudgeResult", "The response to a batch.", _TEXT),
    "CodeJudgeVerdict": _VERDICT,
    "CodeJudgeVerdicts": _batch_schema("results", "CodeJudgeVerdict", "The response to a batch.", _TEXT),
    "CodeJudgeStatus": _STATUS,
    "CodeJudgeMalformed": _MALFORMED,
}
_EXAMPLE = {"type": "python", "solution": "print(int(input()) + 1)", "input": "41", "expected_output": "42"}
_EXAMPLE_VERDICT = {"sub_id": "a", "success": True, "run_success": True, "cost": 0.0021, "reason": ""}
_EXAMPLE_RESULT = {**_EXAMPLE_VERDICT, "stdout": "42\n", "stderr": ""}
_EXAMPLES: Mapping[str, Any] = {
    "CodeJudgeSubmission": {"sub_id": "a", **_EXAMPLE},
    "CodeJudgeBatch": {"type": "batch", "submissions": [_EXAMPLE, {"type": "python", "solution": "print(1)"}]},
    "CodeJudgeResult": _EXAMPLE_RESULT,
    "CodeJudgeResults": {"sub_id": "b", "results": [_EXAMPLE_RESULT]},
    "CodeJudgeVerdict": _EXAMPLE_VERDICT,
    "CodeJudgeVerdicts": {"sub_id": "b", "results": [_EXAMPLE_VERDICT]},
    "CodeJudgeStatus": {"queue": 0, "num_workers": 32},
    "CodeJudgeMalformed": {"detail": [_error("missing", ("solution",), "Field required", {})]},
}
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
        schemas=_SCHEMAS,
        examples=_EXAMPLES,
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
