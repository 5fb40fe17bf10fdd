"""The fields of code-judge's requests and responses: checks of decoded bodies, and schemas for the OpenAPI document.

The errors have the form that FastAPI gives them, `{"type", "loc", "msg", "input"}`, because code-judge is written with
FastAPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sandbox.fields import shown
from sandbox.gateway.http.codec import Json
from sandbox.gateway.http.openapi import Schema
from sandbox.types import MAX_CODE_CHARS, MAX_STDIN_CHARS

MAX_TEXT_CHARS = 1000
"""Characters of stdout and of stderr that are returned."""
MAX_SUB_ID_CHARS = 1024
MAX_ERRORS = 100
"""Errors that the response to a malformed body lists."""

Fields = dict[str, Any]
Location = tuple[str | int, ...]

_TEXT_FIELDS = {
    "solution": MAX_CODE_CHARS,
    "input": MAX_STDIN_CHARS,
    "expected_output": MAX_STDIN_CHARS,
    "sub_id": MAX_SUB_ID_CHARS,
}
"""Fields of a submission that are text, with their maximum length. All except `solution` may be null."""


def submission_errors(raw: Json, location: Location) -> Iterator[Fields]:
    """Check a submission. `location` is the path to it in the body."""
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
            if len(value) > max_chars:
                yield _too_long(value, max_chars, (*location, name))
        elif value is not None or (name == "solution" and name in raw):
            yield _not_text(value, (*location, name))
    options = raw.get("options")
    if options is not None:
        yield from _options_errors(options, (*location, "options"))


def _options_errors(options: Json, location: Location) -> Iterator[Fields]:
    if not isinstance(options, Mapping):
        yield field_error("dict_type", location, "Input should be a valid dictionary", options)
        return
    for name, value in options.items():
        if not isinstance(value, str):
            yield _not_text(value, (*location, name[:MAX_TEXT_CHARS]))


def batch_errors(raw: Json) -> Iterator[Fields]:
    """Check all of a batch except its submissions."""
    if not isinstance(raw, Mapping):
        yield _not_an_object(raw, ())
        return
    sub_id = raw.get("sub_id")
    if sub_id is not None and not isinstance(sub_id, str):
        yield _not_text(sub_id, ("sub_id",))
    elif sub_id is not None and len(sub_id) > MAX_SUB_ID_CHARS:
        yield _too_long(sub_id, MAX_SUB_ID_CHARS, ("sub_id",))
    if raw.get("type", "batch") != "batch":
        yield _not_one_of("batch", raw["type"], ("type",))
    if "submissions" not in raw:
        yield _missing("submissions", raw, ())
    elif not isinstance(raw["submissions"], list):
        yield field_error("list_type", ("submissions",), "Input should be a valid list", raw["submissions"])
    elif not raw["submissions"]:
        message = "List should have at least 1 item after validation, not 0"
        yield field_error("too_short", ("submissions",), message, raw["submissions"])


def _not_an_object(value: Json, location: Location) -> Fields:
    message = "Input should be a valid dictionary or object to extract fields from"
    return field_error("model_attributes_type", location, message, value)


def _missing(name: str, raw: Json, location: Location) -> Fields:
    return field_error("missing", (*location, name), "Field required", raw)


def _not_one_of(expected: str, value: Json, location: Location) -> Fields:
    return field_error("literal_error", location, f"Input should be '{expected}'", value)


def _not_text(value: Json, location: Location) -> Fields:
    return field_error("string_type", location, "Input should be a valid string", value)


def _too_long(value: str, max_chars: int, location: Location) -> Fields:
    return field_error("string_too_long", location, f"String should have at most {max_chars} characters", value)


def field_error(kind: str, location: Location, message: str, value: Json) -> Fields:
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
    "description": "How a program of code-judge ended. Check reason first: with queue_timeout and internal_error the "
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
SCHEMAS: Mapping[str, Schema] = {
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
EXAMPLES: Mapping[str, Any] = {
    "CodeJudgeSubmission": {"sub_id": "a", **_EXAMPLE},
    "CodeJudgeBatch": {"type": "batch", "submissions": [_EXAMPLE, {"type": "python", "solution": "print(1)"}]},
    "CodeJudgeResult": _EXAMPLE_RESULT,
    "CodeJudgeResults": {"sub_id": "b", "results": [_EXAMPLE_RESULT]},
    "CodeJudgeVerdict": _EXAMPLE_VERDICT,
    "CodeJudgeVerdicts": {"sub_id": "b", "results": [_EXAMPLE_VERDICT]},
    "CodeJudgeStatus": {"queue": 0, "num_workers": 32},
    "CodeJudgeMalformed": {"detail": [field_error("missing", ("solution",), "Field required", {})]},
}
