"""A Python tool for verifiers (0.4): tasks whose tool `run_python` runs in the sandbox.

    class MyTask(PythonTask):
        @vf.reward
        async def solved(self, trace: vf.Trace) -> float: ...

The server of the tools is a process of its own, which verifiers starts with the environment of its parent. It uses
`RSTAR_SANDBOX_URL` and `RSTAR_SANDBOX_TOKEN`. Each call starts afresh.

If the service fails, the rollout ends with the error `TaskError` before it is scored. Until then, the model reads an
error text as the response of the tool.

This module has no `from __future__ import annotations`. Annotations would then be texts, and verifiers would evaluate
them in another module, in which the names of this module are unknown.
"""

import asyncio
from typing import Annotated, Any

import verifiers.v1 as vf
from pydantic import Field

from sandbox.errors import SandboxError, ServiceError
from sandbox.integrations.connection import shared_client
from sandbox.tool import MAX_RESPONSE_CHARS, TOOL_SCHEMA, parse_arguments, render

_ARGUMENTS = TOOL_SCHEMA["function"]["parameters"]["properties"]
_Code = Annotated[str, Field(description=_ARGUMENTS["code"]["description"])]
_Input = Annotated[str, Field(description=_ARGUMENTS["input"]["description"])]


class PythonState(vf.State):  # type: ignore[misc]
    """State that the server of the tools shares with the task. `outage` is the first failure of the service, or ""."""

    outage: str = ""


class PythonToolsetConfig(vf.ToolsetConfig):  # type: ignore[misc]
    """`timeout_s` is the time limit of a call in seconds of virtual time. `sandbox_url` is the URL of the server; None
    stands for `RSTAR_SANDBOX_URL`."""

    sandbox_url: str | None = None
    timeout_s: float = 10.0
    max_chars: int = MAX_RESPONSE_CHARS


class PythonToolset(vf.Toolset[PythonToolsetConfig, PythonState]):  # type: ignore[misc]
    """The tool `run_python`, for `Task.toolsets`. Tasks that do not inherit from `PythonTask` must check `outage`."""

    TOOL_PREFIX = None

    @vf.tool  # type: ignore[untyped-decorator]
    async def run_python(self, code: _Code, input: _Input = "") -> str:
        """Run Python code with the given standard input and return what it prints."""
        call = parse_arguments({"code": code, "input": input})
        client = shared_client(self.config.sandbox_url)
        try:
            future = client.submit(call, limits={"timeout_s": self.config.timeout_s})
            return render(await asyncio.wrap_future(future), max_chars=self.config.max_chars)
        except SandboxError as error:
            self.state.outage = self.state.outage or str(error)
            return "The tool is not available."


class PythonTaskConfig(vf.TaskConfig):  # type: ignore[misc]
    """The settings of the tool. On the command line of verifiers they begin with `--env.taskset.task.python`."""

    python: PythonToolsetConfig = PythonToolsetConfig()


class PythonTask(vf.Task[vf.TaskData, PythonState, PythonTaskConfig]):  # type: ignore[misc]
    """A task with the tool. A subclass that has its own `finalize` calls this one first."""

    @classmethod
    def toolsets(cls, config: PythonTaskConfig) -> list[Any]:
        return [PythonToolset(config.python)]

    async def finalize(self, trace: Any, runtime: Any) -> None:
        """Raise `ServiceError` if a call has no result, so that the rollout gets no reward."""
        if trace.state.outage:
            raise ServiceError(f"a tool call has no result: {trace.state.outage}")


if __name__ == "__main__":
    PythonToolset.run()
