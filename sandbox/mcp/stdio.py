"""The command `rstar-sandbox mcp`: the MCP server on standard input and output, in front of a server over HTTP."""

from __future__ import annotations

from contextlib import AsyncExitStack

from sandbox.client import AsyncClient
from sandbox.local import local_service
from sandbox.mcp.server import build_server


async def serve_stdio(url: str | None, token: str | None) -> None:
    """Serve one client on standard input and output until it closes them. Calls run on the server at `url`. If `url` is
    None, a server is started for this client."""
    async with AsyncExitStack() as stack:
        if url is None:
            url = await stack.enter_async_context(local_service())
        client = await stack.enter_async_context(AsyncClient(url, token=token))
        await build_server(client.execute).run_stdio_async()
