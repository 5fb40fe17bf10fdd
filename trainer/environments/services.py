"""The services that the environments of one process share: the sandbox, sessions with MCP servers, reward functions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from trainer.config import ConfigError, RewardConfig
from trainer.environments.connection import SandboxConnection
from trainer.environments.mcp_session import SharedSessions
from trainer.environments.own_reward import RewardCalls


@dataclass(frozen=True, slots=True)
class Services:
    sandbox: SandboxConnection | None = None
    mcp_sessions: SharedSessions = field(default_factory=SharedSessions)
    reward_calls: RewardCalls = field(default_factory=RewardCalls)

    @property
    def required_sandbox(self) -> SandboxConnection:
        if self.sandbox is None:
            raise ConfigError("expected a sandbox, got none; open one for the problems that `needs_sandbox` names")
        return self.sandbox


@asynccontextmanager
async def open_services(
    sandbox: SandboxConnection | None = None, rewards: RewardConfig | None = None
) -> AsyncIterator[Services]:
    """Open the services of one process. At the end the sessions with MCP servers and the thread of reward functions are
    closed; `sandbox` stays open."""
    services = Services(sandbox, reward_calls=RewardCalls(rewards))
    try:
        yield services
    finally:
        services.reward_calls.close()
        await services.mcp_sessions.close()
