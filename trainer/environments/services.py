"""The services that the environments of one process share: the sandbox, and sessions with MCP servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from trainer.config import ConfigError
from trainer.environments.connection import SandboxConnection
from trainer.environments.mcp_session import SharedSessions


@dataclass(frozen=True, slots=True)
class Services:
    sandbox: SandboxConnection | None = None
    mcp_sessions: SharedSessions = field(default_factory=SharedSessions)

    @property
    def required_sandbox(self) -> SandboxConnection:
        if self.sandbox is None:
            raise ConfigError("expected a sandbox, got none; open one for the problems that `needs_sandbox` names")
        return self.sandbox


@asynccontextmanager
async def open_services(sandbox: SandboxConnection | None = None) -> AsyncIterator[Services]:
    """Open the services of one process. At the end the sessions with MCP servers are closed; `sandbox` stays open."""
    services = Services(sandbox)
    try:
        yield services
    finally:
        await services.mcp_sessions.close()
