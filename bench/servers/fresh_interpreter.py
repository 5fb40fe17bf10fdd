"""The baseline: a fresh interpreter for every call, `python3 file`, as many at once as there are cores, no isolation.

It is as generous as it can be made: the guest's own Python and environment (but symbols bound late, as is usual), no
shell, no polling, output into a file, and a thread per core that does nothing but wait.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.executor.executor import GUEST_ENV
from sandbox.types import DEFAULT_LIMITS

WRAPPER = Path(__file__).with_name("fresh_script.py")
READ_BYTES = 16 << 20
ENVIRON = {name: value for name, value in GUEST_ENV.items() if name != "LD_BIND_NOW"}


@dataclass(frozen=True, slots=True)
class FreshRun:
    """How one call went. `report` is what `fresh_script` says of it, empty without."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    wall_s: float
    cpu_s: float
    report: Mapping[str, Any]


class Fresh:
    """Fresh interpreters of `python`, at most `at_once` running. With `wrapped`, the last expression and the error are
    reported as the service would; without, the code is the script itself and nothing comes on top."""

    def __init__(self, python: str, folder: Path, *, wrapped: bool = False, at_once: int = 0) -> None:
        self._python = python
        self._folder = folder
        self._wrapped = wrapped
        self._at_once = at_once or len(os.sched_getaffinity(0))
        self._stopped = False
        self._running: set[int] = set()

    def run_all(
        self, calls: Sequence[Mapping[str, Any]], done: Callable[[int, FreshRun], None] | None = None
    ) -> list[FreshRun]:
        """Run all calls; `done(index, run)` as each ends, from several threads. Ctrl-C ends those that run."""
        runs: dict[int, FreshRun] = {}
        left = iter(range(len(calls)))
        lock = threading.Lock()

        def work() -> None:
            while not self._stopped:
                with lock:
                    index = next(left, None)
                if index is None:
                    return
                runs[index] = self.run(calls[index])
                if done is not None:
                    done(index, runs[index])

        threads = [threading.Thread(target=work) for _ in range(min(self._at_once, len(calls)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop(threads)
            raise
        return [runs[index] for index in range(len(calls))]

    def run(self, call: Mapping[str, Any]) -> FreshRun:
        """Run one call and wait for it."""
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            place = Path(made)
            work = place / "work"
            work.mkdir()
            (work / "main.py").write_bytes(call["code"].encode("utf-8", "surrogatepass"))
            (place / "stdin").write_bytes(call.get("stdin", "").encode("utf-8", "surrogatepass"))
            return self._run_in(place, call.get("limits", {}).get("timeout_s", DEFAULT_LIMITS.timeout_s))

    def _run_in(self, place: Path, timeout_s: float) -> FreshRun:
        main = str(place / "work" / "main.py")
        words = (str(WRAPPER), str(place / "report")) if self._wrapped else (main,)
        start = time.perf_counter()
        process = _spawn([self._python, "-s", *words], place)
        self._running.add(process.pid)
        code, timed_out, cpu_s = _wait(process, timeout_s)
        self._running.discard(process.pid)
        wall_s = time.perf_counter() - start
        return FreshRun(
            _text(place / "stdout"), _text(place / "stderr"), code, timed_out, wall_s, cpu_s, _report(place / "report")
        )

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        self._stopped = True
        for pid in list(self._running):
            _kill(pid)
        for thread in threads:
            thread.join()


@contextmanager
def interpreters(python: str, *, wrapped: bool = False) -> Iterator[Fresh]:
    """A `Fresh` with a folder of its own, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-fresh-") as folder:
        yield Fresh(python, Path(folder), wrapped=wrapped)


def _spawn(argv: Sequence[str], place: Path) -> subprocess.Popen[bytes]:
    """Start a process in `place/work`, in a session of its own; its streams are files in `place`."""
    environ = {**ENVIRON, "PATH": os.environ.get("PATH", os.defpath), "HOME": str(place)}
    with (
        (place / "stdin").open("rb") as stdin,
        (place / "stdout").open("wb") as stdout,
        (place / "stderr").open("wb") as stderr,
    ):
        return subprocess.Popen(
            argv, cwd=place / "work", env=environ, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, bool, float]:
    """(exit code, or minus the signal; whether we ended it; seconds of CPU)."""
    pidfd = os.pidfd_open(process.pid)
    try:
        timed_out = not select.select([pidfd], [], [], timeout_s)[0]
    finally:
        os.close(pidfd)
    if timed_out:
        _kill(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, timed_out, usage.ru_utime + usage.ru_stime


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(READ_BYTES).decode("utf-8", "replace")


def _report(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
