"""The clients of the server: `from sandbox.client import AsyncClient, Client`."""

from sandbox.client.clients import AsyncClient, Client
from sandbox.errors import InvalidCall, Overloaded, RequestRefused, SandboxError, ServiceError, TooLarge, Unreachable
from sandbox.judging.programs import JudgedProgram, JudgeOutcome
from sandbox.types import Call, Limits, Outcome, Result, Status, Verdict

__all__ = [
    "AsyncClient",
    "Call",
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
    "Status",
    "TooLarge",
    "Unreachable",
    "Verdict",
]
