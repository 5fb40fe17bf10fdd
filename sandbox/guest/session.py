"""The keeper of a session: forks the session's cells from its states, and keeps the states.

A session is an interpreter that keeps its variables and files from cell to cell. A state is a process that waits, with
the variables of all cells up to one cell, and the files of that moment. A cell runs in a fork of a state. If its code
ends, also by an exception, the fork is a new state: the cell is committed. If the process ends before its code (it is
killed, or calls `os._exit`), there is no new state, and the old one is unchanged.

    zygote --frame `session`--> keeper: pid 1 of its own PID namespace, with the rights of the zygote
                                  |-- state 0: the first process of the session, confined as a call is
                                  |-- state 1: a fork of state 0, which ran a cell
                                  `-- a fork of state 1, which runs a cell

    frames received from the executor                 frames sent
    call {run_id, state, cell, ...}                   ready {}: there is state 0
        + code, stdin, options, files                 ended {run_id, state, states, lost, ...} + stdout, stderr, ...;
                                                          `state` is null if the cell was not committed
                                                      start_failed {run_id, reason}: no code has run
                                                      still_running {run_id, wall_ms} + pidfd
    kill {run_id}

Invariants:
- No code of a client runs in the keeper. It is the init of its PID namespace and cannot be traced, so a cell can
  neither signal nor read it.
- When a cell has ended, none of its processes is left but the new state. The directory has the files of the state from
  which the cell ran, or of the new state.
- A state is a process with one thread. What else a cell leaves behind is lost, and `lost` names it.
- The keeper trusts nothing that a state sends. The kernel tells it the pid of a fork (SCM_CREDENTIALS).
- Of all states, those that were used last are kept, `keep_states` of them.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import frames
import output_files
import runner
import session_files
import session_state
import system_calls
from call_outputs import CallOutputs, exit_fields
from confine import Confinement
from protocol import MAX_LOST

SOCKET_FD = 6
"""Descriptor of the keeper for its socket to the executor."""
_HELLO_TIMEOUT_MS = 10_000
"""Maximum milliseconds until a fork of a state has answered. Code of the client may have damaged the state."""
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_KILL_PASSES = 1000
_MAX_LOST_CHARS = 200
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PASSCRED, _SCM_CREDENTIALS = 16, 2
_sendmsg, _recvmsg = socket.socket.sendmsg, socket.socket.recvmsg  # kept here because `runner` replaces the methods


class StateFailed(Exception):
    """A state did not fork, or its fork did not answer."""


class State:
    """A process that waits for a cell, and the files that belong to it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self.files: dict[str, session_files.Entry] = {}


class Cell:
    """A cell, from its fork to its result."""

    def __init__(self, call: dict, origin: State, process: State, outputs: CallOutputs, started: float) -> None:
        self.run_id: int = call["run_id"]
        self.origin = origin  # the state from which it was forked
        self.process = process
        self.outputs = outputs
        self.pidfd = os.pidfd_open(process.pid)
        self.started = started
        self.report: dict[str, Any] = {}  # what the process sent when its code had ended
        self.status: int | None = None  # wait status, once the process has ended
        self.peak_kb = 0
        self.lost: list[str] = []


def serve(call: dict, options_json: bytes, confinement: Confinement, report_after_s: float) -> None:
    """Serve the cells of a session until the executor closes the socket or no state is left. Does not return."""
    try:
        Keeper(call, options_json, confinement, report_after_s).run()
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException as error:
        os.write(runner.REPORT_FD, f"{type(error).__name__}: {error}".encode()[:4096])
    os._exit(1)


class Keeper:
    """The loop that receives frames, forks cells and sends their results."""

    def __init__(self, call: dict, options_json: bytes, confinement: Confinement, report_after_s: float) -> None:
        sock = socket.socket(fileno=SOCKET_FD)
        self.reader, self.writer = frames.FrameReader(sock), frames.FrameWriter(sock)
        self.report_after_s = report_after_s
        self.keep_states: int = call["session"]["keep_states"]
        self.child_signal_fd = system_calls.open_child_signal_fd()
        self.poll = select.poll()
        self.poll.register(self.child_signal_fd, select.POLLIN)
        self.poll.register(sock, select.POLLIN)
        self.cell: Cell | None = None
        self.deadline: float | None = None  # time at which the cell is reported as still running
        self.files = session_files.SessionFiles(confinement.scratch_mount or os.getcwd())
        first = self._start_first_state(call, options_json, confinement)
        self.states = {0: first}  # by number, in the order of their last use
        self.current: State | None = first  # the state whose files are in the directory
        self.next_number = 1
        self.last_id = 2  # id of the thread that `_kill_rest` has started last; 2 is the first state

    def run(self) -> None:
        self.writer.add({"op": "ready"})
        self.writer.flush()
        sock_fd = self.reader.sock.fileno()
        while self.states:
            readable = {fd for fd, _ in self.poll.poll(self._poll_timeout_ms())}
            if self.child_signal_fd in readable:
                os.read(self.child_signal_fd, 4096)  # empties it
                self._reap()
            cell = self.cell
            if cell is not None:
                if cell.process.channel.fileno() in readable:
                    self._receive_report(cell)
                if cell.report or cell.status is not None:
                    self._end_cell(cell)
            if sock_fd in readable:
                for header, body, record in self.reader.receive():
                    HANDLERS[header["op"]](self, header, body, record)
            if self.deadline is not None and self.deadline <= time.monotonic():
                self._report_still_running()
            self.writer.flush()

    def _poll_timeout_ms(self) -> float | None:
        return None if self.deadline is None else max(0.0, (self.deadline - time.monotonic()) * 1e3 + 1)

    def _on_kill(self, header: dict, *_data: memoryview) -> None:
        if self.cell is not None and self.cell.run_id == header["run_id"]:
            os.kill(self.cell.process.pid, signal.SIGKILL)

    def on_call(self, call: dict, body: memoryview, record: memoryview) -> None:
        """Start a cell in a fork of its state."""
        if self.cell is not None:  # the executor has cancelled that cell, and its end is not handled yet
            self._send_start_failed(call, "another cell of the session runs")
            return
        try:
            state = self.states.pop(call["state"])
        except KeyError:
            self._send_start_failed(call, f"state {call['state']} is gone")
            return
        self.states[call["state"]] = state  # the state that was used last
        try:
            self._start_cell(state, call, body, record)
        except (OSError, StateFailed) as error:
            self._send_start_failed(call, str(error))

    def _send_start_failed(self, call: dict, reason: str) -> None:
        self.writer.add({"op": "start_failed", "run_id": call["run_id"], "reason": reason})

    def _start_cell(self, state: State, call: dict, body: memoryview, record: memoryview) -> None:
        self._show_files_of(state)
        code_size, stdin_size = call["blobs"][:2]
        inputs: list[int] = []
        outputs = CallOutputs(call)
        started = time.monotonic()
        try:
            inputs.append(output_files.input_file(record))
            stdin = body[code_size : code_size + stdin_size]
            inputs.append(output_files.input_file(stdin) if stdin_size else os.open(os.devnull, os.O_RDONLY))
            process = self._fork(state, b"cell", [*inputs, *outputs.fds])
            cell = self.cell = Cell(call, state, process, outputs, started)
        except BaseException:
            outputs.close()
            raise
        finally:
            for fd in inputs:
                os.close(fd)
        self.poll.register(cell.process.channel, select.POLLIN)
        self.deadline = cell.started + min(call["timeout_s"], self.report_after_s)

    def _report_still_running(self) -> None:
        assert self.cell is not None
        wall_ms = (time.monotonic() - self.cell.started) * 1e3
        header = {"op": "still_running", "run_id": self.cell.run_id, "wall_ms": wall_ms}
        self.writer.send_with_fd(header, self.cell.pidfd)
        self.deadline = None

    def _receive_report(self, cell: Cell) -> None:
        """Receive what the process of a cell sends when its code has ended. If it sends anything else, kill it."""
        data = _recvmsg(cell.process.channel, _MAX_MESSAGE_BYTES)[0]
        try:
            report = json.loads(data)
            cell.lost = [str(name)[:_MAX_LOST_CHARS] for name in report["lost"][:MAX_LOST]]
            cell.peak_kb = min(max(0, int(report["peak_kb"])), 1 << 40)
            cell.report = {
                "exit_code": int(report["exit_code"]) & 0xFF,
                "children_cpu_ms": min(max(0.0, float(report["children_cpu_ms"])), 1e12),
                "is_alone": report["is_alone"] is True,
            }
        except (ValueError, TypeError, KeyError, OverflowError):
            self.poll.unregister(cell.process.channel)
            if data:
                os.kill(cell.process.pid, signal.SIGKILL)
            # Otherwise the process has ended, or its code has closed the channel and may go on until its end.

    def _end_cell(self, cell: Cell) -> None:
        """Commit a cell, or kill what is left of it and restore the files. Send the result."""
        self.deadline = None
        with contextlib.suppress(KeyError):  # `_receive_report` has removed it
            self.poll.unregister(cell.process.channel)
        wall_ms = (time.monotonic() - cell.started) * 1e3
        cpu_ms = _process_cpu_ms(cell.process.pid) + cell.report.get("children_cpu_ms", 0.0)
        fields, _ = cell.outputs.contents()
        state = None
        if cell.report and not any(fields.values()):  # no output was truncated
            state = self._commit(cell)
        if state is None:
            self._kill_rest(cell)
            cell.process.channel.close()
            self.current = None
            self._show_files_of(cell.origin)
        self.cell = None
        os.close(cell.pidfd)
        if cell.report:
            ended = {"exit_code": cell.report["exit_code"], "signal": None}
        else:
            assert cell.status is not None
            ended = exit_fields(cell.status)
        fields, blobs = cell.outputs.contents()
        header = {
            "op": "ended",
            "run_id": cell.run_id,
            **ended,
            "wall_ms": wall_ms,
            "cpu_ms": cpu_ms,
            "peak_kb": cell.peak_kb,
            **fields,
            "state": state,
            "states": [*self.states],
            "lost": cell.lost,
        }
        self.writer.add(header, blobs)
        cell.outputs.close()

    def _commit(self, cell: Cell) -> int | None:
        """Make the process of a cell a state, and return its number. Return None if the process has ended.

        A process with further threads or child processes forks once more, and the fork is the state: it has neither.
        """
        process = cell.process
        if not cell.report["is_alone"]:
            try:
                process = self._fork(cell.process, b"state", [])
            except (OSError, StateFailed):
                return None
        if self._kill_rest(cell, process.pid):
            cell.lost.append("processes")
        if process is not cell.process:
            cell.process.channel.close()
        elif cell.status is not None:
            return None
        process.files = self.files.read(cell.origin.files)
        number, self.next_number = self.next_number, self.next_number + 1
        self.states[number] = self.current = process
        for old in list(self.states)[: -self.keep_states]:
            state = self.states.pop(old)
            state.channel.close()
            os.kill(state.pid, signal.SIGKILL)
        return number

    def _show_files_of(self, state: State) -> None:
        """Make the directory contain the files of a state."""
        if self.current is not state:
            self.files.restore(state.files)
            self.current = state

    # Processes

    def _start_first_state(self, call: dict, options_json: bytes, confinement: Confinement) -> State:
        """Fork the first state. Raises `OSError` or `StateFailed`."""
        ours, theirs = _channel()
        pid = session_state.fork(confinement.tid_address)
        if pid == 0:
            steps = confinement.state_steps(call["slot"], call)
            session_state.start(theirs.fileno(), call["open_files"] - 1, steps, confinement.tid_address, options_json)
        theirs.close()
        if pid < 0:
            raise OSError(-pid, f"fork of the first state: {os.strerror(-pid)}")
        return State(_receive_hello(ours, ours), ours)

    def _fork(self, state: State, kind: bytes, fds: list[int]) -> State:
        """Make a state fork itself, with a new channel and `fds`. Raises `StateFailed` or `OSError`."""
        ours, theirs = _channel()
        with theirs:
            rights = struct.pack(f"{1 + len(fds)}i", theirs.fileno(), *fds)
            _sendmsg(state.channel, [kind], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        try:
            return State(_receive_hello(ours, state.channel), ours)
        except BaseException:
            ours.close()
            raise

    def _kill_rest(self, cell: Cell, kept: int = 0) -> bool:
        """Kill all processes that were started since the end of the last cell, except `kept` and the states. Return
        whether there were others than the process of this cell.

        A jail has no /proc that lists processes. The kernel assigns pids in turn, so the ids of two threads that the
        keeper starts, one after the last cell and one now, are the bounds. If the second id is the lower one, the
        numbers have begun again, and all numbers are tried.
        """
        pid = cell.process.pid
        if pid != kept:  # its threads have ids too, so wait for their end
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PIDFD, cell.pidfd, os.WEXITED | os.WNOWAIT)
        first, was_any_alive = self.last_id, False
        for _ in range(_MAX_KILL_PASSES):
            self._reap()
            self.last_id = _new_thread_id()
            spared = {1, pid, kept, *(state.pid for state in self.states.values())}
            is_any_alive = False
            for other in range(first if self.last_id > first else 2, max(self.last_id, first)):
                if other not in spared:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
                        is_any_alive = was_any_alive = True
            if not is_any_alive:
                return was_any_alive
        raise StateFailed(f"processes of a cell are left after {_MAX_KILL_PASSES} tries to kill them")

    def _reap(self) -> None:
        """Collect processes that have ended. A state that has ended is forgotten."""
        for pid, status, usage in system_calls.ended_children():
            if self.cell is not None and pid == self.cell.process.pid:
                self.cell.status, self.cell.peak_kb = status, usage.ru_maxrss
            for number in [number for number, state in self.states.items() if state.pid == pid]:
                self.states.pop(number).channel.close()


HANDLERS: dict[str, Callable[..., None]] = {"call": Keeper.on_call, "kill": Keeper._on_kill}
"""The method that handles a frame, by the frame's `op`."""


def _channel() -> tuple[socket.socket, socket.socket]:
    """Return the keeper's end and a state's end of a channel that keeps the bounds of messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, _SO_PASSCRED, 1)
    return ours, theirs


def _receive_hello(channel: socket.socket, errors: socket.socket) -> int:
    """Wait for the first message of a fork, and return the pid of its sender. `errors` is the channel on which the fork
    may be reported as failed. Raises `StateFailed`."""
    poll = select.poll()
    for each in {channel, errors}:
        poll.register(each, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(_HELLO_TIMEOUT_MS)]
    source = channel if channel.fileno() in ready or not ready else errors
    data, ancillary, _, _ = _recvmsg(source, 4096, socket.CMSG_SPACE(_CREDENTIALS.size)) if ready else (b"", (), 0, 0)
    if data == b"hello" and source is channel:
        for _level, kind, credentials in ancillary:
            if kind == _SCM_CREDENTIALS:
                return int(_CREDENTIALS.unpack(credentials)[0])
    raise StateFailed(f"the state did not fork: {data.decode('utf-8', 'replace') or 'no answer'}")


def _new_thread_id() -> int:
    """Return a number above the pids of all processes, unless the numbers have begun again."""
    ids: list[int] = []
    is_noted = _thread.allocate_lock()
    is_noted.acquire()

    def note() -> None:
        ids.append(_thread.get_native_id())
        is_noted.release()

    _thread.start_new_thread(note, ())
    is_noted.acquire()
    return ids[0]


def _process_cpu_ms(pid: int) -> float:
    """Return the CPU time of a process that may have ended but has not been waited for; 0 if it has."""
    try:
        return time.clock_gettime(~pid << 3 | 2) * 1e3  # as clock_getcpuclockid(3) computes the number
    except OSError:
        return 0.0
