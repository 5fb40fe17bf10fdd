"""Runs phases as forks of one process, the server, which has imported the libraries. The import takes most of a smoke
run's time.

A phase is still a process of its own. The server is single-threaded and computes nothing, so its forks are as good as
new processes. The server ends when its parent ends. It then stops its running phase first. If the server is killed, its
phase ends too.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from trainer.recipe.phases import Phase
from trainer.recipe.runner import PR_SET_PDEATHSIG, RunPhase, child_process, run_child


@contextmanager
def phase_server() -> Iterator[RunPhase]:
    """Start the server, and yield a function that runs a phase in it. The preflight runs as an ordinary child process.
    So does any command that does not begin with `python -m trainer`, such as that of a launcher."""
    (jobs_read, jobs_write), (codes_read, codes_write) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", __name__, str(jobs_read), str(codes_write)]
    with (
        os.fdopen(jobs_write, "w") as jobs,
        os.fdopen(codes_read) as codes,
        child_process(command, [jobs_read, codes_write]),
    ):
        os.close(jobs_read)
        os.close(codes_write)

        def run_phase(phase: Phase, command: Sequence[str], lock_fd: int) -> int:
            if phase.command == "preflight" or command[:3] != [sys.executable, "-m", "trainer"]:
                return run_child(phase, command, lock_fd)
            print(json.dumps(command[3:]), file=jobs, flush=True)
            return int(codes.readline() or 1)

        yield run_phase


def main(jobs_fd: int, codes_fd: int) -> None:
    """Read command lines, run one after the other, and write the exit code of each."""
    phase_pid = 0

    def stop(*_: object) -> None:
        if phase_pid:
            with suppress(ProcessLookupError, ChildProcessError):  # it has just ended
                os.kill(phase_pid, signal.SIGTERM)
                os.waitpid(phase_pid, 0)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the phase and the parent, which then ends the server
    signal.signal(signal.SIGTERM, stop)
    import trainer.recipe.phase_work  # noqa: F401

    with os.fdopen(jobs_fd) as jobs, os.fdopen(codes_fd, "w") as codes:
        while job := jobs.readline():
            # SIGTERM is blocked: between the fork and the assignment of `phase_pid`, `stop` would not find the phase.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            if not (phase_pid := os.fork()):
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                sys.argv = ["rstar-train", *json.loads(job)]
                runpy.run_module("trainer", run_name="__main__")  # exits
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            _, status = os.waitpid(phase_pid, 0)
            phase_pid = 0
            print(os.waitstatus_to_exitcode(status), file=codes, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
