"""The Python tool: runs a model's code in the sandbox.

Invariants:
- Anything that the code does gives a response.
- If infrastructure fails, the tool call has the status `UNAVAILABLE`, an `error`, and no text for the model. `call`
  raises no exception for such a failure, because one failed call must not end other episodes.
- The model's arguments are checked before a call is sent. So a call that the sandbox rejects as `invalid` is a bug of
  the trainer. It is logged as an error and has the status `UNAVAILABLE`, so the episode is not scored.
- A *poisonous* call is one that the sandbox has lost in all its attempts, although its code may have started. It must
  not run again, so it ends its episode for good (`ends_episode`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sandbox.client import AsyncClient
from sandbox.errors import InvalidCall, ServiceError
from sandbox.tool import TOOL_NAMES, TOOL_SCHEMA, parse_arguments, render
from sandbox.types import Limits, Result, Status, UnavailableReason
from trainer.episodes.episode import ToolCall, ToolCallStatus

__all__ = ["TOOL_SCHEMA", "PythonTool"]

logger = logging.getLogger(__name__)


class PythonTool:
    """Runs code through `client`, each call within `limits`."""

    def __init__(self, client: AsyncClient, limits: Limits) -> None:
        self._client, self._limits = client, limits

    async def call(
        self, name: str, arguments: str | Mapping[str, Any], *, files: Mapping[str, bytes] | None = None
    ) -> ToolCall:
        """Run one tool call. Raises nothing but cancellation.

        - `arguments`: a JSON text, or the parsed arguments.
        - `files`: put into the working directory of the code. They must be valid for a `Call`. Their size does not
          count in `disk_mb`.
        """
        if name not in TOOL_NAMES:
            response = f"NameError: there is no tool {name!r:.80}; there is {TOOL_NAMES[0]}"
            return ToolCall(name, arguments, ToolCallStatus.MALFORMED, response)
        try:
            call = parse_arguments(arguments)
        except InvalidCall as error:
            return ToolCall(name, arguments, ToolCallStatus.MALFORMED, str(error))
        finished = partial(ToolCall, name, {"code": call.code, "input": call.stdin})
        start = time.monotonic()
        result: Result | None = None
        try:
            call = replace(call, files=files or {}, limits=self._limits_with(files))
            result = await self._client.execute(call)
            response = render(result, max_chars=sys.maxsize)
        except ServiceError as error:
            if result is not None and result.status is Status.INVALID:
                logger.error("%s", error)
            is_poisonous = (
                result is not None and result.error is not None and result.error.type == UnavailableReason.POISON
            )
            duration_s = time.monotonic() - start
            return finished(ToolCallStatus.UNAVAILABLE, "", duration_s, error=str(error), ends_episode=is_poisonous)
        is_truncated = not {"stdout", "value"}.isdisjoint(result.truncated)
        return finished(ToolCallStatus(result.status), response, time.monotonic() - start, is_truncated)

    def _limits_with(self, files: Mapping[str, bytes] | None) -> Limits:
        if not files:
            return self._limits
        return replace(self._limits, disk_mb=self._limits.disk_mb + (sum(map(len, files.values())) >> 20) + 1)
