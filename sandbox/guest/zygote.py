"""A warm interpreter that forks itself for each call. Run by path inside the jail: `zygote.py --fd N`.

Owns its running calls: it forks them, reaps them, and sends each one's outcome exactly once. It has one thread. It
takes orders over one socket from the executor, which alone decides about time:

    configure {plan, profile}   first            ready   {profile, python, missing, problems}
    cgroup_procs {slot} + a descriptor  to enter its cgroup by
    cgroup_dir {slot} + a descriptor    its cgroup, to clone into
    start {address_space_bytes, report_after_s}
    call {run_id, slot, ...} + code, stdin, names, files
                                ended {run_id, exit_code, signal, ...} + stdout, stderr, report, files
                                start_failed {run_id, reason}   the call did not start; nothing ran
    kill {run_id}               still_running {run_id, pid, wall_ms} + a pidfd, once, when report_after_s
                                or timeout_s has passed
    spawn {profile} + a socket                    fork a child zygote that adds a profile and serves the socket

End of file on the socket ends the zygote and with it every call.
"""

from __future__ import annotations

import fork_memory

if __name__ == "__main__":
    fork_memory.gather()  # what is imported from here on lies together
    fork_memory.restart()

import contextlib
import ctypes
import errno
import heapq
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import wiped_memory
import fork_batch
import output_files
import checker
import confine
import descriptors
import frames
import profiles
import fork_warmup
import runner

sys.modules["rstar_checker"] = checker  # under a name that files of calls do not bear
_FIRST_FREE_FD = 10
"""Descriptors below this are spoken for in a call (0 to 4), so what the zygote holds stays above."""
_MAX_SLOTS = 4096
_STALE_DEADLINES = 64
_AGAIN_S = 0.02
_CONFINED = 1
_libc = ctypes.PyDLL(None)
_libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
_sigprocmask = _libc.sigprocmask
_NO_SIGNALS = bytes(128)  # sigset_t
_SIGCHLD_ONLY = (1 << signal.SIGCHLD - 1).to_bytes(128, sys.byteorder)
_SIG_BLOCK, _SIG_SETMASK = 0, 2
_SFD_CLOEXEC = 0o2000000


def _signal_fd() -> int:
    """A descriptor that is readable when a child has died (signalfd(2)): no handler, so none for a call to undo."""
    _sigprocmask(_SIG_BLOCK, _SIGCHLD_ONLY, None)
    fd = _libc.signalfd(-1, _SIGCHLD_ONLY, _SFD_CLOEXEC)
    if fd < 0:
        raise OSError(_libc.__errno_location()[0], "signalfd")
    return int(fd)


class Running:
    """One forked call. Its descriptors are closed when its outcome is sent."""

    __slots__ = ("deadline", "disk_limit", "fds", "files_fd", "folder", "id", "output_limit", "pid", "slot", "started")

    def __init__(self, call: dict) -> None:
        self.id: int = call["run_id"]
        self.slot: int = call["slot"]
        self.output_limit: int = call["output_bytes"]
        self.disk_limit: int = call["return_bytes"]
        self.pid = 0
        self.started = 0.0
        self.deadline: float | None = None  # until it has passed
        self.fds: list[int] = []
        self.files_fd = -1
        self.folder: str | None = None

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        if self.folder is not None:
            _remove(self.folder)


class Zygote:
    """The loop: frames in, forks, outcomes out."""

    def __init__(self, incoming: frames.Frames, layers: confine.Confinement) -> None:
        self.frames = incoming
        self.layers = layers
        self.inbox = wiped_memory.Inbox()
        self.outbox = frames.Outbox(incoming.sock)
        self.burst = fork_batch.Burst() if layers.has_steps else None
        self.ready: list[tuple[Running, dict, list[tuple[int, int]], memoryview]] = []  # to be forked
        self.running: dict[int, Running] = {}  # by process id
        self.ending: list[tuple[Running, int, resource.struct_rusage]] = []  # its first process is dead
        self.lasting_s = 0.0
        self.inherited_kb = 0  # resident memory of a call that does nothing
        self.deadlines: list[tuple[float, int, int]] = []  # (when, process id, call id)
        self.marks = mmap.mmap(-1, _MAX_SLOTS)  # shared: a call says here, once, that it is confined
        self.deaths = _signal_fd()
        self.poll = select.poll()
        self.poll.register(self.deaths, select.POLLIN)
        self.poll.register(incoming.sock, select.POLLIN)

    def serve(self) -> None:
        """Until the executor goes away."""
        sock_fd = self.frames.sock.fileno()
        while True:
            ready = [fd for fd, _ in self.poll.poll(self._patience_ms())]
            if self.deaths in ready:
                os.read(self.deaths, 4096)
                self._reap()
            if sock_fd in ready:
                for header, body in self.frames.receive():
                    if header["op"] != "call":
                        self._launch()
                    getattr(self, "_do_" + header["op"])(header, body)
                self._launch()
            if self.deadlines:
                self._tell_lasting()
            self.outbox.flush()  # all that one turn of the loop has to say, together

    def send(self, header: dict, files: list[tuple[int, int]] | tuple = ()) -> None:
        """Queue a frame, with the first so many bytes of `files`, (descriptor, length) each."""
        self.outbox.add(header, files)

    def _do_start(self, header: dict, _body: memoryview) -> None:
        self.layers.address_space = header["address_space_bytes"]
        self.lasting_s = header["report_after_s"]

    def _do_cgroup_procs(self, header: dict, _body: memoryview) -> None:
        self.layers.doors.setdefault(header["slot"], []).append(self.frames.fds.pop(0))

    def _do_cgroup_dir(self, header: dict, _body: memoryview) -> None:
        self.layers.floors[header["slot"]] = self.frames.fds.pop(0)

    def _do_call(self, call: dict, body: memoryview) -> None:
        running = Running(call)
        is_large = len(body) > wiped_memory.ROOM
        if is_large or len(self.ready) == fork_batch.MOST:
            self._launch()
        try:
            self.ready.append((running, call, self._open(running, call, body), body))
        except OSError as why:  # out of descriptors, say: not the code's doing
            self._fail(running, str(why))
        if is_large:
            self._launch()

    def _open(self, running: Running, call: dict, body: memoryview) -> list[tuple[int, int]]:
        """The files of a call, and the descriptors that it has them by."""
        out = output_files.bounded_file(running.output_limit)
        running.fds.append(out)
        err = output_files.bounded_file(running.output_limit)
        running.fds.append(err)
        report = output_files.bounded_file(runner.report_size(running.output_limit))
        running.fds.append(report)
        fds = [(out, 1), (err, 2), (report, runner.REPORT_FD)]
        code_size, stdin_size = call["blobs"][:2]
        if stdin_size:
            stdin = output_files.readable(body[code_size : code_size + stdin_size])
            running.fds.append(stdin)
            fds.append((stdin, 0))
        if call["return_count"]:
            running.files_fd = output_files.bounded_file(running.disk_limit)
            running.fds.append(running.files_fd)
            fds.append((running.files_fd, runner.FILES_FD))
        if self.layers.ground is not None:
            self.layers.ground.prepare(running.slot)
        elif self.layers.tmpfs is None:
            running.folder = _make_folder()
        self.marks[running.slot] = 0
        return fds

    def _fail(self, running: Running, why: str) -> None:
        running.close()
        self.send({"op": "start_failed", "run_id": running.id, "reason": why})

    def _launch(self) -> None:
        """Fork what is ready."""
        ready, self.ready = self.ready, []
        if self.burst is not None:
            self._fork_all(ready, self.burst)
            return
        for running, call, fds, body in ready:
            self.inbox.put(body)
            running.started = time.monotonic()
            try:
                running.pid = self.layers.fork(running.slot)
            except OSError as why:  # out of processes or memory
                self._fail(running, str(why))
                continue
            if running.pid == 0:
                self._child(running, call, fds)
            self._note(running, call)
        self.inbox.shrink()

    def _fork_all(self, ready: list, jobs: fork_batch.Burst) -> None:
        for number, (running, call, fds, body) in enumerate(ready):
            steps, room = self.layers.steps(running.slot, call, fds, jobs.rooms[number])
            jobs.put(number, self.inbox.order(body), steps, room)
        own = jobs.run(len(ready))
        if own is not None:
            running, call, _fds, body = ready[own]
            self.inbox.take(len(body))
            self._child(running, call, None)
        again = []
        for number, one in enumerate(ready):
            running, call = one[:2]
            running.pid = jobs.result(number)
            if running.pid >= 0:
                running.started = jobs.time(number)
                self._note(running, call)
            elif running.slot in self.layers.floors and -running.pid not in (errno.EAGAIN, errno.ENOMEM):
                again.append(one)  # clone3 is refused here
            else:
                self._fail(running, f"fork: {os.strerror(-running.pid)}")
        self.inbox.shrink()
        if again:
            self.layers.floors.clear()
            self._fork_all(again, jobs)

    def _note(self, running: Running, call: dict) -> None:
        self.running[running.pid] = running
        self._await_deadline(running, running.started + min(call["timeout_s"], self.lasting_s))

    def _child(self, running: Running, call: dict, fds: list | None) -> None:
        """In the fork: nothing of the zygote's but its memory is left when this ends, and it does not return. Without
        `fds`, all but the end of that is done."""
        try:
            if fds is None:
                assert self.burst is not None
                self.burst.check()
            else:
                self._make_ready(running, call, fds)
            descriptors.close_from(5 if call["return_count"] else 4)
        except BaseException as why:
            os.write(runner.REPORT_FD, f"{type(why).__name__}: {why}".encode())
            os._exit(1)
        # The page goes once it is marked: from here on nothing can pretend that confinement failed.
        self.marks[running.slot] = _CONFINED
        self.marks.close()
        runner.run(call, frames.cut(self.inbox.body, call["blobs"]))

    def _make_ready(self, running: Running, call: dict, fds: list) -> None:
        for fd, name in fds:  # what it says of the rest goes there
            os.dup2(fd, name)
        self.layers.join(running.slot)  # now, so that the pages that the call copies count as its own
        _sigprocmask(_SIG_SETMASK, _NO_SIGNALS, None)
        if self.layers.ground is not None:
            self.layers.ground.restrict(running.slot)  # while its ruleset is open
        if not call["blobs"][1]:  # its own: flags of an open file are shared by all who hold it
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
        if self.layers.ground is None:  # which has its own time for it
            os.setpgid(0, 0)  # else it could signal the zygote's group
        if running.folder is not None:
            os.chdir(running.folder)
        self.layers.enter(running.slot, call)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                running = self.running.pop(pid, None)
                if running is not None:  # else a child zygote, whose socket says it, or an orphan
                    self.ending.append((running, status, usage))
        ground, ending, self.ending = self.layers.ground, self.ending, []
        for outcome in ending:
            if ground is None or ground.end(outcome[0].slot):
                self._answer(*outcome)
            else:
                self.ending.append(outcome)

    def _answer(self, running: Running, status: int, usage: resource.struct_rusage) -> None:
        wall_ms = (time.monotonic() - running.started) * 1e3
        limit = running.output_limit
        out, err, report = running.fds[:3]
        out_size, out_cut = output_files.written(out, limit)
        err_size, err_cut = output_files.written(err, limit)
        report_size, _ = output_files.written(report, runner.report_size(limit))
        if self.marks[running.slot] != _CONFINED:
            why = os.pread(report, report_size, 0).decode("utf-8", "replace")
            self.send({"op": "start_failed", "run_id": running.id, "reason": why})
        else:
            done = {
                "op": "ended",
                "run_id": running.id,
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "wall_ms": wall_ms,
                "cpu_ms": (usage.ru_utime + usage.ru_stime) * 1e3,
                "peak_kb": max(0, usage.ru_maxrss - self.inherited_kb),
                "stdout_truncated": out_cut,
                "stderr_truncated": err_cut,
            }
            blobs = [(out, out_size), (err, err_size), (report, report_size)]
            if running.files_fd >= 0:
                blobs.append((running.files_fd, output_files.written(running.files_fd, running.disk_limit)[0]))
            self.send(done, blobs)
        running.close()

    def _do_kill(self, header: dict, _body: memoryview) -> None:
        for running in self.running.values():
            if running.id == header["run_id"]:
                os.kill(running.pid, signal.SIGKILL)
                return

    def _patience_ms(self) -> float | None:
        if not self.deadlines:
            return None
        return min(1e9, max(0.0, (self.deadlines[0][0] - time.monotonic()) * 1e3 + 1))

    def _await_deadline(self, running: Running, deadline: float) -> None:
        """Ended calls leave theirs in the heap; it is made anew before they outnumber the living, since memory of a
        zygote is what every fork pays for."""
        running.deadline = deadline
        heapq.heappush(self.deadlines, (deadline, running.pid, running.id))
        if len(self.deadlines) > _STALE_DEADLINES + 2 * len(self.running):
            self.deadlines = [(r.deadline, r.pid, r.id) for r in self.running.values() if r.deadline is not None]
            heapq.heapify(self.deadlines)

    def _tell_lasting(self) -> None:
        """The executor takes over: what the call's own time is, and when it ends. It gets the process by pidfd.

        Not before the call is confined. Until then its time is ours; and whoever has it give way while it waits for, or
        holds, the lock of all control groups has everybody wait for a core that it is not to have.
        """
        now = time.monotonic()
        while self.deadlines and self.deadlines[0][0] <= now:
            _when, pid, call_id = heapq.heappop(self.deadlines)
            running = self.running.get(pid)
            if running is None or running.id != call_id:
                continue
            running.deadline = None
            if self.marks[running.slot] != _CONFINED:
                running.started = now
                self._await_deadline(running, now + _AGAIN_S)
                continue
            try:
                fd = os.pidfd_open(pid)
            except OSError:  # out of descriptors, say
                self._await_deadline(running, now + _AGAIN_S)
                continue
            late = {"op": "still_running", "run_id": call_id, "pid": pid, "wall_ms": (now - running.started) * 1e3}
            self.outbox.add_with(late, fd)
            os.close(fd)

    def _do_spawn(self, header: dict, _body: memoryview) -> None:
        sock = socket.socket(fileno=self.frames.fds.pop(0))
        try:
            is_here = os.fork() != 0
        except OSError:  # out of processes or memory; whoever waits for it sees the end of its socket, and asks again
            is_here = True
        if is_here:
            sock.close()
            return
        with _to_the_end():
            for running in self.running.values():
                running.folder = None
                running.close()
            self.frames.sock.close()
            os.close(self.deaths)
            layers = self.layers
            layers.leave_groups()
            layers.settle()
            self.__dict__.clear()
            live(_settle(sock), layers, header["profile"])


def live(sock: socket.socket, layers: confine.Confinement, profile: str) -> None:
    """Import, work, settle, and serve: what is in memory by then is shared by every call and touched by none."""
    fork_memory.gather()
    missing, problems = profiles.load(profile)
    runner.settle()
    warming = Zygote(frames.Frames(sock), layers)
    fork_warmup.play(warming, 20)
    if threading.active_count() != 1:
        raise RuntimeError(f"{profile} started threads; a zygote forks, so it has one")
    os.close(warming.deaths)
    del warming
    fork_memory.settle_code()
    fork_memory.settle()
    # Made now, what changes with each call lies apart from what never does. A write into a huge page splits it, and
    # then each fork copies 512 entries instead of one.
    zygote = Zygote(frames.Frames(sock), layers)
    fork_warmup.play(zygote, 2)  # what settling has put out of the interpreter's caches comes back
    fork_memory.trim()
    zygote.inherited_kb = _inherited_kb()
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    about = {"python": sys.version.split()[0], "modules": modules, "missing": missing, "problems": problems}
    zygote.send({"op": "ready", **about})
    zygote.outbox.flush()
    zygote.serve()


def _inherited_kb() -> int:
    """The largest resident set of a fork that ends at once: the pages of this process that it has without any copy."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return int(os.wait4(pid, 0)[2].ru_maxrss)


@contextlib.contextmanager
def _to_the_end() -> Iterator[None]:
    """What runs in here ends this process: with 0 when the executor has gone, else with 1 and a traceback."""
    try:
        yield
    except (EOFError, ConnectionError):  # the second if this process was writing to the executor when that ended
        os._exit(0)
    except BaseException:  # the last frame of a process: whatever it is, it is told and nothing runs after it
        traceback.print_exc()
    os._exit(1)


# At level `none` a call has a plain folder. What that takes is imported only there: it brings 30 mappings along, and
# every fork pays for each.


def _make_folder() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="rstar-call-")


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _settle(sock: socket.socket) -> socket.socket:
    """The same socket on a descriptor that no call's own will land on."""
    import fcntl

    fd = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
    sock.close()
    settled = socket.socket(fileno=fd)
    settled.setblocking(True)
    return settled


def main() -> None:
    os.environ.pop("LD_BIND_NOW", None)  # it was for this process: symbols bound late are bound in each call anew
    sock = _settle(socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1])))
    while True:  # occupy what is below, so that nothing the zygote opens later is there
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if fd >= _FIRST_FREE_FD:
            os.close(fd)
            break
    with _to_the_end():
        incoming = frames.Frames(sock)
        first: list = []
        while not first:
            first = incoming.receive()
        header = first[0][0]  # configure; nothing else comes before we answer
        del incoming, first
        layers = confine.Confinement(header["plan"])
        confine.lower_for_good(header["plan"])
        runner.prepare(layers.tmpfs or "")
        first_steps = Zygote(frames.Frames(sock), layers)
        fork_warmup.play(first_steps, 20)
        fork_memory.gather_code(os.path.dirname(__file__))
        os.close(first_steps.deaths)
        del first_steps
        live(sock, layers, header["profile"])


if __name__ == "__main__":
    main()
