"""The trainer's connection to a sandbox service, which it starts itself if none is configured.

Invariants:
- A misconfigured service (wrong address or token, no isolation) raises `SandboxUnavailable` before any episode starts.
- A service that the trainer has started ends when the trainer ends, also if the trainer is killed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from sandbox.client import AsyncClient
from sandbox.errors import SandboxError, ServiceError
from sandbox.local import local_service
from sandbox.types import Limits, Strictness
from trainer.environments.answer_check import AnswerChecker
from trainer.environments.program_judge import ProgramJudge
from trainer.environments.python_tool import PythonTool

BATCH_WINDOW_S = 0.02
"""While a request is in flight, new calls are gathered for this number of seconds, so that they share the next request.
A request for each call would need more CPU time than all other work on the call. The wait is about as long as a call
runs, and much shorter than a turn."""
MAX_RETRIES = 8
"""Retries of a failed request, over about 15 s. A service that restarts is back by then."""


class SandboxUnavailable(Exception):
    """No sandbox can be used. The message names the endpoint, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class SandboxConnection:
    """An open connection to the servers, with what environments use of them."""

    endpoints: tuple[str, ...]
    """URLs of the servers."""
    python_tool: PythonTool
    """Runs code."""
    answer_checker: AnswerChecker
    """Compares answers."""
    program_judge: ProgramJudge
    """Runs programs against tests."""


@asynccontextmanager
async def open_sandbox(
    endpoint: str | Sequence[str] | None = None,
    *,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    answer_check: str = Strictness.STRICT,
    answer_rounding: bool = False,
    arguments: Sequence[str] = (),
) -> AsyncIterator[SandboxConnection]:
    """Connect to the service at one endpoint or several. None or "local" starts a service until the block ends.

    `timeout_s` and `memory_mb` limit each call. `answer_check` and `answer_rounding` are the rules by which an answer
    is right. `arguments` are further arguments of `rstar-sandbox serve` for a local service. The token is read from
    RSTAR_SANDBOX_TOKEN. Raises `SandboxUnavailable`.
    """
    limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb)
    async with AsyncExitStack() as stack:
        if not endpoint or endpoint == "local":
            try:
                endpoint = await stack.enter_async_context(local_service(arguments))
            except ServiceError as error:
                raise SandboxUnavailable(str(error)) from error
        endpoints = (endpoint,) if isinstance(endpoint, str) else tuple(endpoint)
        token = os.environ.get("RSTAR_SANDBOX_TOKEN")
        try:
            client = AsyncClient(endpoints, token=token, retries=MAX_RETRIES, gather_s=BATCH_WINDOW_S)
        except ValueError as error:
            raise SandboxUnavailable(f"no sandbox: {error}") from None
        await stack.enter_async_context(client)
        await _smoke_test(client, endpoints, limits)
        checker = AnswerChecker(client, limits, answer_check, answer_rounding)
        yield SandboxConnection(endpoints, PythonTool(client, limits), checker, ProgramJudge(client, limits))


async def _smoke_test(client: AsyncClient, endpoints: Sequence[str], limits: Limits) -> None:
    """Run one call, so that a wrong address, token or limit is an error now and not an outage during the episodes."""
    try:
        result = await client.execute("print(6 * 7)", limits=limits)
    except SandboxError as error:
        raise SandboxUnavailable(f"no sandbox at {', '.join(endpoints)}: {error}") from error
    if result.stdout != "42\n":
        raise SandboxUnavailable(f"the sandbox at {', '.join(endpoints)} cannot run print(6 * 7): {result.error}")
