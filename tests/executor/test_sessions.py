"""Tests of sessions on a real executor: each cell runs in a fork of a state, and a cell that fails leaves the state as
it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.jail import Level, choose_level
from sandbox.types import CellResult, Result, Status
from tests.executor.calling import Caller, call, executor, wait_gone

SESSIONS = 8
ENDLESS = "while True: pass"


class Sessions:
    """Sessions of an executor."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._opened = 0

    def open(self, keep_states: int = 2, **fields: Any) -> str:
        """Open a session and return its id."""
        self._opened += 1
        session_id = f"session {self._opened}"
        result = self._run("", {"op": "open", "id": session_id, "keep_states": keep_states}, **fields)
        assert result.status is Status.OK, result
        return session_id

    def cell(self, session_id: str, code: str, state: int | None = None, **fields: Any) -> CellResult:
        """Run a cell in a session."""
        session = (
            {"op": "cell", "id": session_id} if state is None else {"op": "cell", "id": session_id, "state": state}
        )
        return self._run(code, session, **fields)

    def _run(self, code: str, session: dict[str, Any], **fields: Any) -> Any:
        return self.caller.result_of(self.submit(code, session, **fields))

    def submit(self, code: str, session: dict[str, Any], **fields: Any) -> int:
        """Submit a call with this field `session`, and return its seq."""
        encoded = call(code, **fields).encode(binary=True)
        return self.caller.submit({**encoded, "session": session})

    def close(self, session_id: str) -> str:
        """Close a session, and return the reason that the executor gives for its end."""
        self.caller.send("close_session", session_id)
        self.caller.until(lambda: session_id in self.caller.ended_sessions)
        return self.caller.ended_sessions.pop(session_id)


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    if choose_level("auto").level not in (Level.NAMESPACES, Level.NSJAIL):
        pytest.skip("sessions need level namespaces or nsjail")
    with executor(sessions=SESSIONS) as caller:
        yield Sessions(caller)


@pytest.fixture
def session(sessions: Sessions) -> Iterator[str]:
    session_id = sessions.open(keep_states=3)
    yield session_id
    sessions.close(session_id)


def test_variables_and_files_last_from_cell_to_cell(sessions: Sessions, session: str) -> None:
    assert sessions.cell(session, "x = 6\nopen('f', 'w').write('text')").value == "4"
    result = sessions.cell(session, "print(open('f').read())\nx * 7")
    assert (result.value, result.stdout, result.session.head) == ("42", "text\n", 2)


def test_an_exception_is_an_ordinary_end(sessions: Sessions, session: str) -> None:
    result = sessions.cell(session, "x = 1\ny = [\n1 / 0]")
    assert result.status is Status.ERROR and result.error is not None and result.session.committed
    assert (result.error.type, result.error.line) == ("ZeroDivisionError", 3)
    assert 'File "Cell 1", line 3' in result.error.traceback and "1 / 0" in result.error.traceback
    assert sessions.cell(session, "x").value == "1"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (ENDLESS, Status.TIMEOUT),
        ("import os\nos._exit(0)", Status.OK),
        ("import os\nos._exit(3)", Status.ERROR),
        ("print('x' * 100_000)", Status.OUTPUT_LIMIT),
        ("import os\nos.kill(os.getpid(), 9)", Status.KILLED),
        ("import os\nos.fork()\n" + ENDLESS, Status.TIMEOUT),
        ("import os\nwhile True:\n    if os.fork(): os._exit(0)", Status.OK),
    ],
    ids=["time", "exit", "error", "output", "kill", "fork", "daemons"],
)
def test_a_cell_without_an_ordinary_end_changes_nothing(
    end: str, status: Status, sessions: Sessions, session: str
) -> None:
    sessions.cell(session, "x = 1\nopen('kept', 'w').write('before')")
    change = "import os\nx = 2\nopen('kept', 'w').write('after')\nopen('new', 'w').close()\n"
    change += "os.mkdir('d')\nos.chmod('d', 0)\n"
    result = sessions.cell(session, change + end, timeout_s=0.3, output_kb=16)
    assert (result.status, result.session.committed, result.session.head) == (status, False, 1)
    after = sessions.cell(session, "import os\nx, open('kept').read(), sorted(os.listdir())")
    assert after.value == "(1, 'before', ['kept'])"


def test_a_cell_can_run_from_any_state_that_is_kept(sessions: Sessions, session: str) -> None:
    sessions.cell(session, "x = [0]\nopen('f', 'w').write('0')")
    for number in (1, 2):
        branch = sessions.cell(session, f"x.append({number})\nopen('f', 'a').write('{number}')\nx", state=1)
        assert (branch.value, branch.session.head) == (f"[0, {number}]", number + 1)
    assert sessions.cell(session, "x, open('f').read()", state=2).value == "([0, 1], '01')"
    assert sessions.cell(session, "x, open('f').read()", state=3).value == "([0, 2], '02')"


def test_a_state_that_is_no_longer_kept_is_named(sessions: Sessions, session: str) -> None:
    for _ in range(4):
        last = sessions.cell(session, "1")
    assert last.session.states == (2, 3, 4)
    result: Result = sessions.cell(session, "1", state=0)
    assert result.status is Status.UNAVAILABLE and result.error is not None and "state 0" in result.error.message


def test_threads_and_processes_are_lost(sessions: Sessions, session: str) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='T').start()\nx = 1"
    assert sessions.cell(session, thread).session.lost == ("thread T",)
    process = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n    os._exit(0)\nx += 1"
    assert sessions.cell(session, process).session.lost == ("processes",)
    result = sessions.cell(session, "x, threading.active_count()")
    assert (result.value, result.session.lost) == ("(2, 1)", ())


def test_cells_have_what_notebooks_have(sessions: Sessions, session: str) -> None:
    assert sessions.cell(session, "import asyncio\nawait asyncio.sleep(0)\n'awaited'").value == "'awaited'"
    assert sessions.cell(session, "input(), input()", stdin="a\nb\n").value == "('a', 'b')"
    assert sessions.cell(session, "1;").value is None
    magic = sessions.cell(session, "%pip install numpy")
    assert magic.error is not None and "no magic commands" in magic.error.message


def test_a_cell_cannot_end_its_keeper(sessions: Sessions, session: str) -> None:
    code = """
import os
x = 1
for pid in (1, -1):
    try:
        os.kill(pid, 9)
    except PermissionError:
        print('refused', pid)
os.closerange(3, 300)
"""
    result = sessions.cell(session, code)
    assert result.stdout == "refused 1\nrefused -1\n" or result.stdout == "refused -1\n"
    assert not result.session.committed, "the cell has closed the descriptor by which it would report its end"
    assert sessions.cell(session, "'x' in globals()").value == "False"


def test_a_cell_waits_for_the_end_of_another(sessions: Sessions, session: str) -> None:
    """The gateway sends the next cell when it has cancelled one, whose process may still be there."""
    cell = {"op": "cell", "id": session}
    seqs = [sessions.submit("import time\ntime.sleep(0.3)\nx = 1", cell), sessions.submit("x", cell)]
    first, second = map(sessions.caller.result_of, seqs)
    assert first.status is Status.OK and second.value == "1"


def test_sessions_are_separate(sessions: Sessions, session: str) -> None:
    other = sessions.open()
    sessions.cell(session, "x = 1\nopen('f', 'w').close()")
    assert sessions.cell(other, "import os\n'x' in globals(), os.listdir()").value == "(False, [])"
    assert sessions.caller.run("import os\nos.listdir()").value == "[]"
    sessions.close(other)


def test_the_end_of_a_session_leaves_nothing(sessions: Sessions) -> None:
    pids_before = {*sessions.caller.processes()}
    for _ in range(2 * SESSIONS):
        session = sessions.open()
        sessions.cell(session, "import os, time\nif os.fork() == 0: time.sleep(1000)")
        new = [pid for pid in sessions.caller.processes() if pid not in pids_before]
        sessions.close(session)
        wait_gone(new)


def test_a_cell_of_a_session_that_has_ended_is_lost(sessions: Sessions) -> None:
    session = sessions.open()
    sessions.close(session)
    result: Result = sessions.cell(session, "1")
    assert result.status is Status.UNAVAILABLE
    assert result.error is not None and "the session has ended" in result.error.message


@pytest.mark.parametrize("seed", range(3))
def test_every_later_cell_sees_the_committed_cells_only(seed: int, sessions: Sessions) -> None:
    """Compared with a list that only the committed cells change."""
    rng, expected = random.Random(seed), list[int]()
    session = sessions.open()
    sessions.cell(session, "x = []")
    ends = {"": True, "\n1 / 0": True, "\nimport os\nos._exit(1)": False, "\n" + ENDLESS: False}
    for number in range(25):
        end = rng.choices(list(ends), weights=(6, 3, 3, 1))[0]
        result = sessions.cell(session, f"x.append({number})\nopen('f', 'a').write('{number} ')" + end, timeout_s=0.2)
        assert result.session.committed is ends[end]
        expected += [number] if ends[end] else []
        seen = sessions.cell(session, "import os\nx, open('f').read() if os.path.exists('f') else ''").value
        assert seen == repr((expected, "".join(f"{n} " for n in expected)))
    sessions.close(session)


def test_a_fork_that_answers_for_the_cell_hides_no_process(sessions: Sessions, session: str) -> None:
    """A state whose code has replaced the wait for cells answers from a process that it has forked."""
    code = """
import os, sys, time
frame = sys._getframe()
while "_wait_for_fork" not in frame.f_globals:
    frame = frame.f_back
def write(fd, data, write=os.write, fork=os.fork):
    if data == b"hello" and fork() == 0:
        write(fd, data)
        return
    if data == b"hello":
        time.sleep(1000)
    return write(fd, data)
frame.f_globals["os"].write = write
"""
    assert sessions.cell(session, code).session.committed
    pids_before = {*sessions.caller.processes()}
    sessions.cell(session, "1", timeout_s=5)
    new = [pid for pid in sessions.caller.processes() if pid not in pids_before]
    assert len(new) <= 1, "at most the new state"
