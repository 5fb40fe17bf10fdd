"""The executor's end of a session: an interpreter that keeps its variables and files from cell to cell.

The keeper of a session (`guest/session.py`) is a process that a zygote forks as it forks a call, in a slot that the
session keeps. To the executor, the keeper is a zygote, and cells are its calls: the time limit, the memory limit and
the end of a cell are handled as those of a call.

The field `session` of an encoded call says what the call is to do with a session:

    {op: "open", id, keep_states}     start a session; ok once it has its first state
    {op: "cell", id, state}           run the code in a fork of a state; without `state`, of the head

The result of both has the field `session`: {head, states, committed, lost}. The head is the state from which the next
cell is forked: the state that the last cell has made or, if it made none, the state from which it ran.
"""

from __future__ import annotations

from typing import Any

from sandbox.errors import ProtocolError
from sandbox.executor import zygote_frames
from sandbox.executor.call_state import Attempt
from sandbox.executor.unix_stream import UnixStream
from sandbox.executor.zygote import Zygote
from sandbox.executor.zygote_frames import Header
from sandbox.guest.protocol import MAX_LOST
from sandbox.types import EncodedCellResult, EncodedResult, EncodedSession


class Session(Zygote):
    """The executor's end of the keeper of one session."""

    def __init__(self, stream: UnixStream, zygote: Zygote, keeper: Attempt) -> None:
        super().__init__(zygote.profile, stream, zygote.jail_process)
        spec = keeper.call.spec
        self.modules = zygote.modules
        self.id: str = spec.session["id"]
        self.keeper = keeper
        """The attempt of the keeper in its zygote."""
        self.head = 0
        self.states = [0]
        """Numbers of the states that are kept."""
        self.cells = 0
        """Number of cells that were started."""
        keep_states: int = spec.session["keep_states"]
        # The states have the uid of the cells, so they count as processes and share the memory limit.
        processes = spec.max_tasks + keep_states + 1
        self.max_tasks = processes + 2
        """With the keeper and its thread."""
        self.header = {"op": "session", "session": {"keep_states": keep_states}, "processes": processes}
        """Fields of the frame that starts the keeper."""
        keeper.memory_bytes = spec.cgroup_memory_bytes(keeper.zygote_bytes) + keep_states * (
            keeper.zygote_bytes + spec.disk_bytes
        )
        self._zygote = zygote

    def start_cell(self, attempt: Attempt) -> None:
        self.cells += 1
        self.head = attempt.call.spec.session.get("state", self.head)  # also if the cell makes no new state
        self.start_call(attempt, {"state": self.head, "cell": self.cells})

    def read_state(self, ended: Header) -> EncodedSession:
        """Read from the frame `ended` of a cell which states there are now. Return the field `session` of its result.
        Raises `ProtocolError`."""
        number: Any = ended.get("state")
        states: Any = ended.get("states")
        if type(states) is not list or not states or any(type(state) is not int for state in states):
            raise ProtocolError("the end of a cell names no states")
        self.states = sorted(states)
        if number in states:
            self.head = number
        elif self.head not in states:  # a cell has killed it; the keeper lists the state that was used last at the end
            self.head = states[-1]
        return self.encoded(committed=number in states, lost=zygote_frames.get_texts(ended, "lost")[:MAX_LOST])

    def encoded(self, *, committed: bool = True, lost: list[str] | None = None) -> EncodedSession:
        """Return the field `session` of a result."""
        return {"head": self.head, "states": self.states, "committed": committed, "lost": lost or []}

    def end(self) -> None:
        """Make the zygote kill the keeper, and with it all processes of the session. Idempotent."""
        if self.keeper.run_id in self._zygote.running:
            self.keeper.kill()


def with_session(result: EncodedResult, session: EncodedSession) -> EncodedCellResult:
    """Return the result of a cell, or of the call that opened its session."""
    return {**result, "session": session}
