"""Tests of access: requests need the token, and web pages of other sites are rejected."""

from __future__ import annotations

import pytest

from sandbox.gateway.http.auth import check_local_request
from sandbox.gateway.http.errors import HttpError
from tests.gateway.serving import serving


@pytest.mark.asyncio
async def test_only_probes_and_pages_need_no_token() -> None:
    async with serving(token="s3cret") as served:
        # "//" and "/docs/" resemble public paths.
        for path in ("/v1/stats", "/v1/stats?after=1", "//", "/docs/", "/openapi.json", "/metrics", "/nowhere"):
            async with served.http.get(served.url + path) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        for path in ("/", "/docs", "/health", "/ready"):
            assert (await served.get(path))[0] == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_contains_no_data_of_calls(path: str) -> None:
    async with serving(token="s3cret") as served:
        page_before = await served.get(path)
        await served.post("/v1/execute", {"code": "a secret"}, Authorization="Bearer s3cret")
        assert await served.get(path) == page_before
        assert "s3cret" not in page_before[1]
        assert (await served.post(path, {}))[0] == 405


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer s3cret", 200),
        ("bearer s3cret", 200),
        ("Bearer s3cre", 401),
        ("Bearer", 401),
        ("Basic s3cret", 401),
        ("Bearer sécret", 401),
    ],
)
async def test_only_the_right_token_is_accepted(header: str, status: int) -> None:
    async with serving(token="s3cret") as served:
        assert (await served.post("/v1/execute", {"code": "1"}, Authorization=header))[0] == status


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8642", None),
        ("localhost", None),
        ("[::1]:8642", None),
        ("", None),  # not from a browser, which always sends a Host header
        ("127.0.0.1:8642", "http://127.0.0.1:8642"),
        ("LOCALHOST:1", "http://localhost:1"),
    ],
)
def test_loopback_names_and_own_pages_are_accepted(host: str, origin: str | None) -> None:
    check_local_request(host, origin, own_host="127.0.0.1")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:8642", None),
        ("127.0.0.1.evil.example", None),
        ("10.0.0.1:8642", None),
        ("127.0.0.1:8642", "http://evil.example"),
        ("127.0.0.1:8642", "null"),
        ("127.0.0.1:8642", "http://127.0.0.1:9999"),
    ],
)
def test_foreign_hosts_and_origins_are_rejected(host: str, origin: str | None) -> None:
    with pytest.raises(HttpError) as caught:
        check_local_request(host, origin, own_host="127.0.0.1")
    assert caught.value.status == 403


@pytest.mark.asyncio
async def test_a_page_of_another_site_cannot_run_code() -> None:
    async with serving() as served:
        status, reply = await served.post("/v1/execute", {"code": "1"}, Origin="https://evil.example")
        assert (status, reply["error"]["type"]) == (403, "Forbidden")
        assert served.fleet.last_executor.calls == {}
