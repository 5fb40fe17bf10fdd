"""The sandbox as an MCP server, built with the official SDK. It has one tool, `run_python`.

- The text of a tool result is what `sandbox.tool.render` returns; the structured content is a `PythonRun`.
- A failure of the code is a normal tool result, because the model should read it. A failure of the service is a
  JSON-RPC error, so that no model learns from it.
- Each call starts afresh: the server keeps no state between calls.

The SDK is the extra `mcp`. Callers import this module only when they need it, because that takes a second.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Annotated, Any

from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import INTERNAL_ERROR, CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from sandbox.errors import InvalidCall, SandboxError
from sandbox.tool import render, tool_schema
from sandbox.types import LIMIT_FIELDS, Call, Result, Status

RunCall = Callable[[Call], Awaitable[Result]]
"""Runs one call. Raises `SandboxError`."""

_TOOL = tool_schema("run_python")["function"]
_ARGUMENTS = _TOOL["parameters"]["properties"]
_TIMEOUT = LIMIT_FIELDS["timeout_s"]
_Code = Annotated[str, Field(description=_ARGUMENTS["code"]["description"])]
_Input = Annotated[str, Field(description=_ARGUMENTS["input"]["description"])]
_Seconds = Annotated[float, Field(description=_TIMEOUT.doc, ge=_TIMEOUT.low, le=_TIMEOUT.high)]


class PythonRun(BaseModel):
    """The result of `run_python` for programs. The fields are those of `sandbox.types.Result`."""

    status: str = Field(description=f"how the code ended: {', '.join(Status)}")
    stdout: str = Field(description="standard output")
    stderr: str = Field(description="standard error")
    value: str | None = Field(description="repr() of the last expression; null if there is none")
    error: str | None = Field(description="type and message of the error; null if the code ended as ok")
    exit_code: int | None = Field(description="exit code; null if a signal ended the process")
    run_ms: float = Field(description="run time in milliseconds")
    truncated: list[str] = Field(description="names of the fields that were cut")


def build_server(run_call: RunCall) -> MCPServer[Any]:
    """Return an MCP server whose tool runs its calls with `run_call`."""
    server: MCPServer[Any] = MCPServer(
        "rstar-sandbox", version=version("rstar-sandbox"), log_level="WARNING", subscriptions=False
    )

    async def run_python(
        code: _Code, input: _Input = "", timeout_s: _Seconds = _TIMEOUT.default
    ) -> Annotated[CallToolResult, PythonRun]:
        try:
            call = Call.decode({"code": code, "stdin": input, "limits": {"timeout_s": timeout_s}})
            result = await run_call(call)
            text = render(result)
        except InvalidCall as error:
            raise ToolError(str(error)) from None
        except SandboxError as error:
            raise MCPError(INTERNAL_ERROR, f"the sandbox did not run the code: {error}") from None
        return CallToolResult(
            content=[TextContent(type="text", text=text)], structured_content=_to_structured(result).model_dump()
        )

    hints = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    server.add_tool(run_python, name=_TOOL["name"], description=_TOOL["description"], annotations=hints)
    return server


def _to_structured(result: Result) -> PythonRun:
    error = result.error
    return PythonRun(
        status=result.status.value,
        stdout=result.stdout,
        stderr=result.stderr,
        value=result.value,
        error=None if error is None else str(error),
        exit_code=result.exit_code,
        run_ms=result.usage.run_ms,
        truncated=list(result.truncated),
    )
