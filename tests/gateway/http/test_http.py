"""Tests of the routes over real HTTP with fake executors: valid calls, and every kind of malformed input."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import struct
from typing import Any, cast
from unittest.mock import Mock

import msgpack
import pytest
from aiohttp.test_utils import make_mocked_request

from sandbox.gateway.http import codec, exchange
from sandbox.types import Limits
from tests.gateway.serving import serving, until

pytestmark = pytest.mark.asyncio
MSGPACK = "application/msgpack"


async def test_execute_returns_a_result() -> None:
    async with serving() as served:
        status, result = await served.post("/v1/execute", {"code": "hello", "id": "mine", "queue_timeout_s": 5})
    assert status == 200
    assert (result["id"], result["status"], result["stdout"], result["attempts"]) == ("mine", "ok", "hello", 1)
    assert result["usage"]["queue_ms"] >= 0


async def test_results_are_in_the_order_of_the_calls() -> None:
    async with serving() as served:
        calls = [{"code": f"{n}"} for n in range(200)]
        status, body = await served.post("/v1/batch", {"calls": calls})
    assert status == 200
    assert [(r["id"], r["stdout"]) for r in body["results"]] == [(f"{n}", f"{n}") for n in range(200)]


@pytest.mark.parametrize("count", [3, 200])
async def test_a_msgpack_body_gets_a_msgpack_response_with_raw_files(count: int) -> None:
    call = {"code": "1", "files": {"a": b"\xff"}, "return_files": ["a"]}
    async with serving() as served:
        body = msgpack.packb({"calls": [call] * count})
        headers = {"Content-Type": MSGPACK}
        async with served.http.post(served.url + "/v1/batch", data=body, headers=headers) as response:
            assert response.content_type == MSGPACK
            results = msgpack.unpackb(await response.read())["results"]
    assert [result["files"] for result in results] == [{"a": b"\xff"}] * count


async def test_files_are_base64_in_json() -> None:
    content = base64.b64encode(b"\xff").decode()
    async with serving() as served:
        _, result = await served.post("/v1/execute", {"code": "1", "files": {"a": content}, "return_files": ["a"]})
    assert result["files"] == {"a": content}


async def test_a_malformed_call_does_not_affect_its_batch() -> None:
    malformed: list[Any] = [
        {},
        7,
        {"code": 1, "id": "x"},
        {"code": "1", "colour": "red"},
        {"code": "1", "priority": float("nan")},
    ]
    async with serving() as served:
        status, body = await served.post("/v1/batch", {"calls": [*malformed, {"code": "good"}]})
        _, metrics_text = await served.get("/metrics")
    results = body["results"]
    assert status == 200
    assert [r["status"] for r in results] == ["invalid"] * 5 + ["ok"]
    assert {r["error"]["type"] for r in results[:5]} == {"InvalidCall"}
    assert [r["id"] for r in results] == ["0", "1", "x", "3", "4", "5"]
    assert results[3]["error"]["message"].startswith("calls[3]: unknown field 'colour'")
    assert 'rstar_sandbox_calls_total{status="invalid"} 5' in metrics_text


@pytest.mark.parametrize("content_type", ["application/json", "application/x-ndjson"])
async def test_a_batch_whose_calls_are_all_malformed_is_a_400_with_a_message_for_each(content_type: str) -> None:
    body = {"calls": [{"codee": "1"}, {}]}
    async with (
        serving(wait=False) as served,
        served.http.post(served.url + "/v1/batch", json=body, headers={"Accept": content_type}) as response,
    ):
        assert (response.status, response.content_type) == (400, content_type)
        text = await response.text()
        assert served.dispatcher.counters.refused == {400: 1}
    results = (
        json.loads(text)["results"] if content_type == "application/json" else list(map(json.loads, text.splitlines()))
    )
    assert [result["status"] for result in results] == ["invalid", "invalid"]
    assert "unknown field 'codee'" in results[0]["error"]["message"]
    assert "expected Python source" in results[1]["error"]["message"]


async def test_defaults_complete_calls_and_limits_are_lowered_to_the_maximum() -> None:
    async with serving(max_limits=Limits(timeout_s=5)) as served:
        calls = [{"code": "1"}, {"code": "2", "limits": {"timeout_s": 1}}]
        _, body = await served.post("/v1/batch", {"calls": calls, "defaults": {"limits": {"timeout_s": 60}}})
        received_limits = [call.get("limits") for call in served.fleet.last_executor.calls.values()]
    assert [r["clamped"] for r in body["results"]] == [{"timeout_s": 5}, {}]
    assert received_limits == [{"timeout_s": 5}, {"timeout_s": 1}]


BAD_BODIES: dict[str, tuple[str, bytes, str]] = {  # content type, body, part of the message
    "malformed JSON": ("application/json", b'{"calls": [}', "line 1, column 12"),
    "no body": ("application/json", b"", "line 1, column 1"),
    "not UTF-8": ("application/json", b'{"calls": "\xff"}', "not UTF-8: invalid start byte at byte 11"),
    "a byte order mark": ("application/json", b"\xef\xbb\xbf{}", "malformed JSON"),
    "deeply nested JSON": ("application/json", b"[" * 200_000, "nested too deeply"),
    "a duplicate key": ("application/json", b'{"calls": [], "calls": []}', "the key 'calls' occurs twice"),
    "a long number": (
        "application/json",
        b'{"queue_timeout_s": -' + b"9" * 5000 + b', "calls": [{"code": ""}]}',
        "a whole number has more than 4300 digits",
    ),
    "an array": ("application/json", b"[]", "expected an object with calls, got list"),
    "an empty batch": ("application/json", b'{"calls": []}', "at least one call, got an empty list"),
    "no calls": ("application/json", b"{}", "at least one call, got NoneType"),
    "calls that are text": ("application/json", b'{"calls": "1"}', "at least one call, got str"),
    "an unknown field": ("application/json", b'{"call": []}', "unknown field 'call'; the fields are calls,"),
    "code as a default": ("application/json", b'{"calls": [{}], "defaults": {"code": ""}}', "belongs to a single call"),
    "a NaN timeout": ("application/json", b'{"calls": [{}], "queue_timeout_s": NaN}', "expected seconds above 0"),
    "truncated msgpack": (MSGPACK, msgpack.packb({"calls": [{"code": "1"}]})[:-1], "malformed msgpack"),
    "msgpack and a byte more": (MSGPACK, msgpack.packb({"calls": []}) + b"\x00", "malformed msgpack"),
    "an array of 4 billion": (MSGPACK, b"\xdd\xff\xff\xff\xff", "malformed msgpack"),
    "a map of 4 billion": (MSGPACK, b"\xdf\xff\xff\xff\xff", "malformed msgpack"),
    "text of 4 GB": (MSGPACK, b"\xdb\xff\xff\xff\xffabc", "malformed msgpack"),
    "arrays nested in arrays of 60,000": (MSGPACK, (b"\xdd" + struct.pack(">I", 60_000)) * 5000, "malformed msgpack"),
    "deeply nested msgpack": (MSGPACK, b"\x91" * 100_000 + b"\x00", "malformed msgpack"),
    "msgpack text not UTF-8": (MSGPACK, b"\x81\xa5calls\xa1\xff", "not UTF-8"),
    "a duplicate msgpack key": (MSGPACK, b"\x82\xa1a\x01\xa1a\x01", "the key 'a' occurs twice"),
    "a msgpack extension": (MSGPACK, b"\xd4\x01\x00", "malformed msgpack"),
    "a msgpack number as key": (MSGPACK, b"\x81\x01\x01", "malformed msgpack"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_malformed_body_is_a_400_with_the_reason(name: str) -> None:
    content_type, body, expected = BAD_BODIES[name]
    async with serving() as served:
        status, reply = await served.post("/v1/batch", body, Content_Type=content_type)
        ready_status, _ = await served.get("/ready")
    assert (status, ready_status) == (400, 200)
    assert set(reply) == {"error"} and set(reply["error"]) == {"type", "message"}
    assert expected in reply["error"]["message"]


# In msgpack, the byte 9f begins a list of 15 items, 80 is an empty mapping, and 90 is an empty list.
MANY_OBJECTS_IN_SMALL_BODIES: dict[str, tuple[str, bytes]] = {
    "objects": ("application/json", b"[" + b"{}," * 200 + b"{}]"),
    "lists": ("application/json", b"[" + b"[]," * codec.MAX_JSON_BRACKETS + b"[]]"),
    "msgpack maps": (MSGPACK, b"\x9f" + (b"\x9f" + b"\x80" * 15) * 15),
    "msgpack lists": (MSGPACK, b"\x9f" + (b"\x9f" + b"\x90" * 15) * 15),
}


@pytest.mark.parametrize("name", MANY_OBJECTS_IN_SMALL_BODIES)
async def test_a_small_body_that_decodes_to_too_many_objects_is_rejected(name: str) -> None:
    content_type, body = MANY_OBJECTS_IN_SMALL_BODIES[name]
    async with serving(batch_calls=16) as served:
        status, _ = await served.post("/v1/batch", body, Content_Type=content_type)
    assert status == 413


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, "call.code: expected Python source"),
        ({"code": "1", "queue_timeout_s": "soon"}, "call.queue_timeout_s: expected seconds above 0, got 'soon'"),
        ({"code": "1", "queue_timeout_s": True}, "expected seconds above 0, got True"),
        ([], "call: expected an object, got list"),
    ],
)
async def test_a_malformed_call_to_execute_is_a_400(call: Any, expected: str) -> None:
    async with serving() as served:
        status, reply = await served.post("/v1/execute", call)
    assert status == 400 and expected in reply["error"]["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "text/json", "json"])
async def test_a_body_of_another_content_type_is_rejected(content_type: str) -> None:
    async with serving() as served:
        status, reply = await served.post("/v1/execute", b'{"code": "1"}', Content_Type=content_type)
    assert status == 415 and "expected application/json or application/msgpack" in reply["error"]["message"]


async def test_json_with_a_charset_is_accepted() -> None:
    async with serving() as served:
        status, _ = await served.post("/v1/execute", b'{"code": "1"}', Content_Type="application/json; charset=utf-8")
    assert status == 200


async def test_a_compressed_body_is_rejected_without_decompressing_it() -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    async with serving() as served:
        status, reply = await served.post("/v1/batch", bomb, Content_Type="application/json", Content_Encoding="gzip")
        assert served.dispatcher.counters.bytes_in == 0
    assert status == 415 and "uncompressed" in reply["error"]["message"]


async def test_a_body_over_the_limit_is_rejected() -> None:
    async with serving(body_mb=1) as served:
        status, reply = await served.post("/v1/execute", b" " * ((1 << 20) + 1), Content_Type="application/json")
        assert status == 413 and "--body-mb" in reply["error"]["message"]

        async def endless() -> Any:
            for _ in range(1000):
                yield b" " * 65536

        async with served.http.post(served.url + "/v1/execute", data=endless(), headers={"Content-Type": MSGPACK}) as r:
            assert r.status == 413


async def test_a_batch_of_too_many_calls_is_rejected() -> None:
    async with serving(batch_calls=3) as served:
        status, reply = await served.post("/v1/batch", {"calls": [{"code": "1"}] * 4})
    assert status == 413 and "at most 3 calls, got 4" in reply["error"]["message"]


async def test_other_requests_are_served_while_a_large_body_is_decoded() -> None:
    calls = [{"code": "x" * 1000} for _ in range(20_000)]
    body = json.dumps({"calls": calls}).encode()
    async with serving() as served:
        large = asyncio.create_task(served.post("/v1/batch", body, Content_Type="application/json"))
        health_checks = 0
        while not large.done():
            status, _ = await served.get("/health")
            health_checks += status == 200
        _, reply = await large
    assert len(reply["results"]) == 20_000
    assert health_checks > 20  # decoding takes about 100 ms, a health check about 1 ms


async def test_a_call_is_rejected_at_once_if_the_queue_is_full() -> None:
    async with serving(queue_calls=2) as served:
        accepted = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 2}))
        await until(lambda: bool(served.fleet.last_executor.calls))
        async with served.http.post(served.url + "/v1/execute", json={"code": "1"}) as response:
            body = await response.json()
            assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
        assert "holds 2 of at most 2 calls" in body["error"]["message"]
        served.fleet.last_executor.finish(*served.fleet.last_executor.calls)
        assert (await accepted)[0] == 200


@pytest.mark.parametrize("content_type", ["application/x-ndjson", "application/x-msgpack-stream"])
async def test_results_stream_as_they_finish(content_type: str) -> None:
    calls = [{"code": "hang"}, {"code": "quick"}, {"code": 1}]
    async with (
        serving() as served,
        served.http.post(served.url + "/v1/batch", json={"calls": calls}, headers={"Accept": content_type}) as response,
    ):
        assert response.content_type == content_type
        data = b""
        while b"quick" not in data or b"InvalidCall" not in data:
            data += await response.content.readany()
        served.fleet.last_executor.finish(*served.fleet.last_executor.calls)
        data += await response.read()
    if content_type == "application/x-ndjson":
        lines = [json.loads(line) for line in data.splitlines()]
    else:
        unpacker = msgpack.Unpacker()
        unpacker.feed(data)
        lines = list(unpacker)
    assert [line["index"] for line in lines] == [2, 1, 0]
    assert [line["status"] for line in lines] == ["invalid", "ok", "ok"]


@pytest.mark.parametrize("content_type", ["application/x-ndjson", "application/x-msgpack-stream"])
async def test_a_stream_without_results_sends_heartbeats(content_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "HEARTBEAT_S", 0.01)
    body = {"calls": [{"code": "hang"}]}
    async with (
        serving() as served,
        served.http.post(served.url + "/v1/batch", json=body, headers={"Accept": content_type}) as response,
    ):
        data = b""
        while len(data) < 3:
            data += await response.content.readany()
        assert set(data) == {codec.HEARTBEAT[content_type][0]}
        served.fleet.last_executor.finish(1)
        data += await response.read()
    if content_type == "application/x-ndjson":
        lines = [json.loads(line) for line in data.split(b"\n") if line]
    else:
        unpacker = msgpack.Unpacker()
        unpacker.feed(data)
        lines = [line for line in unpacker if line is not None]
    assert [(line["index"], line["status"]) for line in lines] == [(0, "ok")]


async def test_lone_surrogates_reach_the_executor_and_results_are_valid_text() -> None:
    """The fake executor returns the code as stdout; the gateway replaces surrogates in results by "?"."""
    async with serving() as served:
        status, result = await served.post("/v1/execute", b'{"code": "a\\ud800b"}', Content_Type="application/json")
        assert (status, result["stdout"]) == (200, "a?b")
        assert next(iter(served.fleet.last_executor.calls.values()))["code"] == "a\ud800b"
        body = msgpack.packb({"code": "a\ud800b"}, unicode_errors="surrogatepass")
        async with served.http.post(
            served.url + "/v1/execute", data=body, headers={"Content-Type": MSGPACK}
        ) as response:
            assert msgpack.unpackb(await response.read())["stdout"] == "a?b"


async def test_unknown_paths_and_methods_get_json_errors() -> None:
    async with serving() as served:
        status, reply = await served.post("/v2/execute", {})
        assert (status, reply["error"]["type"]) == (404, "NotFound")
        async with served.http.get(served.url + "/v1/execute") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert "accepts POST" in (await response.json())["error"]["message"]


async def test_ready_and_stats_have_the_isolation_level_and_its_reason() -> None:
    async with serving(isolation="none", isolation_reason="namespaces: refused here") as served:
        isolation = {"isolation": "none", "isolation_reason": "namespaces: refused here"}
        ready = {"status": "ready", "executors_ready": 1, "executors": 1, **isolation}
        assert json.loads((await served.get("/ready"))[1]) == ready
        service = json.loads((await served.get("/v1/stats"))[1])["service"]
        assert isolation.items() <= service.items()


async def test_ready_counts_the_executors_that_are_ready() -> None:
    async with serving(executors=2, cores=2) as served:
        served.dispatcher.executors[0].kill()
        await until(lambda: served.dispatcher.executors_ready == 1)
        ready = json.loads((await served.get("/ready"))[1])
        assert (ready["executors_ready"], ready["executors"]) == (1, 2)


async def test_the_server_is_ready_from_its_first_executor_to_the_drain() -> None:
    async with serving(wait=False) as served:
        assert (await served.get("/ready"))[0] == 503
        assert (await served.get("/health"))[0] == 200
        await served.dispatcher.started()
        assert (await served.get("/ready"))[0] == 200
        await served.dispatcher.drain(1)
        assert (await served.get("/ready"))[0] == 503
        status, reply = await served.post("/v1/execute", {"code": "1"})
        assert status == 503 and "stopping" in reply["error"]["message"]


async def test_pages_contain_no_external_url() -> None:
    async with serving() as served:
        for path in ("/", "/docs"):
            async with served.http.get(served.url + path) as response:
                text = await response.text()
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert "//" not in text.replace("<!doctype html>", "")


async def test_metrics_are_prometheus_text() -> None:
    async with serving() as served:
        await served.post("/v1/batch", {"calls": [{"code": "1"}] * 3})
        served.fleet.last_executor.send(
            "stats", {"zygote_restarts_total": 2, "slots": 4, "zygotes": {"bare": 3}, "note": "text"}
        )
        await until(lambda: bool(served.dispatcher.executors[0].stats.totals))
        _, text = await served.get("/metrics")
    lines = text.splitlines()
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))
    assert 'rstar_sandbox_calls_total{status="ok"} 3.0' in lines
    assert "rstar_sandbox_queue_seconds_count 3.0" in lines
    assert 'rstar_sandbox_run_seconds_bucket{le="0.001"} 3.0' in lines
    assert 'rstar_sandbox_executor_zygote_restarts_total{executor="0"} 2.0' in lines
    assert 'rstar_sandbox_executor_zygotes{executor="0",name="bare"} 3.0' in lines
    assert "# TYPE rstar_sandbox_executor_zygote_restarts_total counter" in lines


async def test_the_head_of_a_response_is_sent_together_with_its_body() -> None:
    request = make_mocked_request("POST", "/v1/execute")
    response = exchange._WholeResponse(headers={"Content-Length": "2"})
    writer = await response.prepare(request)
    assert not cast(Mock, writer).send_headers.called, "the head is sent before the body, in a packet of its own"
