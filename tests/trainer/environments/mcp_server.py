"""An MCP server, written with the official SDK. It misbehaves if it is asked to.

`python mcp_server.py [FAULT]` serves on stdio. `python mcp_server.py http PORT` serves on streamable HTTP.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent

STDOUT = os.dup(1)
"""The pipe to the client. The SDK redirects descriptor 1 while it serves."""
server = MCPServer("test")
values: dict[str, int] = {}


@server.tool()
def add(name: str, amount: int) -> str:
    """Add an amount to a counter of this server."""
    values[name] = values.get(name, 0) + amount
    return f"{name} is {values[name]}"


@server.tool()
def environment() -> str:
    return "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()))


@server.tool()
def fail() -> str:
    raise ToolError("it failed")


@server.tool()
def picture() -> list[Any]:
    return [TextContent(type="text", text="a dot"), ImageContent(type="image", data="AA==", mime_type="image/png")]


@server.tool()
def record() -> dict[str, int]:
    return {"a": 1}


@server.tool()
def hang() -> str:
    time.sleep(600)
    return "late"


@server.tool()
def crash() -> str:
    print("the disk is on fire", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def long_line() -> str:
    return "x" * (17 << 20)


@server.tool()
def flood_stdout() -> str:
    """Write lines that are no messages, three times as much as a pipe holds, and answer."""
    for _ in range(200):
        os.write(STDOUT, b"hello\n[1]\n" * 100)
    return "flooded"


@server.tool()
def flood_stdout_forever() -> str:
    while True:
        os.write(STDOUT, b"x" * 60_000 + b"\n")  # the client rejects a line at its first byte


@server.tool()
def flood_stderr() -> str:
    os.write(2, b"noise\n" * 1_000_000)
    return "flooded"


@server.tool()
def leak(pid_file: str) -> str:
    """Start a process in a session of its own. Its parent ends. The process ignores SIGTERM and keeps all pipes."""
    code = (
        "import os, signal, sys, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork(): os._exit(0)\n"
        "open(sys.argv[1] + '.part', 'w').write(str(os.getpid())); os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "time.sleep(600)"
    )
    subprocess.run([sys.executable, "-c", code, pid_file], check=True)
    while not os.path.exists(pid_file):
        time.sleep(0.01)
    return "leaked"


@server.tool()
def count(ctx: Context) -> str:
    """Count the calls of this session. Calls without a session have one count together."""
    return add((ctx.headers or {}).get("mcp-session-id", "none"), 1).rpartition(" ")[2]


def serve(fault: str = "", port: str = "0") -> None:
    if fault == "hang":
        time.sleep(600)
    elif fault == "exit":
        sys.exit("there is no licence")
    elif fault == "nonsense":
        while True:
            print("hello" if time.time() % 2 else '{"jsonrpc": "2.0", "id": 1, "result": 7}', flush=True)
            time.sleep(0.01)
    elif fault == "endless_line":
        while True:
            os.write(1, b"x" * 60_000)
    elif fault == "leak":
        leak(port)
        sys.exit("and away")
    elif fault == "http":
        server.run("streamable-http", port=int(port))
    else:
        print("a line that is no message", flush=True)
        server.run("stdio")


if __name__ == "__main__":
    serve(*sys.argv[1:])
