"""The open sessions of a server: for each session its executor, its states and the time of its end.

A session is an interpreter that keeps its variables and files from cell to cell (`guest/session.py`). It lives in one
executor. A cell is a call that may run in this executor only (`PendingCall.session`), once: the call table sends it at
once, beyond the executor's window, and does not send it to another executor if it is lost.

Invariants:
- A session has at most one unfinished cell.
- No two sessions have the same id. The table keeps the reason for the end of the last `MAX_ENDED` sessions, and each
  further request for such a session gets the reason.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sandbox.types import EncodedSession

if TYPE_CHECKING:
    from sandbox.gateway.calls.batch import ExecutorId, PendingCall

MAX_ENDED = 10_000
"""Number of ended sessions whose reason is kept."""


@dataclass(eq=False, slots=True)
class Session:
    """An open session, or one that is being opened."""

    executor: ExecutorId
    idle_s: float
    """Seconds without a cell after which the session ends."""
    ends_at: float
    """Monotonic time at which the session ends in any case."""
    used_at: float
    """Monotonic time of its last cell."""
    tenant: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    head: int = 0
    """Number of the state from which the next cell runs."""
    states: list[int] = field(default_factory=lambda: [0])
    """Numbers of the states that are kept."""
    cells: int = -1
    """Number of cells that have ended. The first call of a session opens it."""
    call: PendingCall | None = None
    """The last call: the cell that runs, if it is unfinished."""

    @property
    def is_running(self) -> bool:
        return self.call is not None and self.call.call is not None

    def update(self, state: EncodedSession, now: float) -> None:
        """Take over what the result of its last call says about the session."""
        self.head, self.states, self.used_at = state["head"], list(state["states"]), now
        self.cells += 1

    def expires_at(self) -> float:
        """Return the monotonic time at which the session will end if no further cell is sent."""
        return self.ends_at if self.is_running else min(self.ends_at, self.used_at + self.idle_s)

    def end_reason(self, now: float) -> str:
        """Return why the session has to end now, or "" if it does not."""
        if now >= self.ends_at:
            return "it was open for max_s"
        if now >= self.expires_at():
            return f"it had no cell for idle_s, {self.idle_s:g} s"
        return ""


class SessionTable:
    """All open sessions by id, and the reasons why others have ended."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Tenant and reason, by id."""

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session) -> None:
        self._open[session.id] = session

    def get(self, session_id: str) -> Session | None:
        return self._open.get(session_id)

    def ended(self, session_id: str) -> tuple[str, str] | None:
        """Return the tenant of a session that has ended and the reason of its end. Return None for an unknown id."""
        return self._ended.get(session_id)

    def count(self, executor: ExecutorId) -> int:
        """Return the number of sessions of an executor."""
        return sum(session.executor == executor for session in self._open.values())

    def end(self, session_id: str, reason: str) -> Session | None:
        """Forget a session and keep the reason. Return the session; None if there is none."""
        session = self._open.pop(session_id, None)
        if session is not None:
            self._ended[session_id] = session.tenant, reason
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        return session

    def end_all_of(self, executor: ExecutorId, reason: str) -> None:
        """Forget all sessions of an executor that has died."""
        for session in self:
            if session.executor == executor:
                self.end(session.id, reason)
