"""Tests of large and hostile bodies of requests.

Such a body keeps no other request waiting. The bodies of one tenant never cause the refusal of another tenant's bodies.
Bodies from 256 KiB are decoded in the body worker, a separate process.

The tests measure the CPU time of this process and not the time on a clock, because other processes of the machine do
not change the CPU time.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from sandbox.gateway.http import body_parser, codec
from sandbox.gateway.http.body_parser import BodyParser
from sandbox.gateway.http.codec import JSON, MSGPACK, MSGPACK_STREAM, NDJSON
from sandbox.gateway.http.exchange import BODY_READER, PARSER
from sandbox.gateway.http.judge import JUDGED_BYTES
from sandbox.types import Call, Result, Status
from tests.gateway.http.test_tenants import BEARER_A, BEARER_B, serving_tenants
from tests.gateway.serving import Served, serving, until

pytestmark = pytest.mark.asyncio
MEBIBYTE = 1 << 20


def _list_of(item: bytes, size: int) -> bytes:
    """Return a JSON body of about `size` bytes with one field, "x", which is a list. No route knows this field."""
    return b'{"x": [' + (item + b",") * (size // (len(item) + 1)) + item + b"]}"


def _object_of(value: bytes, count: int) -> bytes:
    return b"{" + b",".join(b'"a%d":%s' % (number, value) for number in range(count)) + b"}"


def _function_test(field: bytes, items: bytes) -> bytes:
    return b'{"code": "", "tests": [{"call": "f", ' + field + b": [" + items + b"0]}]}"


CALLS = json.dumps({"calls": [{"code": "", "env": {f"A{n}": "x" for n in range(100)}}] * 5000}).encode()
"""More valid calls than the queue can take, so that none runs."""
TESTS = json.dumps({"code": "", "tests": [{"stdin": "1", "expected": "1"}] * 60_000 + [{}]}).encode()
"""A program whose last test is malformed, so that no test runs."""
HOSTILE_BODIES: dict[str, tuple[str, str, bytes]] = {
    "floats": ("/v1/batch", JSON, _list_of(b"1.5", 5 * MEBIBYTE)),
    "whole numbers": ("/v1/execute", JSON, _list_of(b"1", 3 * MEBIBYTE)),
    "long whole numbers": ("/v1/batch", JSON, _list_of(b"7" * 4300, 8 * MEBIBYTE)),
    "short texts": ("/v1/verify", JSON, _list_of(b'"ab"', 6 * MEBIBYTE)),
    "lists": ("/v1/batch", JSON, _list_of(b"[]", 3 * MEBIBYTE)),
    "objects": ("/v1/batch", JSON, b'{"x": [' + b'{"a":0},' * 300_000 + b"0]}"),
    "keys": ("/v1/batch", JSON, _object_of(b"1", 200_000)),
    "variables": ("/v1/batch", JSON, b'{"calls":[{"code":"1","env":' + _object_of(b'"1"', 200_000) + b"}]}"),
    "arguments": ("/v1/judge", JSON, _function_test(b'"expected":1,"args"', b"1,2.5," * 500_000)),
    "expected values": ("/v1/judge", JSON, _function_test(b'"expected"', b"1.5," * 900_000)),
    "submissions": ("/run/batch", JSON, b'{"submissions": ' + _list_of(b"1.5", 5 * MEBIBYTE)[6:]),
    "unknown fields": ("/run_code", JSON, _list_of(b"1.5", 5 * MEBIBYTE)),
    "msgpack texts": ("/v1/batch", MSGPACK, msgpack.packb({"x": [["ab"] * 60_000] * 20})),
    "calls": ("/v1/batch", JSON, CALLS),
    "tests": ("/v1/judge", JSON, TESTS),
}  # fmt: skip
"""Path, content type and body, by name. A decoder takes about 0.1 s for each body."""


class StepWatch:
    """Measures the longest step of the event loop, in CPU time of all threads of this process.

    All threads count, since a thread that keeps the interpreter's lock makes a step long.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.002)  # during the sleep, the worker has the CPU
            now = time.process_time()
            self.longest_s = max(self.longest_s, now - last)
            last = now


@asynccontextmanager
async def watched_steps() -> AsyncIterator[StepWatch]:
    """Watch the steps of the event loop. The garbage collector is off, because it would visit the objects of all tests
    of this process."""
    watch = StepWatch()
    gc.disable()
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        gc.enable()


def _decoder_s(body: bytes, content_type: str) -> float:
    """Return the CPU seconds that a plain decoder takes to decode a body and to free the decoded value."""
    started_at = time.process_time()
    value = json.loads(body) if content_type == JSON else msgpack.unpackb(body)
    del value
    return time.process_time() - started_at


async def test_a_hostile_body_of_any_shape_keeps_no_request_waiting() -> None:
    blocked = {}
    async with serving(queue_calls=1000) as served:
        await served.post("/v1/batch", HOSTILE_BODIES["floats"][2], Content_Type=JSON)  # starts the worker
        for name, (path, content_type, body) in HOSTILE_BODIES.items():
            plain_s = _decoder_s(body, content_type)
            async with watched_steps() as watch, asyncio.timeout(300):
                headers = {"Content-Type": content_type}
                async with served.http.post(served.url + path, data=_in_chunks(body), headers=headers) as response:
                    assert response.status in (200, 400, 413, 422)
                    while await response.content.read(codec.CHUNK_BYTES):
                        pass
            if watch.longest_s > plain_s / 3:
                blocked[name] = f"{watch.longest_s:.3f} s of {plain_s:.3f} s"
    assert not blocked


async def _in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 64 << 10):
        yield body[start : start + (64 << 10)]


async def test_an_object_with_too_many_keys_is_refused_while_the_body_is_decoded() -> None:
    variables = {f"a{number}": "" for number in range(codec.MAX_MAP_LEN + 1)}
    body = json.dumps({"calls": [{"code": "1", "env": variables}]}).encode()
    with pytest.raises(codec.HttpError, match=f"an object of {len(variables)} keys, expected at most 4096"):
        codec.decode(body, JSON, 1)
    test = {"call": "f", "args": [variables], "expected": variables}
    async with serving() as served:
        assert (await served.post("/v1/batch", body, Content_Type=JSON))[0] == 413
        assert (await served.post("/v1/judge", {"code": "1", "tests": [test]}))[0] == 200


# The response to a body does not depend on the process that checks the body: the worker or the gateway.

SUBMISSION = {"type": "python", "solution": "1", "sub_id": "s"}
PROGRAM = {"code": "1", "stop_at_first_failure": True, "prelude": "leetcode"}
FILES = {"a": base64.b64encode(bytes(range(256)) * 4100).decode(), "b/c": ""}
"""The first file is longer than `body_frames.BLOB_BYTES`, so that it comes in a frame of its own."""
TEXT = "é\U0001f600\ud800" * 100
LARGE_TEXT = TEXT * 3500
TEST = {"stdin": "1", "expected": "1"}
FUNCTION_TEST = {"call": "f", "args": [[1, {"a": None}], "x", 10**60], "expected": [1.5, {"b": [None]}]}
REQUESTS: list[tuple[str, Any]] = [
    ("/v1/execute", {"code": LARGE_TEXT, "queue_timeout_s": 5, "id": "i", "limits": {"disk_mb": 1e9}}),
    ("/v1/execute", {"code": 1}),
    ("/v1/execute", {"code": "1", "files": FILES, "return_files": ["a", "b/c"], "argv": ["-x"], "env": {"A": "b"}}),
    ("/v1/execute", {"code": "1", "stdin_base64": FILES["a"], "deadline_s": 100.0, "profile": "numeric"}),
    ("/v1/execute", {"code": "1", "profile": "unknown"}),
    ("/v1/batch", {"calls": [{"code": "1"}, {}, {"code": "2", "id": "x", "stdin": "y"}], "defaults": {"files": FILES}}),
    ("/v1/batch", {"calls": [{"code": "1"}], "defaults": {"return_files": ["a"], "files": FILES}, "deadline_s": 1e6}),
    ("/v1/batch", {"calls": [{}], "queue_timeout_s": 3}),
    ("/v1/batch", {"calls": [1]}),
    ("/v1/batch", {"calls": [{"code": "1"}] * 41}),
    ("/v1/verify", {"pairs": [{"gold": "1", "answer": TEXT}, {}], "limits": {"timeout_s": 2}, "priority": 1}),
    ("/v1/judge", {"code": "1", "tests": [TEST, FUNCTION_TEST], "queue_timeout_s": 9, "compare": {"rel": 0.1}}),
    ("/v1/judge", {"programs": [PROGRAM, {"code": "", "compare": "exact"}, {}], "defaults": {"tests": [TEST] * 9}}),
    ("/v1/judge", {"programs": [{**PROGRAM, "tests": [TEST]}], "defaults": {"checker": "2"}}),
    ("/v1/judge", {"code": "1", "tests": []}),
    ("/run", {**SUBMISSION, "input": TEXT, "expected_output": "1", "x": [1.5] * 9}),
    ("/run", {"type": "python"}),
    ("/judge/batch", {"submissions": [SUBMISSION, {**SUBMISSION, "expected_output": "1"}], "sub_id": "b"}),
    ("/judge/batch", {"submissions": [SUBMISSION, 1]}),
    ("/run_code", {"code": "1", "files": FILES, "fetch_files": ["./a"], "memory_limit_MB": 99, "x": {}}),
    ("/run_code", {"code": "1", "language": "cpp"}),
    ("/run_jupyter", {"cells": ["1", TEXT]}),
]  # fmt: skip


async def test_a_body_checked_in_the_worker_is_answered_like_one_checked_in_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(batch_calls=40) as served:
        for path, request in REQUESTS:
            for content_type in (JSON, MSGPACK) if path.startswith("/v1/") else (JSON,):
                body = _encode(request, content_type)
                replies, sent = [], []
                for large_bytes in (1 << 30, 0):
                    monkeypatch.setattr(body_parser, "LARGE_BODY_BYTES", large_bytes)
                    headers = {"Content-Type": content_type}
                    async with served.http.post(served.url + path, data=io.BytesIO(body), headers=headers) as response:
                        replies.append((response.status, _without_times(await response.read(), content_type)))
                    calls = served.fleet.last_executor.calls
                    sent.append([calls.pop(seq) for seq in sorted(calls)])
                assert replies[0] == replies[1], f"{path} {request!r:.200}"
                assert sent[0] == sent[1], f"{path} {request!r:.200}"


def _encode(request: Any, content_type: str) -> bytes:
    if content_type == JSON:
        return json.dumps(request).encode()
    for call in [request, *request.get("calls", ()), request.get("defaults", {})]:
        if isinstance(call, dict) and "args" in call:
            return b"\x80"
    text = json.dumps(request).replace(str(10**60), "1")  # msgpack has no such number
    packed: bytes = msgpack.packb(json.loads(text), unicode_errors="surrogatepass")
    return packed


def _without_times(reply: bytes, content_type: str) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key not in ("usage", "cost", "execution_time")}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(msgpack.unpackb(reply) if content_type == MSGPACK and reply[:1] != b"{" else json.loads(reply))


# The worker


def _worker_pid(served: Served) -> int:
    worker = served.app[PARSER]._worker
    assert worker is not None
    return worker._process.pid


def _is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


LARGE = json.dumps({"code": "x" * MEBIBYTE}).encode()
"""A valid call, large enough for the worker."""


async def test_a_worker_that_dies_is_replaced() -> None:
    async with serving() as served:
        assert (await served.post("/v1/execute", LARGE, Content_Type=JSON))[0] == 200
        first = _worker_pid(served)
        os.kill(first, signal.SIGSTOP)
        request = asyncio.create_task(served.post("/v1/execute", LARGE, Content_Type=JSON))
        await until(lambda: served.app[BODY_READER].budget.total == len(LARGE))
        os.kill(first, signal.SIGKILL)
        status, reply = await request
        assert status == 503 and "the process that decodes large bodies ended" in reply["error"]["message"]
        assert (await served.post("/v1/execute", LARGE, Content_Type=JSON))[0] == 200
        second = _worker_pid(served)
        os.kill(second, signal.SIGKILL)  # this worker waits for a body
        await until(lambda: served.app[PARSER]._worker.has_exited)  # type: ignore[union-attr]
        assert (await served.post("/v1/execute", LARGE, Content_Type=JSON))[0] == 200
        third = _worker_pid(served)
    assert len({first, second, third}) == 3
    assert not _is_running(third)


async def test_a_client_that_disconnects_ends_the_worker_of_its_body() -> None:
    async with serving() as served:
        assert (await served.post("/v1/execute", LARGE, Content_Type=JSON))[0] == 200
        pid = _worker_pid(served)
        os.kill(pid, signal.SIGSTOP)
        request = asyncio.create_task(served.post("/v1/execute", LARGE, Content_Type=JSON))
        await until(lambda: served.dispatcher.counters.bytes_in == 2 * len(LARGE))
        request.cancel()
        await until(lambda: not _is_running(pid))
        assert (await served.post("/v1/execute", LARGE, Content_Type=JSON))[0] == 200
        assert served.app[BODY_READER].budget.total == 0


async def test_tenants_take_turns_with_large_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenant a sends three bodies, and then tenant b sends one body. Only the first body of tenant a is decoded before
    that of tenant b."""
    order: list[str] = []
    may_go_on = asyncio.Event()
    parse = BodyParser._parse_in_worker

    async def record(parser: BodyParser, body: bytes, content_type: str, form: Any) -> None:
        order.append(form.owner.name)
        await may_go_on.wait()
        await parse(parser, body, content_type, form)

    monkeypatch.setattr(BodyParser, "_parse_in_worker", record)
    async with serving_tenants(tmp_path) as served:

        def send(token: str) -> asyncio.Task[Any]:
            return asyncio.create_task(served.post("/v1/execute", LARGE, Content_Type=JSON, Authorization=token))

        requests = [send(BEARER_A) for _ in range(3)]
        await until(lambda: served.dispatcher.counters.bytes_in == 3 * len(LARGE))
        requests.append(send(BEARER_B))
        await until(lambda: served.dispatcher.counters.bytes_in == 4 * len(LARGE))
        assert order == ["a"]
        may_go_on.set()
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 4
    assert order == ["a", "b", "a", "a"]


# Budgets


@asynccontextmanager
async def _unfinished_body(served: Served, length: int, **headers: str) -> AsyncIterator[None]:
    """Send the head of a request with this length, and only a part of its body. The connection stays open until the end
    of the block."""
    host, port = served.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    fields = {"Host": f"{host}:{port}", "Content-Type": JSON, "Content-Length": str(length), **headers}
    head = "POST /v1/batch HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    before = served.app[BODY_READER].budget.total
    writer.write(head.encode() + b"\r\n" + b" ")
    await until(lambda: served.app[BODY_READER].budget.total == before + length)
    try:
        yield
    finally:
        writer.close()
        await until(lambda: served.app[BODY_READER].budget.total == before)


async def test_a_body_is_refused_before_it_is_sent_if_its_length_does_not_fit() -> None:
    call = json.dumps({"code": "#" * MEBIBYTE}).encode()
    async with serving(queue_mb=4) as served:
        async with _unfinished_body(served, 3 * MEBIBYTE):
            status, reply = await served.post("/v1/execute", call, Content_Type=JSON)
            assert status == 429 and f"bodies are being received of {3 * MEBIBYTE} bytes" in reply["error"]["message"]
            assert served.dispatcher.counters.bytes_in == 0
        assert (await served.post("/v1/execute", call, Content_Type=JSON))[0] == 200
        assert served.app[BODY_READER].budget.total == 0


async def test_a_body_without_a_length_is_reserved_as_it_grows() -> None:
    sent = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            sent.append(await asyncio.sleep(0, b" " * (256 << 10)))
            yield sent[-1]

    async with serving(queue_mb=2, body_mb=100) as served:
        url, headers = served.url + "/v1/batch", {"Content-Type": JSON}
        async with served.http.post(url, data=endless(), headers=headers) as response:
            assert response.status == 429
        assert served.app[BODY_READER].budget.total == 0


async def test_the_bodies_of_one_tenant_never_refuse_those_of_another(tmp_path: Path) -> None:
    """The two tenants and the server's token have equal shares of 8 MiB. In addition to these shares, one body of the
    largest size (`body_mb`) fits."""
    largest = json.dumps({"code": "#" * 3 * MEBIBYTE}).encode().ljust(4 * MEBIBYTE)
    async with (
        serving_tenants(tmp_path, queue_mb=8, body_mb=4, token="server") as served,
        _unfinished_body(served, len(largest), Authorization=BEARER_A),
    ):
        assert (await served.post("/v1/execute", LARGE, Content_Type=JSON, Authorization=BEARER_A))[0] == 429
        for token in (BEARER_B, "Bearer server"):
            assert (await served.post("/v1/execute", largest, Content_Type=JSON, Authorization=token))[0] == 200


async def test_the_shares_of_all_tenants_divide_the_budget(tmp_path: Path) -> None:
    text = '[tenants.a]\ntoken = "token-a"\nqueue_share = 0.5\n[tenants.b]\ntoken = "token-b"\n'
    async with serving_tenants(tmp_path, text, queue_mb=1000, body_mb=1, tenant_share=1) as served:
        budget = served.app[BODY_READER].budget
        a, b = (served.dispatcher.tenants.find(token) for token in ("token-a", "token-b"))  # type: ignore[union-attr]
        mebibytes = [budget.maximum(tenant) / MEBIBYTE for tenant in (a, b, None)]
    assert mebibytes == pytest.approx([200, 400, 400])  # 1000 MiB are divided in proportion to 0.5, 1 and 1


async def test_programs_that_are_being_judged_hold_no_part_of_the_budget_of_bodies() -> None:
    test = {"stdin": "#" * (3 * MEBIBYTE // 2), "expected": ""}
    body = json.dumps({"code": "hang", "tests": [test]}).encode()
    async with serving(queue_mb=4, tenant_share=1) as served:
        judging = asyncio.create_task(served.post("/v1/judge", body, Content_Type=JSON))
        await until(lambda: len(served.fleet.last_executor.calls) == 1)
        assert (served.app[BODY_READER].budget.total, served.app[JUDGED_BYTES].total) == (0, len(body))
        assert (await served.post("/v1/execute", LARGE, Content_Type=JSON))[0] == 200
        judging.cancel()
        await until(lambda: served.app[JUDGED_BYTES].total == 0)


async def test_programs_that_are_being_judged_are_bounded() -> None:
    async with serving(queue_mb=2, body_mb=2, tenant_share=1) as served:
        program = json.dumps({"code": "hang", "tests": [{"stdin": "#" * MEBIBYTE, "expected": ""}]}).encode()
        judging = asyncio.create_task(served.post("/v1/judge", program, Content_Type=JSON))
        await until(lambda: len(served.fleet.last_executor.calls) == 1)
        status, reply = await served.post("/v1/judge", program, Content_Type=JSON)
        assert status == 429 and "programs are being judged" in reply["error"]["message"]
        judging.cancel()


async def test_the_queue_counts_bytes_and_not_characters() -> None:
    text = "\U0001f600" * (MEBIBYTE // 2)  # 2 MiB in UTF-8
    for call in (Call(text), Call("", stdin=text)):
        assert call.size > len(text.encode())
    ascii_text = "x" * MEBIBYTE
    assert len(ascii_text) < Call(ascii_text).size < len(ascii_text) + 1024
    async with serving(queue_mb=2, body_mb=8, tenant_share=1) as served:
        body = json.dumps({"code": text}, ensure_ascii=False).encode()
        assert (await served.post("/v1/execute", body.ljust(10), Content_Type=JSON))[0] in (413, 429)


# Encoding


def _results(count: int, size: int) -> list[dict[str, Any]]:
    texts = {"stdout": "é" * (size // 4), "stderr": "\ud800\n" * (size // 8), "value": '"' * (size // 4)}
    encoded: Any = Result("i", Status.OK, files={"f": b"\xff" * (size // 4)}, **texts).encode(binary=True)  # type: ignore[arg-type]
    return [encoded] * count


def _encode_result(result: dict[str, Any], content_type: str) -> Any:
    return codec.encode_result(result, codec.encoded_bytes(result), content_type)


ENCODERS: dict[str, Callable[[str], Any]] = {
    "one large result": lambda content_type: _encode_result(_results(1, 8 * MEBIBYTE)[0], content_type),
    "large results": lambda content_type: codec.encode_results(_results(8, MEBIBYTE), 8, content_type),
    "medium results": lambda content_type: codec.encode_results(_results(64, MEBIBYTE // 8), 64, content_type),
    "a judged program": lambda content_type: _encode_result(
        {"id": "", "tests": [{"stdout": "x" * 1000, "stderr": "é" * 1000}] * 4000}, content_type
    ),
}


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("name", ENCODERS)
async def test_encoding_yields_to_the_event_loop_by_bytes(name: str, content_type: str) -> None:
    """In msgpack, the bytes of a file are not copied but referred to, so they may be one part of any size."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    parts = await ENCODERS[name](content_type)
    counting.cancel()
    encoded = [part for part in parts if part.strip(b"\xff")]
    # A character may have two bytes: an escaped one ("\n") and one outside of ASCII ("é"). The header of a group adds
    # up to 4096 bytes.
    assert max(map(len, encoded)) <= 2 * codec.CHUNK_BYTES + 4096
    assert turns >= sum(map(len, encoded)) // (2 * codec.CHUNK_BYTES + 4096)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK, NDJSON, MSGPACK_STREAM])
async def test_a_large_result_is_encoded_like_a_small_one(content_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _results(1, 4000)[0]
    results = [result, {**result, "stdout": "x"}, result]
    monkeypatch.setattr(codec, "CHUNK_BYTES", 1 << 20)
    whole = await _encoded(results, content_type)
    for chunk_bytes in (100, 3000, 8000):
        monkeypatch.setattr(codec, "CHUNK_BYTES", chunk_bytes)
        assert await _encoded(results, content_type) == whole


async def _encoded(results: list[dict[str, Any]], content_type: str) -> list[Any]:
    """Return the decoded responses with these results."""
    if content_type in (NDJSON, MSGPACK_STREAM):
        bodies = [
            await codec.encode_line(index, result, codec.encoded_bytes(result), content_type)
            for index, result in enumerate(results)
        ]
    else:
        head = {"sub_id": "x"}
        bodies = [
            await codec.encode_results(results, 3, content_type, head),
            await _encode_result(results[0], content_type),
        ]
    is_msgpack = content_type in (MSGPACK, MSGPACK_STREAM)
    return [msgpack.unpackb(b"".join(parts)) if is_msgpack else json.loads(b"".join(parts)) for parts in bodies]
