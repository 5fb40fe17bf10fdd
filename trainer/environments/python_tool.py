"""The trainer's one door to the sandbox: the Python tool, the checker of answers, and a service of one's own.

Invariants:
- What the code did is a reply; what we failed to do is `UNAVAILABLE` with `error`, has no text for the model, and is
  never an exception: one failed call must not end the other episodes.
- A malformed call (`invalid`) is a bug of the trainer: arguments and answers of the model are checked or encoded before
  they become one. It is `UNAVAILABLE` too, so that nothing is scored, and is logged as an error.
- A service that is misconfigured (no such address, wrong token, no isolation) is an exception, before any episode.
- A service that we started ends with us, even if we are killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from sandbox.client import AsyncClient
from sandbox.errors import InvalidCall, SandboxError, ServiceError
from sandbox.local import local_service
from sandbox.tool import TOOL_NAMES, TOOL_SCHEMA, parse_arguments, render
from sandbox.types import Limits, Outcome, Result, Status
from trainer.episodes.episode import ToolCall, ToolCallStatus
from trainer.episodes.reward import VerifyOutcome

__all__ = ["TOOL_SCHEMA", "ServiceFailed", "Tools", "service"]

log = logging.getLogger(__name__)

GATHER_S = 0.02
"""A call waits so long for others, if some are under way: about the time that it takes, and next to nothing beside a
turn's. Calls sent one by one would cost more of our own time than all else about them."""
RETRIES = 8
"""Failures in a row that a call outlives: about 15 s, in which a service that is restarted is back."""


class ServiceFailed(Exception):
    """There is no sandbox to work with. The message says which, why, and what to do."""


class Tools:
    """What episodes and rewards need of the sandbox at `endpoints`: Python, and answers compared by math-verify."""

    def __init__(self, client: AsyncClient, *, limits: Limits, endpoints: tuple[str, ...] = ()) -> None:
        self._client, self._limits, self.endpoints = client, limits, endpoints

    async def run(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        """What came of a call by tool name and arguments, JSON or parsed. Raises nothing but cancellation."""
        if name not in TOOL_NAMES:
            text = f"NameError: there is no tool {name!r:.80}; there is {TOOL_NAMES[0]}"
            return ToolCall(name, arguments, ToolCallStatus.MALFORMED, text)
        try:
            call = parse_arguments(arguments)
        except InvalidCall as why:
            return ToolCall(name, arguments, ToolCallStatus.MALFORMED, str(why))
        asked = partial(ToolCall, name, {"code": call.code, "input": call.stdin})
        start = time.monotonic()
        result: Result | None = None
        try:
            result = await self._client.execute(replace(call, limits=self._limits))
            response = render(result, max_chars=sys.maxsize)
        except ServiceError as why:
            if result is not None and result.status is Status.INVALID:
                log.error("%s", why)
            return asked(ToolCallStatus.UNAVAILABLE, "", duration_s=time.monotonic() - start, error=str(why))
        is_truncated = not {"stdout", "value"}.isdisjoint(result.truncated)
        return asked(ToolCallStatus(result.status), response, time.monotonic() - start, is_truncated)

    async def verify(self, pairs: Sequence[tuple[str, str]]) -> list[VerifyOutcome]:
        """Compare pairs of the right answer and the model's, in order. Raises nothing but cancellation."""
        try:
            verdicts = await self._client.verify(pairs, limits=self._limits)
        except ServiceError as why:
            log.warning("%d answers could not be checked: %s", len(pairs), why)
            return [VerifyOutcome.UNAVAILABLE] * len(pairs)
        for bad in (verdict for verdict in verdicts if verdict.outcome is Outcome.INVALID):
            log.error("the trainer sent a malformed pair of answers: %s", bad.message)
        return [
            VerifyOutcome.UNAVAILABLE if verdict.outcome is Outcome.INVALID else VerifyOutcome(verdict.outcome.value)
            for verdict in verdicts
        ]


@asynccontextmanager
async def service(
    endpoint: str | Sequence[str] | None = None,
    *,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    arguments: Sequence[str] = (),
) -> AsyncIterator[Tools]:
    """The tools of the service at one endpoint or several; none, or "local", starts one for as long as this lasts.

    `timeout_s` and `memory_mb` bound each call. RSTAR_SANDBOX_TOKEN is the token, if one is needed. `arguments` are
    further ones of `rstar-sandbox serve`, for a local one. Raises `ServiceFailed`.
    """
    limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb)
    async with contextlib.AsyncExitStack() as stack:
        if not endpoint or endpoint == "local":
            try:
                endpoint = await stack.enter_async_context(local_service(arguments))
            except ServiceError as why:
                raise ServiceFailed(str(why)) from why
        endpoints = (endpoint,) if isinstance(endpoint, str) else tuple(endpoint)
        try:
            client = AsyncClient(
                endpoints, token=os.environ.get("RSTAR_SANDBOX_TOKEN"), retries=RETRIES, gather_s=GATHER_S
            )
        except ValueError as why:
            raise ServiceFailed(f"no sandbox: {why}") from None
        await stack.enter_async_context(client)
        await _check(client, endpoints, limits)
        yield Tools(client, limits=limits, endpoints=endpoints)


async def _check(client: AsyncClient, endpoints: Sequence[str], limits: Limits) -> None:
    """One call: a wrong address, token or limit shall not look like an outage later."""
    try:
        result = await client.execute("print(6 * 7)", limits=limits)
    except SandboxError as why:
        raise ServiceFailed(f"no sandbox at {', '.join(endpoints)}: {why}") from why
    if result.stdout != "42\n":
        raise ServiceFailed(f"the sandbox at {', '.join(endpoints)} cannot run print(6 * 7): {result.error}")
