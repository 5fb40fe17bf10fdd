"""A zygote: a preloaded interpreter with one thread that forks itself for each call.

This file is run by its path inside the jail: `zygote.py --fd N`. N is one end of a socket; the executor has the other
end. The zygote owns its running calls: it forks and reaps them, and reports the end of each call exactly once. Only the
executor decides about time limits. A call runs in a slot, which is a numbered set of resources for one call at a time.
A profile is the set of modules that a zygote imports before it forks calls.

    frames received                               frames sent
    configure {plan, profile}            first    loaded {python, modules, missing, problems}
                                                      with {refused} if the zygote cannot use the profile; it exits
    start {address_space_bytes, report_after_s}   ready {}: the zygote has started all its processes
    cgroup_procs {slot} + descriptor              (a process writes to it to enter the slot's cgroup)
    cgroup_dir {slot} + descriptor                (the zygote forks into this cgroup by clone3(2))
    call {run_id, slot, ...}                      ended {run_id, exit_code, signal, ...}
        + code, stdin, options, files                 + stdout, stderr, report, files
                                                  start_failed {run_id, reason}: no code has run
                                                  still_running {run_id, wall_ms} + pidfd: sent once, when the
                                                      call has run for report_after_s or for its timeout_s
    session {run_id, slot, ...} + socket          ended {run_id, ...}: when the session's keeper has ended
                                                  (the socket serves the cells of the session, see `session.py`)
    kill {run_id}
    spawn {profile, own_profile} + socket         (forks a child zygote that loads a profile and serves the socket)

If the executor closes its end of the socket, the zygote and all its calls end.
"""

from __future__ import annotations

import fork_memory

if __name__ == "__main__":
    fork_memory.use_one_heap()  # before the other imports, so that they share the heap

import contextlib
import errno
import fcntl
import heapq
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import fork_batch
import call_outputs
import output_files
import answer_check
import notebook
import confine
import descriptors
import frames
import function_call
import profiles
import returned_files
import fork_warmup
import runner
import session
import system_calls
from protocol import ANSWER_CHECK_MODULE, CALL_DIR_PREFIX, FUNCTION_CALL_MODULE, MAX_SLOTS_PER_POOL, NOTEBOOK_MODULE

sys.modules[ANSWER_CHECK_MODULE] = answer_check  # a call may bring a file named answer_check.py
sys.modules[FUNCTION_CALL_MODULE] = function_call
sys.modules[NOTEBOOK_MODULE] = notebook
_FIRST_FREE_FD = 10
"""The zygote's own descriptors have this number or a higher one, because a call uses 0 to 4."""
_MAX_STALE_DEADLINES = 64
"""Number of entries of ended calls that the heap of deadlines may have, about (`_set_deadline`)."""
_REPORT_RETRY_S = 0.02
"""Seconds until another try to report a call as still running."""
_CONFINED = 1
"""Value of a slot's byte in `confined_flags` once its call is confined."""


class RunningCall:
    """One call, from its frame to its result. `close` closes its descriptors and removes its temporary directory."""

    def __init__(self, call: dict) -> None:
        self.run_id: int = call["run_id"]
        self.slot: int = call["slot"]
        self.pid = 0
        self.started = 0.0  # time of the fork, by time.monotonic
        self.deadline: float | None = None  # time at which it is reported as still running; None once it is
        self.outputs: call_outputs.CallOutputs | None = None
        self.fds: list[int] = []  # all others
        self.temp_dir: str | None = None
        self.temp_dir_fd = -1  # it is also in `fds`

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        if self.outputs is not None:
            self.outputs.close()
        if self.temp_dir is not None:
            import shutil  # only at level `none`, since it adds mappings, which every fork copies

            shutil.rmtree(self.temp_dir, ignore_errors=True)


class Zygote:
    """The loop that receives frames, forks calls and sends their results."""

    def __init__(self, sock: socket.socket, confinement: confine.Confinement) -> None:
        self.batch = fork_batch.ForkBatch(use_machine_code=confinement.may_have_template)
        self.reader = frames.FrameReader(sock, self.batch.frame_buffer)
        self.confinement = confinement
        self.writer = frames.FrameWriter(sock)
        # Calls that wait for their fork, each with the header of its frame, the result of `_open_files`, and the record
        self.to_fork: list[tuple[RunningCall, dict, list[tuple[int, int]], memoryview]] = []
        self.running: dict[int, RunningCall] = {}  # by process id
        # Calls whose first process has died, with its wait status and usage. Other processes of these calls may run
        self.ending: list[tuple[RunningCall, int, resource.struct_rusage]] = []
        self.report_after_s = 0.0
        self.inherited_kb = 0  # resident memory of a fork that does nothing, in KiB
        self.deadlines: list[tuple[float, int, int]] = []  # a heap of (time, process id, run id)
        # One byte for each slot, in memory that the zygote and its calls share. A call sets its byte once
        self.confined_flags = mmap.mmap(-1, MAX_SLOTS_PER_POOL)
        self.child_signal_fd = system_calls.open_child_signal_fd()
        self.poll = select.poll()
        self.poll.register(self.child_signal_fd, select.POLLIN)
        self.poll.register(sock, select.POLLIN)

    def serve(self) -> None:
        """Serve until the executor closes the socket, which raises EOFError."""
        sock_fd = self.reader.sock.fileno()
        while True:
            readable = [fd for fd, _ in self.poll.poll(self._poll_timeout_ms())]
            if self.child_signal_fd in readable:
                os.read(self.child_signal_fd, 4096)  # empties it
                self._reap()
            if sock_fd in readable:
                for header, body, record in self.reader.receive():
                    if header["op"] != "call":
                        self.fork_pending()
                    HANDLERS[header["op"]](self, header, body, record)
                self.fork_pending()
            if self.deadlines:
                self._report_still_running()
            self.writer.flush()  # one write for all frames of one pass

    def end_calls(self) -> None:
        """Kill the calls that have a temporary directory, and remove their directories. These calls have no namespaces,
        so nothing else would kill them."""
        for running in self.running.values():
            if running.temp_dir is not None:
                os.kill(running.pid, signal.SIGKILL)
                running.close()

    def _on_start(self, header: dict, *_data: memoryview) -> None:
        self.confinement.address_space_bytes = header["address_space_bytes"]
        self.report_after_s = header["report_after_s"]
        self._start_template()  # only now: the executor has moved this process to the cgroup for zygotes
        self.inherited_kb = fork_memory.inherited_kb()
        self.writer.add({"op": "ready"})
        self.writer.flush()

    def _start_template(self) -> None:
        """Fork the template from which all calls will be forked. Each of these calls continues here and does not
        return."""
        if self.batch.has_machine_code:
            self.confinement.fork_from_template()
            if self.batch.start_template():
                self._run_child()

    def _on_cgroup_procs(self, header: dict, *_data: memoryview) -> None:
        self.confinement.cgroup_procs_fds.setdefault(header["slot"], []).append(self.reader.fds.pop(0))

    def _on_cgroup_dir(self, header: dict, *_data: memoryview) -> None:
        self.confinement.cgroup_dir_fds[header["slot"]] = self.reader.fds.pop(0)

    def on_call(self, call: dict, body: memoryview, record: memoryview) -> None:
        """Open a call's files. The next `fork_pending` forks the call."""
        running = RunningCall(call)
        if "session" in call:
            running.fds.append(self.reader.fds.pop(0))
        if len(self.to_fork) == fork_batch.MAX_JOBS:
            self.fork_pending()
        try:
            fds = self._open_files(running, call, body)
            if not self.reader.is_usual(record):
                running.fds.append(output_files.input_file(record))
                fds.append((running.fds[-1], fork_batch.RECORD_FD))
            self.to_fork.append((running, call, fds, record))
        except OSError as error:  # out of descriptors, for example: not caused by the code
            self._send_start_failed(running, str(error))

    def _open_files(self, running: RunningCall, call: dict, body: memoryview) -> list[tuple[int, int]]:
        """Open a call's files. Return pairs: a descriptor in the zygote, and the descriptor that it becomes in the
        call."""
        self.confinement.prepare_slot(running.slot)
        running.outputs = call_outputs.CallOutputs(call)
        fds = running.outputs.in_call()
        if "session" in call:
            fds.append((running.fds[0], session.SOCKET_FD))
        code_size, stdin_size = call["blobs"][:2]
        if stdin_size:
            stdin = output_files.input_file(body[code_size : code_size + stdin_size])
            running.fds.append(stdin)
            fds.append((stdin, 0))
        if self.confinement.landlock is not None:
            self.confinement.landlock.make_dir(running.slot)
        elif self.confinement.scratch_mount is None:
            import tempfile  # only at level `none`, since it adds mappings, which every fork copies

            running.temp_dir = tempfile.mkdtemp(prefix=CALL_DIR_PREFIX, dir="/tmp")
            running.temp_dir_fd = os.open(running.temp_dir, os.O_RDONLY)
            running.fds.append(running.temp_dir_fd)
            fcntl.flock(running.temp_dir_fd, fcntl.LOCK_EX)
        self.confined_flags[running.slot] = 0
        return fds

    def _send_start_failed(self, running: RunningCall, reason: str) -> None:
        running.close()
        self.confinement.release_slot(running.slot)
        self.writer.add({"op": "start_failed", "run_id": running.run_id, "reason": reason})

    def fork_pending(self) -> None:
        """Fork all calls in `to_fork`."""
        if not self.to_fork:
            return
        pending, self.to_fork = self.to_fork, []
        for number, (running, call, fds, record) in enumerate(pending):
            time_address, data_address = self.batch.time_addresses[number], self.batch.data_address
            steps_and_data = self.confinement.syscall_steps(
                running.slot, call, fds, running.temp_dir_fd, time_address, data_address
            )
            header_size = len(record) - sum(call["blobs"])
            inherited = record if self.reader.is_usual(record) else record[:0]  # the call reads others from RECORD_FD
            self.batch.add(number, inherited, header_size, *steps_and_data)
        if self.batch.run(len(pending)):
            self._run_child()
        for number, entry in enumerate(pending):
            running, call = entry[:2]
            running.pid = self.batch.child_pid(number)
            if running.pid >= 0:
                running.started = self.batch.forked_at(number)
                self.running[running.pid] = running
                if "session" not in call:
                    self._set_deadline(running, running.started + min(call["timeout_s"], self.report_after_s))
            elif running.slot in self.confinement.cgroup_dir_fds and -running.pid not in (errno.EAGAIN, errno.ENOMEM):
                self.to_fork.append(entry)  # this machine refuses clone3, so this call is forked again, by clone
            else:
                self._send_start_failed(running, f"fork: {os.strerror(-running.pid)}")
        if self.to_fork:
            self.confinement.cgroup_dir_fds.clear()  # without these descriptors, calls are forked by clone
            self.fork_pending()

    def _run_child(self) -> None:
        """In a call: finish its confinement and run the code. Does not return."""
        try:
            self.batch.raise_if_step_failed()
            call, body = self.batch.own_call()
            slot = call["slot"]
            self.confinement.finish(slot)
            last_fd = returned_files.FILES_FD if call["returns_files"] else runner.REPORT_FD
            descriptors.close_from((session.SOCKET_FD if "session" in call else last_fd) + 1)
        except BaseException as error:
            os.write(runner.REPORT_FD, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        # Set this slot's flag, and unmap the flags before the code runs. Otherwise the code could clear its flag, and
        # the zygote would report that the code of this call has never run.
        self.confined_flags[slot] = _CONFINED
        self.confined_flags.close()
        if "session" in call:
            options_json = bytes(frames.split_blobs(body, call["blobs"])[2])
            session.serve(call, options_json, self.confinement, self.report_after_s)
        runner.run(call, frames.split_blobs(body, call["blobs"]))

    def _reap(self) -> None:
        for pid, status, usage in system_calls.ended_children():
            running = self.running.pop(pid, None)
            if running is not None:  # otherwise it was an orphan, or a child zygote, whose end the socket shows
                self.ending.append((running, status, usage))
        landlock, ending, self.ending = self.confinement.landlock, self.ending, []
        for ended in ending:
            if landlock is None or landlock.clean_up(ended[0].slot):
                self.send_ended(*ended)
            else:
                self.ending.append(ended)

    def send_ended(self, running: RunningCall, status: int, usage: resource.struct_rusage) -> None:
        """Send the result of a call, with its wait status and resource usage, and close its files."""
        wall_ms = (time.monotonic() - running.started) * 1e3
        assert running.outputs is not None
        if self.confined_flags[running.slot] != _CONFINED:
            report, report_size = running.outputs.report()
            reason = os.pread(report, report_size, 0).decode("utf-8", "replace")
            self._send_start_failed(running, reason)
            return
        fields, blobs = running.outputs.contents()
        header = {
            "op": "ended",
            "run_id": running.run_id,
            **call_outputs.exit_fields(status),
            "wall_ms": wall_ms,
            "cpu_ms": (usage.ru_utime + usage.ru_stime) * 1e3,
            "peak_kb": max(0, usage.ru_maxrss - self.inherited_kb),
            **fields,
        }
        self.writer.add(header, blobs)
        running.close()
        self.confinement.release_slot(running.slot)

    def _on_kill(self, header: dict, *_data: memoryview) -> None:
        for running in self.running.values():
            if running.run_id == header["run_id"]:
                os.kill(running.pid, signal.SIGKILL)
                return

    def _poll_timeout_ms(self) -> float | None:
        if not self.deadlines:
            return None
        # 1e9 fits into the C int that poll(2) takes. One more millisecond makes sure that the deadline has passed.
        return min(1e9, max(0.0, (self.deadlines[0][0] - time.monotonic()) * 1e3 + 1))

    def _set_deadline(self, running: RunningCall, deadline: float) -> None:
        """Add a deadline to the heap. Entries of ended calls stay in the heap until there are too many.

        The heap is bounded, because every fork takes longer if the zygote has more memory.
        """
        running.deadline = deadline
        heapq.heappush(self.deadlines, (deadline, running.pid, running.run_id))
        if len(self.deadlines) > _MAX_STALE_DEADLINES + 2 * len(self.running):
            self.deadlines = [(r.deadline, r.pid, r.run_id) for r in self.running.values() if r.deadline is not None]
            heapq.heapify(self.deadlines)

    def _report_still_running(self) -> None:
        """Report calls whose deadline has passed, each with a pidfd. From then on the executor limits their time.

        A call that is not confined yet is reported later. There are two reasons: the time of the set-up is not charged
        to the call; and if the executor demoted the call while it holds or waits for the cgroup lock, every fork on the
        machine would wait.
        """
        now = time.monotonic()
        while self.deadlines and self.deadlines[0][0] <= now:
            _deadline, pid, run_id = heapq.heappop(self.deadlines)
            running = self.running.get(pid)
            if running is None or running.run_id != run_id:
                continue
            running.deadline = None
            if self.confined_flags[running.slot] != _CONFINED:
                running.started = now
                self._set_deadline(running, now + _REPORT_RETRY_S)
                continue
            try:
                fd = os.pidfd_open(pid)
            except OSError:  # out of descriptors, for example
                self._set_deadline(running, now + _REPORT_RETRY_S)
                continue
            wall_ms = (now - running.started) * 1e3
            self.writer.send_with_fd({"op": "still_running", "run_id": run_id, "wall_ms": wall_ms}, fd)
            os.close(fd)

    def _on_spawn(self, header: dict, *_data: memoryview) -> None:
        sock = socket.socket(fileno=self.reader.fds.pop(0))
        try:
            is_parent = os.fork() != 0
        except OSError:  # out of processes or memory: the executor receives the end of the socket and retries
            is_parent = True
        if is_parent:
            sock.close()
            return
        with _exits_process():
            for running in self.running.values():
                running.temp_dir = None
                running.close()
            self.reader.sock.close()
            self.batch.close()
            os.close(self.child_signal_fd)
            confinement = self.confinement
            confinement.close_cgroup_fds()
            confinement.prepare()
            self.__dict__.clear()
            warm_up_and_serve(descriptors.move_up(sock, _FIRST_FREE_FD), confinement, header)


HANDLERS: dict[str, Callable[..., None]] = {
    "start": Zygote._on_start,
    "cgroup_procs": Zygote._on_cgroup_procs,
    "cgroup_dir": Zygote._on_cgroup_dir,
    "call": Zygote.on_call,
    "session": Zygote.on_call,
    "kill": Zygote._on_kill,
    "spawn": Zygote._on_spawn,
}
"""The method that handles a frame, by the frame's `op`."""


def warm_up_and_serve(sock: socket.socket, confinement: confine.Confinement, header: dict) -> None:
    """Load the profile that a frame names, compact the memory, and serve. Calls share the compacted memory, and rarely
    write to it."""
    fork_memory.use_one_heap()
    missing, problems, refused = profiles.load_from(header)
    if refused:
        _send_loaded(frames.FrameWriter(sock), [], [], {"refused": refused})
        raise EOFError
    runner.keep_originals()
    _warm_up(sock, confinement)
    fork_memory.remap_code()
    fork_memory.compact_heap()
    # Without a template, this process forks the calls. The zygote object changes with each call, so it is created after
    # the compaction, outside of the huge pages: a write to a huge page that a child shares splits it.
    zygote = Zygote(sock, confinement)
    fork_warmup.run_scripts(zygote, 2)  # refill the interpreter's caches, which the compaction emptied
    # This process forks nothing before the template. So no huge page of the template is split.
    _send_loaded(zygote.writer, missing, problems, {})
    try:
        zygote.serve()
    except (EOFError, ConnectionError):
        zygote.end_calls()
        raise


def _send_loaded(writer: frames.FrameWriter, missing: list[str], problems: list[str], more: dict) -> None:
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    loaded = {"python": sys.version.split()[0], "modules": modules, "missing": missing, "problems": problems}
    writer.add({"op": "loaded", **loaded, **more})
    writer.flush()


def _warm_up(sock: socket.socket, confinement: confine.Confinement) -> None:
    zygote = Zygote(sock, confinement)
    fork_warmup.run_scripts(zygote, 20)
    os.close(zygote.child_signal_fd)


@contextlib.contextmanager
def _exits_process() -> Iterator[None]:
    """Exit this process after the block: with 0 if the executor has closed the socket, else with 1 and a traceback."""
    try:
        yield
    except (EOFError, ConnectionError):  # ConnectionError: while a frame was being sent
        os._exit(0)
    except BaseException:  # the outermost frame of a process
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    # LD_BIND_NOW made the dynamic linker bind all symbols of this zygote, so that no call has to. Remove it from the
    # environment of calls.
    os.environ.pop("LD_BIND_NOW", None)
    # Interpreters that a call starts import site/sitecustomize.py.
    paths = os.environ.get("PYTHONPATH"), os.path.join(os.path.dirname(__file__), "site")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    fd = int(sys.argv[sys.argv.index("--fd") + 1])
    sock = descriptors.move_up(socket.socket(fileno=fd), _FIRST_FREE_FD)
    while True:  # occupy the descriptors that calls use, so that the zygote opens its own above them
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if fd >= _FIRST_FREE_FD:
            os.close(fd)
            break
    with _exits_process():
        reader = frames.FrameReader(sock)
        received: list = []
        while not received:
            received = reader.receive()
        header = received[0][0]  # configure; the executor sends nothing else before `loaded`
        del reader, received
        confinement = confine.Confinement(header["plan"])
        confine.restrict_zygote(header["plan"])
        runner.prepare(confinement.scratch_mount or "")
        _warm_up(sock, confinement)
        warm_up_and_serve(sock, confinement, header)


if __name__ == "__main__":
    main()
