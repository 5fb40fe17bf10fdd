"""The baseline: a fresh interpreter for every call, `python3 file`, as many at once as there are cores, no isolation.

The baseline is as fast as possible. It uses the Python and the environment of the guest, but with lazy symbol binding,
as is usual. It has no shell and no polling, output goes into a file, and a thread per core only waits.
"""

from __future__ import annotations

import json
import math
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

from sandbox.executor.pool_plan import GUEST_ENV
from sandbox.types import DEFAULT_LIMITS

WRAPPER = Path(__file__).with_name("fresh_script.py")
READ_BYTES = 16 << 20
"""Maximum number of bytes that are read of a call's output."""
ENVIRON = {name: value for name, value in GUEST_ENV.items() if name != "LD_BIND_NOW"}


@dataclass(frozen=True, slots=True)
class FreshRun:
    """One call. `report` is the JSON that `fresh_script` has written (see `FreshInterpreters`). It is empty if
    `wrapped` was false."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    wall_s: float
    cpu_s: float
    report: Mapping[str, Any]

    @property
    def status(self) -> str:
        """`ok`, `error` or `timeout`."""
        return "timeout" if self.timed_out else "error" if self.exit_code else "ok"


class FreshInterpreters:
    """Fresh interpreters of `python`, one per core at a time.

    With `wrapped`, the interpreter runs `fresh_script.py`, which executes the code and reports the value of its last
    expression and its error, as the service does. Without, the interpreter runs the code itself and reports nothing.
    """

    def __init__(self, python: str, directory: Path, *, wrapped: bool = False) -> None:
        self._python = python
        self._directory = directory
        self._wrapped = wrapped
        self._stopped = False
        self._running: set[int] = set()

    def run_all(
        self,
        calls: Sequence[Mapping[str, Any]],
        on_run: Callable[[], object] = lambda: None,
        *,
        seconds: float = math.inf,
    ) -> list[FreshRun]:
        """Run all calls, or the calls that can be started within `seconds`. `on_run()` is called after each call, from
        several threads. Ctrl-C kills the running calls."""
        runs: dict[int, FreshRun] = {}
        pending = iter(range(len(calls)))
        lock = threading.Lock()
        stop_at = time.monotonic() + seconds

        def work() -> None:
            while not self._stopped and time.monotonic() < stop_at:
                with lock:
                    index = next(pending, None)
                if index is None:
                    return
                runs[index] = self.run(calls[index])
                on_run()

        threads = [threading.Thread(target=work) for _ in range(min(len(os.sched_getaffinity(0)), len(calls)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop(threads)
            raise
        return [runs[index] for index in sorted(runs)]

    def run(self, call: Mapping[str, Any]) -> FreshRun:
        """Run one call and wait for it."""
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            call_dir = Path(name)
            (call_dir / "work").mkdir()
            (call_dir / "work" / "main.py").write_bytes(call["code"].encode("utf-8", "surrogatepass"))
            (call_dir / "stdin").write_bytes(call.get("stdin", "").encode("utf-8", "surrogatepass"))
            return self._run_in(call_dir, call.get("limits", {}).get("timeout_s", DEFAULT_LIMITS.timeout_s))

    def _run_in(self, call_dir: Path, timeout_s: float) -> FreshRun:
        main = str(call_dir / "work" / "main.py")
        arguments = (str(WRAPPER), str(call_dir / "report")) if self._wrapped else (main,)
        start = time.perf_counter()
        process = _spawn([self._python, "-s", *arguments], call_dir)
        self._running.add(process.pid)
        exit_code, timed_out, cpu_s = _wait(process, timeout_s)
        self._running.discard(process.pid)
        wall_s = time.perf_counter() - start
        return FreshRun(
            _text(call_dir / "stdout"),
            _text(call_dir / "stderr"),
            exit_code,
            timed_out,
            wall_s,
            cpu_s,
            _report(call_dir / "report"),
        )

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        self._stopped = True
        for pid in list(self._running):
            _kill(pid)
        for thread in threads:
            thread.join()


@contextmanager
def interpreters(python: str, *, wrapped: bool = False) -> Iterator[FreshInterpreters]:
    """Fresh interpreters with a directory of their own, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-fresh-") as directory:
        yield FreshInterpreters(python, Path(directory), wrapped=wrapped)


def _spawn(argv: Sequence[str], call_dir: Path) -> subprocess.Popen[bytes]:
    """Start a process in `call_dir/work` in a new session; its streams are files in `call_dir`."""
    environ = {**ENVIRON, "PATH": os.environ.get("PATH", os.defpath), "HOME": str(call_dir)}
    with (
        (call_dir / "stdin").open("rb") as stdin,
        (call_dir / "stdout").open("wb") as stdout,
        (call_dir / "stderr").open("wb") as stderr,
    ):
        return subprocess.Popen(
            argv, cwd=call_dir / "work", env=environ, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, bool, float]:
    """Wait for the process, and kill it after `timeout_s`.

    Return three values: its exit code (if a signal ended it, minus the number of the signal), whether it timed out, and
    its CPU seconds.
    """
    pidfd = os.pidfd_open(process.pid)
    try:
        timed_out = not select.select([pidfd], [], [], timeout_s)[0]
    finally:
        os.close(pidfd)
    if timed_out:
        _kill(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # so that `Popen` does not wait for the reaped process
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
