"""An OpenEnv server whose steps run Python code in the sandbox.

    uvicorn --factory sandbox.integrations.openenv:build_app --port 8000

Actions and observations have the fields of OpenEnv's `coding_env`, so its client works unchanged. Each WebSocket is a
session with variables and files of its own; `replayed_session` describes how they are kept. The server of this module
keeps the state of all sessions, but their code runs in the sandbox. So many sessions can be open at once.

A failure of the service is an error of the step, which OpenEnv's client raises, and never an observation.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from sandbox.integrations.connection import checked, shared_client
from sandbox.integrations.replayed_session import ReplayedSession
from sandbox.types import DEFAULT_LIMITS, Limits

MAX_SESSIONS = 1024
"""Default maximum of open sessions. Each session has an idle thread of OpenEnv and a few KiB."""


class CodeAction(Action):  # type: ignore[misc]
    """A piece of Python code to run."""

    code: str


class CodeObservation(Observation):  # type: ignore[misc]
    """`stdout` is what the code printed, or the value of its last expression if it printed nothing. `stderr` ends with
    the traceback, or with the reason why the code was stopped."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class CodeState(State):  # type: ignore[misc]
    """The session's id, its number of steps, and the exit code of the last step: 1 if the code was stopped."""

    last_exit_code: int = 0


class CodeEnvironment(Environment[CodeAction, CodeObservation, CodeState]):  # type: ignore[misc]
    """One session. Without `url` and `token`, `RSTAR_SANDBOX_URL` and `RSTAR_SANDBOX_TOKEN` are used."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, url: str | None = None, token: str | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__()
        self._client = shared_client(url, token)
        self._limits = limits
        self.reset()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CodeObservation:
        """Start with no variables and no files. `seed` is ignored."""
        self._session = ReplayedSession({"limits": self._limits})
        self._state = CodeState(episode_id=episode_id or str(uuid.uuid4()))
        return CodeObservation()

    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        return asyncio.run(self.step_async(action, timeout_s))

    async def step_async(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        """Run the code after the earlier steps. `timeout_s` limits the wait for the result, not the code. Raises
        `InvalidCall`, `ServiceError` and `TimeoutError`."""
        call = self._session.call(action.code)
        result = checked(await asyncio.wait_for(asyncio.wrap_future(self._client.submit(call)), timeout_s))
        result = self._session.record(action.code, result)
        exit_code = 1 if result.exit_code is None else result.exit_code  # None: the code was stopped
        self._state.step_count += 1
        self._state.last_exit_code = exit_code
        stdout, stderr = result.stdout or result.value or "", result.stderr
        if (error := result.error) and (not error.traceback or error.traceback not in stderr):
            stderr += error.traceback or str(error)
        return CodeObservation(stdout=stdout, stderr=stderr, exit_code=exit_code)

    @property
    def state(self) -> CodeState:
        return self._state


def build_app(max_sessions: int = MAX_SESSIONS) -> Any:
    """Return the FastAPI application of the server."""
    return create_app(
        CodeEnvironment, CodeAction, CodeObservation, env_name="rstar-sandbox", max_concurrent_envs=max_sessions
    )
