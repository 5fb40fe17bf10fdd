"""Tests of the arguments that clients accept, and of the errors for malformed arguments."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.client import AsyncClient, Client
from sandbox.errors import InvalidCall
from sandbox.types import Call
from tests.client.servers import respond_ok, respond_verdicts, scripted_server


@pytest.mark.asyncio
async def test_malformed_calls_are_refused_before_they_are_sent() -> None:
    async with scripted_server(respond_ok) as server, AsyncClient(server.url) as client:
        with pytest.raises(InvalidCall, match=r"call\.limits\.timeout_s: expected a number"):
            await client.execute("1", limits={"timeout_s": -1})
        with pytest.raises(InvalidCall, match="unknown field"):
            await client.run_batch(["1"], {"colour": "red"})
    assert server.requests == []


@pytest.mark.asyncio
async def test_a_text_in_files_is_sent_as_the_text_of_the_file() -> None:
    files, sent = {"a": "cGVhcg==", "b": b"\xff"}, {"a": b"cGVhcg==", "b": b"\xff"}
    async with scripted_server(respond_ok) as server, AsyncClient(server.url) as client:
        await client.execute("1", files=files)
        await client.execute({"code": "1", "files": files})
        await client.run_batch([{"code": "1", "files": files}])
        await client.run_batch(["1"], defaults={"files": files})
        with pytest.raises(InvalidCall, match=r"^call\.files\['a'\]: expected base64 text, or .* for text .*, got 5"):
            await client.execute("1", files={"a": 5})
    assert [call["files"] for calls in server.requests for call in calls] == [sent] * 4


MALFORMED_CALLS: list[tuple[Any, type[Exception], str]] = [
    ("print(1)", TypeError, r"calls: expected a list, each item Python source .*; got str"),
    (b"print(1)", TypeError, "calls: expected a list, .*; got bytes"),
    (5, TypeError, "calls: expected a list, .*; got int"),
    ({"code": "1"}, TypeError, "calls: expected a list, .*; got dict"),
    (["1", 5], TypeError, r"calls\[1\]: expected Python source \(str\), a Call, or a mapping .*, got int"),
    (["1", b"2"], TypeError, r"calls\[1\]: expected .*, got bytes"),
    (["1", {"codee": "2"}], ValueError, r"calls\[1\]: unknown field 'codee'; the fields are code, "),
    (["1", {"stdin": "2"}], ValueError, r"calls\[1\]\.code: expected .*, but the field is missing"),
    (["1", {"code": 5}], ValueError, r"calls\[1\]\.code: expected text, got 5"),
    (["1", {"code": "2", "limits": {"timeout_s": -1}}], ValueError, r"calls\[1\]\.limits\.timeout_s: expected a num"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("calls", "expected", "message"), MALFORMED_CALLS)
async def test_malformed_lists_of_calls_are_refused_with_name_and_index(
    calls: Any, expected: type[Exception], message: str
) -> None:
    async with scripted_server(respond_ok) as server, AsyncClient(server.url) as client:
        with pytest.raises(expected, match=message):
            await client.run_batch(calls)
        with pytest.raises(expected, match=message):
            client.stream(calls)
    assert server.requests == []


@pytest.mark.asyncio
async def test_a_single_call_of_the_wrong_type_is_refused() -> None:
    async with AsyncClient() as client:
        with pytest.raises(TypeError, match=r"code: expected Python source \(str\), a Call, or a mapping .*, got int"):
            await client.execute(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"code: expected .*, got list"):
            await client.execute(["1"], stdin="x")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"defaults: expected an object, got 'x'"):
            await client.run_batch(["1"], "x")  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_batches_accept_source_calls_and_mappings_as_in_http() -> None:
    calls: list[Any] = [
        "one",
        Call("two", stdin="own"),
        {"code": "three", "stdin": "in", "limits": {"timeout_s": 2}, "id": "mine"},
    ]
    async with scripted_server(respond_ok) as server, AsyncClient(server.url) as client:
        results = await client.run_batch(calls, {"stdin": "same"})
        assert (await client.execute({"code": "four", "stdin": "in"})).value == "in"
    assert [(r.stdout, r.value, r.id) for r in results] == [
        ("one", "same", "0"),
        ("two", "own", "1"),
        ("three", "in", "mine"),
    ]
    assert server.requests[0][2]["limits"] == {"timeout_s": 2}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("pairs", "expected", "message"),
    [
        ("ab", TypeError, r"pairs: expected a list, each item a pair \(gold, answer\).*; got str"),
        (["12"], TypeError, r"pairs\[0\]: expected a pair \(gold, answer\), or a mapping .*, got str"),
        ([("1", "1"), ("1",)], TypeError, r"pairs\[1\]: expected a pair .*, got tuple of 1"),
        ([("1", "1"), ("1", 5)], ValueError, r"pairs\[1\]\.answer: expected text of at most \d+ characters, got int"),
        ([{"gold": "1"}], ValueError, r"pairs\[0\]: expected an object of gold and answer, got the fields gold"),
    ],
)
async def test_malformed_lists_of_pairs_are_refused_with_name_and_index(
    pairs: Any, expected: type[Exception], message: str
) -> None:
    async with scripted_server(respond_verdicts) as server, AsyncClient(server.url) as client:
        with pytest.raises(expected, match=message):
            await client.verify(pairs)
        assert server.requests == []
        assert [v.outcome for v in await client.verify([{"gold": "1", "answer": "1"}, ["1", "2"]])] == [  # type: ignore[list-item]
            "equivalent",
            "not_equivalent",
        ]


@pytest.mark.parametrize("client_class", [AsyncClient, Client])
@pytest.mark.parametrize(
    ("endpoints", "expected", "message"),
    [
        ("127.0.0.1:8642", ValueError, r"endpoints: expected a URL such as http://127\.0\.0\.1:8642, got '127\.0\."),
        ("localhost:8642", ValueError, "endpoints: expected a URL such as"),
        ("ftp://127.0.0.1", ValueError, "endpoints: expected a URL such as"),
        ("http://", ValueError, "endpoints: expected a URL such as"),
        ("http://:8642", ValueError, "endpoints: expected a URL such as"),
        ("http://127.0.0.1:port", ValueError, "endpoints: expected a URL such as"),
        ("http://127.0.0.1:99999", ValueError, "endpoints: expected a URL such as"),
        ("http://127.0.0.1:8642 ", ValueError, "endpoints: expected a URL such as"),
        (["http://127.0.0.1:8642", "gpu1:8642"], ValueError, r"endpoints\[1\]: expected a URL such as .*, got 'gpu1"),
        ([5], TypeError, r"endpoints\[0\]: expected a URL as text, got int"),
        (5, TypeError, "endpoints: expected a list, each item a URL; got int"),
    ],
)
def test_malformed_urls_are_refused_by_the_constructor(
    client_class: type, endpoints: Any, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message):
        client_class(endpoints)


def test_valid_urls_are_accepted() -> None:
    AsyncClient(["http://127.0.0.1:8642/", "https://pool.example/sandbox", "http://[::1]:8642", "http://node_1:80"])


def test_out_of_range_arguments_of_a_client_are_refused() -> None:
    out_of_range: list[dict[str, Any]] = [{"endpoints": []}, {"batch_size": 0}, {"max_connections": 0}, {"retries": -1}]
    for settings in out_of_range:
        with pytest.raises(ValueError, match="expected"):
            AsyncClient(**settings)
