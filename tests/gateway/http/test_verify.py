"""Tests of `/v1/verify` over real HTTP with fake executors.

The route checks pairs of a right answer (gold) and an answer. Each pair is checked by one call and gets one verdict.
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from sandbox.judging import answers as verify
from sandbox.types import Result, Status
from tests import fakes
from tests.gateway.http.test_openapi import SCHEMAS, assert_fits
from tests.gateway.serving import serving

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _fake_checker_compares_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def ok_result(call: dict[str, Any]) -> dict[str, Any]:
        gold, answer = fakes.pair_of_check(call)
        if answer == "timeout":  # stands for a check that reaches its time limit: the outcome is then "unparsable"
            return Result("", Status.TIMEOUT).encode(binary=True)
        outcome = "equivalent" if gold == answer else "not_equivalent"
        report = {"outcome": outcome, "gold": gold, "answer": answer}
        return Result("", Status.OK, value=json.dumps(report)).encode(binary=True)

    monkeypatch.setattr(fakes, "ok_result", ok_result)


def make_pair(gold: Any, answer: Any) -> dict[str, Any]:
    return {"gold": gold, "answer": answer}


async def test_verdicts_are_in_the_order_of_the_pairs() -> None:
    pairs = [make_pair("7", str(number)) for number in range(200)]
    async with serving() as served:
        status, body = await served.post("/v1/verify", {"pairs": pairs, "limits": {"timeout_s": 2}, "tenant": "mine"})
        first_call = next(iter(served.fleet.last_executor.calls.values()))
    assert status == 200
    assert_fits(body, SCHEMAS["Verdicts"])
    expected = ["equivalent" if number == 7 else "not_equivalent" for number in range(200)]
    assert [verdict["outcome"] for verdict in body["results"]] == expected
    shared = verify.check_template({"limits": {"timeout_s": 2}, "tenant": "mine"})
    assert first_call == verify.build_check("7", "0", shared).encode(binary=True)
    assert body["results"][3]["extracted"] == {"gold": "7", "answer": "3"}


async def test_a_msgpack_body_gets_a_msgpack_response() -> None:
    async with serving() as served:
        body = msgpack.packb({"pairs": [make_pair("1", "1")]})
        headers = {"Content-Type": "application/msgpack"}
        async with served.http.post(served.url + "/v1/verify", data=body, headers=headers) as response:
            assert response.content_type == "application/msgpack"
            (verdict,) = msgpack.unpackb(await response.read())["results"]
    assert verdict["outcome"] == "equivalent"


async def test_a_malformed_pair_is_invalid_and_does_not_affect_the_others() -> None:
    malformed: list[Any] = [7, {}, make_pair("1", 1), {"gold": "1", "answer": "1", "code": "print(1)"}]
    async with serving() as served:
        status, body = await served.post(
            "/v1/verify", {"pairs": [*malformed, make_pair("1", "1"), make_pair("1", "timeout")]}
        )
        _, metrics_text = await served.get("/metrics")
    assert status == 200
    assert_fits(body, SCHEMAS["Verdicts"])
    verdicts = [(verdict["outcome"], verdict["status"]) for verdict in body["results"]]
    assert verdicts == [("invalid", "invalid")] * 4 + [("equivalent", "ok"), ("unparsable", "timeout")]
    assert body["results"][2]["message"].startswith("InvalidCall: pairs[2].answer: expected text")
    assert 'rstar_sandbox_calls_total{status="invalid"} 4' in metrics_text


async def test_a_request_whose_pairs_are_all_malformed_is_a_400() -> None:
    async with serving(wait=False) as served:
        status, body = await served.post("/v1/verify", {"pairs": [{"gold": "1"}]})
    assert status == 400
    assert [verdict["outcome"] for verdict in body["results"]] == ["invalid"]
    assert "expected an object of gold and answer, got the fields gold" in body["results"][0]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "verify: expected an object with pairs, got list"),
        ({}, "verify.pairs: expected a list of at least one pair, got NoneType"),
        ({"pairs": []}, "verify.pairs: expected a list of at least one pair, got an empty list"),
        ({"pairs": [1] * 11}, "verify.pairs: expected at most 10 pairs, got 11"),
        (
            {"pairs": [make_pair("1", "1")], "code": "1"},
            "verify: unknown field 'code'; the fields are pairs, strictness, rounding",
        ),
        ({"pairs": [make_pair("1", "1")], "limits": {"cores": 1}}, "verify.limits: unknown field 'cores'"),
        (
            {"pairs": [make_pair("1", "1")], "strictness": "lax"},
            "verify.strictness: expected one of strict, math-verify",
        ),
        ({"pairs": [make_pair("1", "1")], "strictness": []}, "verify.strictness: expected one of strict, math-verify"),
        ({"pairs": [make_pair("1", "1")], "rounding": 1}, "verify.rounding: expected true or false, got"),
        (
            {"pairs": [make_pair("1", "1")], "rounding": True, "strictness": "math-verify"},
            "verify.rounding: expected false with strictness=math-verify",
        ),
        ({"pairs": [make_pair("1", "1")], "queue_timeout_s": 0}, "verify.queue_timeout_s: expected seconds above 0"),
    ],
)
async def test_a_malformed_request_is_rejected(body: Any, message: str) -> None:
    async with serving(batch_calls=10) as served:
        status, reply = await served.post("/v1/verify", body)
    assert status in (400, 413)  # 413 for too many pairs
    assert reply["error"]["message"].startswith(message)


async def test_a_pair_whose_executor_dies_is_unavailable() -> None:
    async with serving(attempts=1) as served:
        served.fleet.last_executor.exit(1)
        served.fleet.start_reactions += ["exit"] * 100  # no replacement becomes ready
        body = {"pairs": [make_pair("1", "1")], "queue_timeout_s": 0.05}
        status, reply = await served.post("/v1/verify", body)
    assert status == 200
    assert [verdict["outcome"] for verdict in reply["results"]] == ["unavailable"]
