"""Tests with any bodies of requests. Each gets results or an error with a message, and the server keeps running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandbox.gateway.http.errors import ERROR_TYPES
from sandbox.types import CALL_FIELDS, LIMIT_FIELDS, Status
from tests.gateway.serving import Served, serving

JSON, MSGPACK = "application/json", "application/msgpack"
CODES = st.text(max_size=8).map(lambda text: f"# {text}")  # comments, which are no commands for the fake executors
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS: dict[str, Any] = {
    "code": CODES,
    "stdin": st.text(max_size=8),
    "stdin_base64": st.sampled_from(["", "AP8=", "?"]),
    "files": st.dictionaries(st.sampled_from(["a", "b/c", "../d", "/e", ""]), st.sampled_from(["", "YQ==", "?"])),
    "return_files": st.lists(st.sampled_from(["a", "b/c", "..", "\0", "*", "**/x", "**/**"]), max_size=3),
    "limits": st.dictionaries(st.sampled_from([*LIMIT_FIELDS, "cores"]), st.integers(-1, 10**10) | SCALARS, max_size=3),
    "echo": st.booleans(),
    "profile": st.sampled_from(["auto", "bare", "rich"]),
    "id": st.text(max_size=5),
    "priority": st.integers(-101, 101),
    "tenant": st.text(max_size=5),
    "env": st.dictionaries(st.sampled_from(["A", "_b1", "1a", "", "A=B"]), st.text(max_size=5)),
    "argv": st.lists(st.text(max_size=5), max_size=3),
    "figures": st.booleans(),
    "network": st.sampled_from(["none", "loopback", "internet"]),
    "deadline_s": st.sampled_from([-1, 0, 60, 1e9, "soon"]),  # no call of the tests can exceed one of these deadlines
}
assert set(FIELDS) == set(CALL_FIELDS)
VALID_CALLS = st.fixed_dictionaries({"code": CODES}, optional={name: FIELDS[name] for name in FIELDS if name != "code"})
INVALID_FIELDS = st.dictionaries(st.sampled_from([*FIELDS, "colour"]), ANYTHING, max_size=2)  # no field is "colour"
CALLS = st.builds(lambda call, invalid: {**call, **invalid}, VALID_CALLS, st.just({}) | INVALID_FIELDS) | ANYTHING
BATCHES = (
    st.fixed_dictionaries(
        {"calls": st.lists(CALLS, max_size=4) | ANYTHING},
        optional={"defaults": VALID_CALLS | ANYTHING, "queue_timeout_s": SCALARS, "colour": SCALARS},
    )
    | ANYTHING
)
PAIRS = st.fixed_dictionaries({"gold": st.text(max_size=8), "answer": st.text(max_size=8)}) | ANYTHING
CHECKS = (
    st.fixed_dictionaries(
        {"pairs": st.lists(PAIRS, max_size=4) | ANYTHING},
        optional={name: FIELDS[name] | SCALARS for name in ("limits", "priority", "tenant", "code")},
    )
    | ANYTHING
)
ACCEPTS = st.sampled_from(["", JSON, MSGPACK, "application/x-ndjson", "application/x-msgpack-stream", "text/html, */*"])
FEW_EXAMPLES = settings(max_examples=60, suppress_health_check=list(HealthCheck))


class Poster:
    """Sends requests to a gateway with fake executors and checks the responses."""

    def __init__(self, runner: asyncio.Runner, served: Served) -> None:
        self._runner, self._served = runner, served

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, str, bytes]:
        return self._runner.run(self._post(path, body, headers))

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._served.http.post(self._served.url + path, data=body, headers=http_headers) as response:
            return response.status, response.content_type, await response.read()

    def check(self, path: str, body: bytes, **headers: str) -> None:
        """Send a body and assert that the API documents the response."""
        status, content_type, answer = self.post(path, body, **headers)
        decoded = json.loads(answer) if content_type == JSON else {}
        if status != 200 and "error" in decoded:
            assert 400 <= status < 500, answer
            assert status in ERROR_TYPES
            error = json.loads(answer)["error"]
            assert error["type"] == ERROR_TYPES[status]
            assert 10 < len(error["message"]) < 2000
            assert error["message"].isprintable()
            return
        results = _decode_results(content_type, answer)
        assert status == (400 if all(result["status"] == Status.INVALID for result in results) else 200)
        for result in results:
            if "outcome" in result:
                assert result["outcome"] == result["status"], "the fake executors compare nothing"
                assert result["status"] in ("invalid", "unavailable")
                assert result["message"].startswith(("InvalidCall: ", "the answer check returned no outcome"))
                continue
            assert Status(result["status"]) in (Status.OK, Status.INVALID)
            if result["status"] == "invalid":
                assert result["error"]["type"] == "InvalidCall"
                assert "expected" in result["error"]["message"] or "unknown field" in result["error"]["message"]
        assert not self._served.dispatcher.call_table.outstanding.calls, "the call table is empty again"


def _decode_results(content_type: str, answer: bytes) -> list[dict[str, Any]]:
    match content_type:
        case "application/x-ndjson":
            return [json.loads(line) for line in answer.splitlines()]
        case "application/x-msgpack-stream":
            unpacker = msgpack.Unpacker()
            unpacker.feed(answer)
            return list(unpacker)
    decoded = json.loads(answer) if content_type == JSON else msgpack.unpackb(answer)
    return decoded.get("results", [decoded])


@pytest.fixture(scope="module")
def poster() -> Iterator[Poster]:
    with asyncio.Runner() as runner:
        gateway = serving(batch_calls=100, body_mb=1)
        served = runner.run(gateway.__aenter__())
        yield Poster(runner, served)
        runner.run(gateway.__aexit__(None, None, None))


@FEW_EXAMPLES
@given(body=BATCHES, accept=ACCEPTS, binary=st.booleans())
@example(body={"calls": [{"code": "1", "limits": {"timeout_s": float("nan")}}]}, accept="", binary=False)
@example(body={"calls": [{"code": "1", "priority": float("inf")}]}, accept="", binary=True)
@example(body={"calls": [{"code": "1"}], "queue_timeout_s": float("inf")}, accept="", binary=False)
@example(body={"calls": [{"code": "\ud800", "id": "\ud800"}]}, accept="", binary=False)
@example(body={"calls": [{"code": "1", "return_files": ["\ud800"]}]}, accept="", binary=True)
def test_any_batch_gets_results_or_an_error(poster: Poster, body: Any, accept: str, binary: bool) -> None:
    sent, kind = _encode(body, binary)
    poster.check("/v1/batch", sent, Content_Type=kind, Accept=accept)


@FEW_EXAMPLES
@given(body=CHECKS, accept=ACCEPTS, binary=st.booleans())
@example(body={"pairs": [{"gold": "\ud800", "answer": "\0"}]}, accept="", binary=False)
@example(body={"pairs": [{"gold": "1", "answer": None}], "limits": None}, accept="", binary=True)
def test_any_pairs_get_verdicts_or_an_error(poster: Poster, body: Any, accept: str, binary: bool) -> None:
    sent, kind = _encode(body, binary)
    poster.check("/v1/verify", sent, Content_Type=kind, Accept=accept)


@FEW_EXAMPLES
@given(body=CALLS, accept=ACCEPTS, binary=st.booleans(), timeout=st.none() | SCALARS)
@example(body={"code": "1"}, accept="", binary=True, timeout=float("nan"))
@example(body={"code": "1"}, accept="", binary=True, timeout=1e300)
def test_any_call_gets_a_result_or_an_error(poster: Poster, body: Any, accept: str, binary: bool, timeout: Any) -> None:
    if isinstance(body, dict) and timeout is not None:
        body = {**body, "queue_timeout_s": timeout}
    sent, kind = _encode(body, binary)
    poster.check("/v1/execute", sent, Content_Type=kind, Accept=accept)


@FEW_EXAMPLES
@given(
    body=st.binary(max_size=60),
    path=st.sampled_from(["/v1/batch", "/v1/execute", "/v1/verify"]),
    kind=st.sampled_from([JSON, MSGPACK, "text/plain", "application/json; charset=latin-1"]),
)
@example(body=b"\x81\xc0\x01", path="/v1/batch", kind=MSGPACK)  # {None: 1}
@example(body=b"\x81\x90\x01", path="/v1/batch", kind=MSGPACK)  # {[]: 1}
@example(body=b"[" * 3000, path="/v1/batch", kind=JSON)
@example(body=b"\x91" * 3000, path="/v1/batch", kind=MSGPACK)
@example(body=b'{"code": 1e400}', path="/v1/execute", kind=JSON)
@example(body=b'{"priority": ' + b"9" * 5000 + b', "code": ""}', path="/v1/execute", kind=JSON)
def test_any_bytes_get_results_or_an_error(poster: Poster, body: bytes, path: str, kind: str) -> None:
    poster.check(path, body, Content_Type=kind)


@FEW_EXAMPLES
@given(start=st.integers(0, 200), removed=st.integers(0, 5), inserted=st.binary(max_size=5), binary=st.booleans())
def test_a_damaged_body_gets_results_or_an_error(
    poster: Poster, start: int, removed: int, inserted: bytes, binary: bool
) -> None:
    call = {"code": "# 1", "stdin": "in", "files": {"a": "YQ=="}, "limits": {"timeout_s": 2.5}, "tenant": "t"}
    sent, kind = _encode({"calls": [call, call], "defaults": {"echo": False}, "queue_timeout_s": 9}, binary)
    poster.check("/v1/batch", sent[:start] + inserted + sent[start + removed :], Content_Type=kind)


def _encode(body: Any, binary: bool) -> tuple[bytes, str]:
    if binary:
        return msgpack.packb(body, unicode_errors="surrogatepass"), MSGPACK
    return json.dumps(body).encode(), JSON
