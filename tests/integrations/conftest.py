"""Two servers for the tests of the integrations: a real server, and a server that has no result for any call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from aiohttp import web

from sandbox.local import local_service
from sandbox.types import UnavailableReason, unavailable_result
from tests.client.servers import EncodedCall, encode_result, scripted_server
from trainer.rollout.loop_thread import LoopThread


@pytest.fixture(scope="session")
def _server_url(guest_python: object, needs_isolation: None) -> Iterator[str]:
    with LoopThread() as loop_thread:
        yield loop_thread.enter(local_service(["--profiles", "bare", "--zygote-pools", "1", "--slots", "4"]))


@pytest.fixture
def server_url(_server_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a running server, which is also the server of `RSTAR_SANDBOX_URL`."""
    monkeypatch.setenv("RSTAR_SANDBOX_URL", _server_url)
    return _server_url


@pytest.fixture
def outage_url() -> Iterator[str]:
    """The URL of a server whose results are all `unavailable`."""
    with LoopThread() as loop_thread:
        yield loop_thread.enter(scripted_server(_respond_unavailable)).url


async def _respond_unavailable(request: web.Request, calls: list[EncodedCall]) -> web.StreamResponse:
    result = unavailable_result("", UnavailableReason.QUEUE_TIMEOUT, "no slot was free").encode(binary=True)
    return web.Response(body=b"".join(encode_result(index, result) for index in range(len(calls))))
