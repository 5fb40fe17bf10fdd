"""Test of `rstar-sandbox mcp` with the official SDK's client."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from mcp import Client, StdioServerParameters, stdio_client

pytestmark = pytest.mark.runtime


@pytest.mark.asyncio
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


def test_ctrl_c_ends_the_command_at_once() -> None:
    with subprocess.Popen([sys.executable, "-m", "sandbox", "mcp"], stdin=-1, stdout=-1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT


def test_a_wrong_url_is_one_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "sandbox", "mcp", "--url", "foo"], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "--url: expected a URL such as http://127.0.0.1:8642, got 'foo'" in ended.stderr
