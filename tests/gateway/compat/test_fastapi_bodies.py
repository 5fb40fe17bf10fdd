"""Tests of the response to a malformed body: the form of FastAPI, its bounds, and the import of pydantic."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox.gateway.compat import fastapi_bodies
from sandbox.gateway.compat.fastapi_bodies import MAX_ERRORS, MAX_INPUT_CHARS, MalformedBody, validate
from sandbox.gateway.compat.models import CodeJudgeBatch, CodeJudgeSubmission, SandboxFusionCode
from sandbox.gateway.http.body_parser import LARGE_BODY_BYTES
from tests.gateway.http.test_openapi import SCHEMAS
from tests.gateway.serving import serving

PROGRAM = {"type": "python", "solution": "hello"}
FASTAPI: list[tuple[str, Any, list[Any]]] = [  # FastAPI 0.165 with the models of the other service sent these errors
    ("/run", {"type": "python", "input": None}, [
        {"type": "missing", "loc": ["body", "solution"], "msg": "Field required",
         "input": {"type": "python", "input": None}},
    ]),
    ("/run/batch", {"type": "batch", "submissions": []}, [
        {"type": "too_short", "loc": ["body", "submissions"],
         "msg": "List should have at least 1 item after validation, not 0", "input": [],
         "ctx": {"field_type": "List", "min_length": 1, "actual_length": 0}},
    ]),
    ("/judge/batch", {"submissions": [{**PROGRAM, "options": {"a": [1.5]}, "solution": True}]}, [
        {"type": "string_type", "loc": ["body", "submissions", 0, "options", "a"],
         "msg": "Input should be a valid string", "input": [1.5]},
        {"type": "string_type", "loc": ["body", "submissions", 0, "solution"],
         "msg": "Input should be a valid string", "input": True},
    ]),
    ("/run_code", {"compile_timeout": [], "code": 1, "memory_limit_MB": 0.5, "files": {"a": 1}}, [
        {"type": "float_type", "loc": ["body", "compile_timeout"], "msg": "Input should be a valid number",
         "input": []},
        {"type": "int_from_float", "loc": ["body", "memory_limit_MB"],
         "msg": "Input should be a valid integer, got a number with a fractional part", "input": 0.5},
        {"type": "string_type", "loc": ["body", "code"], "msg": "Input should be a valid string", "input": 1},
        {"type": "string_type", "loc": ["body", "files", "a"], "msg": "Input should be a valid string", "input": 1},
    ]),
    ("/run_jupyter", [1], [
        {"type": "model_attributes_type", "loc": ["body"],
         "msg": "Input should be a valid dictionary or object to extract fields from", "input": [1]},
    ]),
]  # fmt: skip


@pytest.mark.asyncio
async def test_the_errors_of_a_malformed_body_equal_the_recorded_errors_of_fastapi() -> None:
    async with serving() as served:
        for path, body, errors in FASTAPI:
            assert await served.post(path, body) == (422, {"detail": errors})


@pytest.mark.asyncio
async def test_the_documented_response_to_a_malformed_body_is_that_of_the_server() -> None:
    document = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()
    body = {"type": "python", "solution": 5}
    async with serving() as served:
        _, answer = await served.post("/run", body)
    assert f"-d '{json.dumps(body)}' http://localhost:8642/run" in document
    assert f"\n{json.dumps(answer)}\n" in document


@pytest.mark.asyncio
async def test_the_submissions_of_a_batch_with_a_malformed_field_are_not_checked() -> None:
    async with serving() as served:
        _, answer = await served.post("/run/batch", {"type": 5, "submissions": [1]})
    assert answer == {
        "detail": [
            {
                "type": "literal_error",
                "loc": ["body", "type"],
                "msg": "Input should be 'batch'",
                "input": 5,
                "ctx": {"expected": "'batch'"},
            }
        ]
    }


@pytest.mark.asyncio
async def test_a_body_that_is_no_json_is_answered_with_the_error_of_fastapi() -> None:
    async with serving() as served:
        status, answer = await served.post("/run_code", b"{", Content_Type="application/json")
    (error,) = answer["detail"]
    assert (status, error["type"], error["loc"], error["input"]) == (422, "json_invalid", ["body"], {})
    assert "malformed JSON at line 1, column 2" in error["ctx"]["error"]


@pytest.mark.asyncio
async def test_a_large_malformed_body_gets_the_same_errors_as_a_small_body() -> None:
    texts: dict[str, Any] = {"sub_id": "\ud800", "solution": 2**63, "expected_output": -(2**70)}
    small = {"submissions": [{**texts, "input": math.inf}, PROGRAM]}
    large = {"submissions": [small["submissions"][0], {**PROGRAM, "solution": "x" * LARGE_BODY_BYTES}]}
    async with serving() as served:
        answers = [await served.post("/run/batch", body) for body in (small, large)]
    assert answers[0] == answers[1]
    assert [error["loc"][-1] for error in answers[0][1]["detail"]] == ["type", "solution", "input", "expected_output"]


HOSTILE = [
    "x" * 2000, [[]] * 2000, {"a" * 2000: 1}, dict.fromkeys(map(str, range(2000))), math.nan, math.inf, 2**63, 10**4000,
    b"bytes", {b"bytes": 1}, [math.nan], json.loads("[" * 900 + "]" * 900),
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_an_input_that_is_large_or_no_json_is_described(value: Any) -> None:
    with pytest.raises(MalformedBody) as caught:
        validate(CodeJudgeSubmission, {**PROGRAM, "input": value if not isinstance(value, str) else [value]})
    (error,) = caught.value.errors
    assert isinstance(error["input"], str)
    assert len(error["input"]) < 200


def test_the_name_of_an_option_in_the_path_to_an_error_is_cut() -> None:
    with pytest.raises(MalformedBody) as caught:
        validate(CodeJudgeSubmission, {**PROGRAM, "options": {"n" * 5000: 1}})
    assert caught.value.errors[0]["loc"] == ["body", "options", "n" * MAX_INPUT_CHARS]


def test_of_many_errors_only_the_first_are_listed_and_their_inputs_described(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[object] = []
    monkeypatch.setattr(fastapi_bodies, "shown", lambda value: described.append(value) or "")
    with pytest.raises(MalformedBody) as caught:
        validate(
            CodeJudgeSubmission, {**PROGRAM, "options": dict.fromkeys(map(str, range(10 * MAX_ERRORS)), [0] * 999)}
        )
    assert len(described) == len(caught.value.errors) == MAX_ERRORS


def test_a_text_with_a_lone_surrogate_is_accepted() -> None:
    assert validate(CodeJudgeSubmission, {**PROGRAM, "solution": "\ud800", "input": "\udfff"}).solution == "\ud800"
    assert validate(SandboxFusionCode, {"code": "\ud800", "files": {"\ud800": ""}}).code == "\ud800"
    assert validate(CodeJudgeBatch, {"submissions": ["\ud800"], "sub_id": "\ud800"}).sub_id == "\ud800"


def test_pydantic_is_imported_with_the_first_body_only() -> None:
    program = "import sys, sandbox, sandbox.gateway.server; print('pydantic' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == "False\n"


def test_the_bounds_of_numbers_are_in_the_schema() -> None:
    for name in ("SandboxFusionCode", "SandboxFusionCells"):
        properties = SCHEMAS[name]["properties"]
        numbers = {field for field, schema in properties.items() if schema.get("type") in ("number", "integer")}
        assert numbers
        assert numbers == {field for field, schema in properties.items() if {"minimum", "maximum"} <= schema.keys()}
