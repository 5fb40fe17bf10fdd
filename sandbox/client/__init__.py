"""The clients of the server: `from sandbox.client import AsyncClient, Client`."""

from sandbox.client.clients import AsyncClient, Client, Session
from sandbox.client.sessions import AsyncSession
from sandbox.errors import (
    InvalidCall,
    Overloaded,
    RequestRefused,
    SandboxError,
    ServiceError,
    SessionGone,
    TooLarge,
    Unreachable,
)
from sandbox.judging.programs import JudgedProgram, JudgeOutcome
from sandbox.types import Call, CellResult, Limits, Outcome, Result, Status, Verdict

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Call",
    "CellResult",
    "Client",
    "InvalidCall",
    "JudgeOutcome",
    "JudgedProgram",
    "Limits",
    "Outcome",
    "Overloaded",
    "RequestRefused",
    "Result",
    "SandboxError",
    "ServiceError",
    "Session",
    "SessionGone",
    "Status",
    "TooLarge",
    "Unreachable",
    "Verdict",
]
