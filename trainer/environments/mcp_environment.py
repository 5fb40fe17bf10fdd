"""The environment `mcp`: the tools of any MCP server, and an exact-match answer by GAIA's public rule.

A server over stdio is started for each episode. With a server over HTTP, each episode has a session of its own. If
`per_episode` is false, episodes share a session instead. A server is not sandboxed: it runs with the trainer's rights.
"""

from __future__ import annotations

import importlib.util
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from trainer.config import STRICT, ConfigError, PositiveFloat
from trainer.environments.environment import Environment, InitialState
from trainer.environments.mcp_session import McpArgumentError, McpSession
from trainer.environments.services import Services
from trainer.episodes.chat_format import ToolSchema
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus
from trainer.episodes.reward import exact_match_reward
from trainer.episodes.turn_parser import ToolCallRequest

if TYPE_CHECKING:
    from mcp.types import CallToolResult, Tool

if importlib.util.find_spec("mcp") is None:
    raise ConfigError("environment mcp: needs the MCP SDK: pip install 'rstar-sandbox[mcp]'")

REFUSED_VARIABLES = ("RSTAR_", "RAY_")
"""Prefixes of variables that configure the trainer and its cluster."""


@dataclass(frozen=True, config=STRICT)
class McpOptions:
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The program of a server on stdio, with its arguments."""
    url: Annotated[str, Field(pattern="^https?://")] | None = None
    """The URL of a server on streamable HTTP."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of `command`. They are stored with each episode, so they must not contain secrets."""
    per_episode: bool = True
    """Whether each episode has a session of its own with `url`. With false, the episodes of a process share a session.
    `is_stateful` then has to be false too."""
    is_stateful: bool = True
    """Whether a response depends on earlier calls. With false, an episode that is continued does not repeat its calls.
    A web search needs false: its calls cannot be repeated, since its responses may have changed."""
    start_timeout_s: PositiveFloat = 30.0
    call_timeout_s: PositiveFloat = 60.0
    level: int | None = None
    """Level of the problem in its data set. Reports have a row for each level (`trainer.recipe.pass_at_k`)."""

    @model_validator(mode="after")
    def _check(self) -> McpOptions:
        if (self.command is None) == (self.url is None):
            raise ValueError("expected either command or url")
        if not self.per_episode and (self.is_stateful or self.command):
            raise ValueError(
                "per_episode: expected true, since episodes that share a session would see each other's state; or url "
                "with is_stateful=false"
            )
        for name in self.env:
            if name.startswith(REFUSED_VARIABLES):
                raise ValueError(f"env.{name}: variables of the trainer and of Ray cannot be given to a server")
        return self


class McpEnvironment(Environment):
    is_stateful = True
    options_type = McpOptions
    options: McpOptions

    def __init__(self, services: Services, options: McpOptions) -> None:
        super().__init__(services, options)
        self.is_stateful = options.is_stateful
        self._session: McpSession | None = None
        self._is_shared = not options.per_episode

    async def reset(self, problem: Problem) -> InitialState:
        options = self.options
        if options.url and self._is_shared:
            self._session = await self.services.mcp_sessions.get(options.url, options.start_timeout_s)
        else:
            target = options.url or options.command or ()
            self._session = McpSession(target, options.env, options.start_timeout_s, has_state=options.is_stateful)
        await self._session.start()
        return InitialState(problem.text, tuple(map(_schema, self._session.tools.values())))

    async def step(self, action: ToolCallRequest) -> ToolCall:
        assert self._session, "reset comes first"
        finished = partial(ToolCall, action.name, action.arguments)
        if action.name not in self._session.tools:
            names = ", ".join(self._session.tools)
            message = f"NameError: there is no tool {action.name!r:.80}; there are {names:.500}"
            return finished(ToolCallStatus.MALFORMED, message)
        try:
            arguments = json.loads(action.arguments) if isinstance(action.arguments, str) else action.arguments
        except (ValueError, RecursionError) as error:
            return finished(ToolCallStatus.MALFORMED, f"{type(error).__name__}: {error}")
        if not isinstance(arguments, dict):
            return finished(ToolCallStatus.MALFORMED, "TypeError: the arguments must be a JSON object")
        start = time.monotonic()
        try:
            result = await self._session.call(action.name, arguments, self.options.call_timeout_s)
        except McpArgumentError as error:
            return finished(ToolCallStatus.ERROR, str(error), time.monotonic() - start)
        status = ToolCallStatus.ERROR if result.is_error else ToolCallStatus.OK
        return finished(status, _text(result), time.monotonic() - start)

    async def score(self, episode: Episode) -> float | None:
        return exact_match_reward(episode)

    async def close(self) -> None:
        if self._session and not self._is_shared:
            await self._session.close()


def _schema(tool: Tool) -> ToolSchema:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(result: CallToolResult) -> str:
    """Return the text of a result. Of content that is no text, only the kind is shown."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content)]
    return "\n".join(parts) or "(no output)"
