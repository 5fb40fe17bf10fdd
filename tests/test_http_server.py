"""Tests of tests/http_server.py."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest
from aiohttp import web

from tests.http_server import HttpServer


@pytest.mark.parametrize("iterations", range(6))
def test_a_connection_that_arrives_when_the_server_closes_is_closed(iterations: int) -> None:
    async def connect_and_close() -> None:
        async with HttpServer(web.Application()) as server:
            connection = socket.create_connection((server.host, server.port))
            for _ in range(iterations):
                await asyncio.sleep(0)
        connection.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(connect_and_close())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
