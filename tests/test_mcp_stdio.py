"""Test of `rstar-sandbox mcp` with the official SDK's client."""

from __future__ import annotations

import sys

import pytest
from mcp import Client, StdioServerParameters, stdio_client

pytestmark = [pytest.mark.asyncio, pytest.mark.runtime]


async def test_a_client_runs_code_over_stdio() -> None:
    command = StdioServerParameters(command=sys.executable, args=["-m", "sandbox", "mcp"])
    async with Client(stdio_client(command)) as client:
        value = await client.call_tool("run_python", {"code": "2**10"})
        error = await client.call_tool("run_python", {"code": "print('before')\n1/0"})
    assert value.structured_content is not None
    assert (value.content[0].text, value.structured_content["value"]) == ("1024", "1024")  # type: ignore[union-attr]
    assert error.structured_content is not None
    assert error.structured_content["status"] == "error"
    assert "ZeroDivisionError" in error.content[0].text  # type: ignore[union-attr]
