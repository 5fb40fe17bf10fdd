"""Sessions with MCP servers, over stdio or streamable HTTP, through the official SDK.

Invariants:
- The SDK's contexts are entered and left in one task, the session's own. Other tasks call tools through the session.
- Every failure of a server is an `EnvironmentFailure`: the server does not start in time, does not answer in time,
  ends, or answers nonsense. A failure of one server does not affect the sessions with other servers.
- After `close` all processes of a stdio server have ended (`trainer.environments.mcp_supervisor`).
- A stdio server gets the variables HOME, LOGNAME, PATH, SHELL, TERM and USER, and those that are given to it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from trainer.environments.environment import EnvironmentFailure

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

MAX_TOOLS = 256
SUPERVISOR = Path(__file__).with_name("mcp_supervisor.py")
MAX_REASON_CHARS = 500


class McpArgumentError(Exception):
    """The server refuses the arguments of a tool call. The model reads the message."""


class McpSession:
    """A session with the server of `target`: the URL of a server, or the command that starts one."""

    def __init__(
        self, target: str | Sequence[str], env: Mapping[str, str], start_timeout_s: float, *, has_state: bool = False
    ) -> None:
        """`has_state`: the server keeps state between calls. A server on HTTP then needs a protocol version that has
        sessions. Newer versions have none; the SDK calls the older ones "legacy"."""
        import anyio

        sdk_logger = logging.getLogger("mcp")
        # The SDK logs each line of a server that is not a valid message. Without this, a server could fill the log.
        if sdk_logger.level == logging.NOTSET:
            sdk_logger.setLevel(logging.CRITICAL)
        self.name = target if isinstance(target, str) else " ".join(target)
        self.tools: dict[str, Tool] = {}
        self.is_broken = False
        """Whether the connection is lost, so that no call can succeed."""
        self._target, self._env, self._start_timeout_s = target, dict(env), start_timeout_s
        self._protocol: Literal["legacy", "auto"] = "legacy" if has_state else "auto"
        self._stderr: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in `_run`
        self._reason = ""
        self._scope = anyio.CancelScope()
        self._started, self._closing = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def start(self) -> None:
        """Wait until the session has started. Any number of tasks may wait. Raises `EnvironmentFailure`."""
        await self._started.wait()
        if self._reason:
            raise EnvironmentFailure(self._reason)

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> CallToolResult:
        """Call a tool. Raises `EnvironmentFailure` and `McpArgumentError`."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST

        if self.has_ended:
            raise EnvironmentFailure(self._reason or f"{self.name}: the session has ended")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.call_tool(tool, arguments)
        except TimeoutError:
            reason = f"did not answer a call of {tool} within {timeout_s:g} s"
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise McpArgumentError(error.message) from error
            self.is_broken |= error.code in (CONNECTION_CLOSED, INVALID_REQUEST)
            reason = f"{tool}: {error}"
        except Exception as error:  # the SDK checks the server's answers, and may raise any exception for a wrong one
            reason = f"{tool}: {_describe(error)}"
        raise EnvironmentFailure(f"{self.name}: {reason}{self._stderr_line()}"[:MAX_REASON_CHARS])

    async def close(self) -> None:
        """End the session, and the server if it runs over stdio. Safe to call twice."""
        self._closing.set()
        if not self._started.is_set():
            self._scope.cancel()
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        import anyio

        self._scope.deadline, reason = anyio.current_time() + self._start_timeout_s, ""
        try:
            with self._scope:
                async with self._connect() as client:
                    self.tools = await _list_tools(client)
                    self._client, self._scope.deadline = client, math.inf
                    self._started.set()
                    await self._closing.wait()
            if not self._started.is_set():
                reason = f"did not start within {self._start_timeout_s:g} s"
        except Exception as error:  # as in `call`
            reason = _describe(error)
        finally:
            if reason or not self._started.is_set():
                self._reason = f"{self.name}: {reason or 'cancelled'}{self._stderr_line()}"[:MAX_REASON_CHARS]
            self._started.set()
            self._stderr.close()

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Client]:
        from mcp import Client, StdioServerParameters, stdio_client

        if isinstance(self._target, str):
            async with Client(self._target, mode=self._protocol) as client:
                yield client
            return
        # -I: variables in `env`, such as PYTHONPATH, have no effect on the supervisor.
        # -S: the supervisor needs no installed package.
        # The pid: a supervisor whose parent is another process ends, since this process has then died.
        arguments = ["-I", "-S", str(SUPERVISOR), str(os.getpid()), *self._target]
        server = StdioServerParameters(command=sys.executable, args=arguments, env=self._env)
        async with Client(stdio_client(server, self._stderr)) as client:  # type: ignore[arg-type]
            yield client

    def _stderr_line(self) -> str:
        """Return the last line that a stdio server wrote to stderr, in brackets. Empty until the server has ended,
        since its supervisor passes stderr on only at the end."""
        if self._stderr.closed:
            return ""
        self._stderr.seek(0)
        lines = self._stderr.read().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last})" if last else ""


class SharedSessions:
    """The sessions that the episodes of a process share, by URL."""

    def __init__(self) -> None:
        self._sessions: dict[str, McpSession] = {}

    async def get(self, url: str, start_timeout_s: float) -> McpSession:
        """Return the session with a server. The session may not have started yet. A session that has ended or is broken
        is replaced by a new one."""
        session = self._sessions.get(url)
        if session is None or session.has_ended or session.is_broken:
            self._sessions[url] = McpSession(url, {}, start_timeout_s)
            if session:
                await session.close()
        return self._sessions[url]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


async def _list_tools(client: Client) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools |= {tool.name: tool for tool in page.tools}
        if len(tools) > MAX_TOOLS:
            raise EnvironmentFailure(f"expected at most {MAX_TOOLS} tools, got more")
        if not (cursor := page.next_cursor):
            return tools


def _describe(error: BaseException) -> str:
    """Return one line that describes an error or, for a group of errors, the first error in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
