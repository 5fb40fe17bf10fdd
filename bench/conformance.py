"""Which tests of CPython's own suite have another outcome in a call than in a fresh interpreter?

    python -m bench.conformance [--modules test_os,test_fcntl] [--limit-s 60] [--json]

Each module of the package `test` of the guest's Python runs twice at the same time, by `unittest`: in one call, and in
a fresh interpreter of the same runtime. A test counts as a difference if it does not fail in the fresh interpreter, and
in the call it fails or is not reached. `bench/workloads/known_differences.py` has the reasons of differences. A test
that passes in the fresh interpreter and is skipped in the call is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result, Table
from bench.servers import service
from bench.workloads.known_differences import EXCLUDED_MODULES, excluded_modules, reason_for
from sandbox.client import AsyncClient
from sandbox.jail import kernel
from sandbox.types import Call, Limits, Network, Status

MAX_DIFFERENCES = 100
LIMITS = Limits(memory_mb=2048, output_kb=16384, processes=256, disk_mb=4096)
"""Limits of a call, except its time limit. The limits of an ordinary call are too low for some of the tests."""
CALL_TIME_FACTOR = 2
"""The time limit of a call is this multiple of the fresh interpreter's limit. A call shares its cores with the server,
so a module that barely meets its limit in a fresh interpreter may be slower in a call."""
PASSED, SKIPPED, NOT_REACHED = "passed", "skipped", "not reached"
FAILURES = ("failed", "error", NOT_REACHED)
MARK = "\x1e"
"""The character with which `PROGRAM` begins each line of its own. The tests print no line that begins with it."""

TEST_LIMIT_S = 30
"""A test fails after this number of seconds. Without this limit, a test that waits for ever would prevent all later
tests of its module."""
PROGRAM = """
import contextlib, fcntl, json, os, signal, sys, traceback, unittest
from test import support

# What the suite runs without `-u`: no tests that take minutes, fill the disk, or need the internet or a display.
support.use_resources = []
fd = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 100)  # tests replace and close descriptor 1

def write(**line):
    os.write(fd, f"\\n{MARK}{json.dumps(line)}\\n".encode())

class TestTimeout(BaseException):
    pass

def stop_test(*_):
    raise TestTimeout("not at its end after {TEST_LIMIT_S} s")

class Outcomes(unittest.TestResult):
    def startTest(self, test):
        super().startTest(test)
        self.outcome, self.detail = "passed", ""
        signal.signal(signal.SIGALRM, stop_test)
        signal.alarm({TEST_LIMIT_S})

    def stopTest(self, test):
        signal.alarm(0)
        super().stopTest(test)
        if "TestTimeout" in self.detail:  # its children that have ended must not count as children of later tests
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0] > 0:
                    pass
        write(test=test.id(), outcome=self.outcome, detail=self.detail)

    def note(self, test, outcome, detail):
        self.outcome, self.detail = outcome, str(detail)[-800:]
        if not isinstance(test, unittest.TestCase) and not hasattr(test, "test_case"):  # setUpClass or setUpModule
            write(test=test.id(), outcome=outcome, detail=self.detail)

    def describe(self, error):
        frames = traceback.extract_tb(error[2])
        lines = [f"{os.path.basename(frame.filename)}:{frame.name}" for frame in frames[-6:]]
        return " ".join(lines) + " " + "".join(traceback.format_exception_only(*error[:2])).strip()

    def addError(self, test, error):
        self.note(test, "error", self.describe(error))

    def addFailure(self, test, error):
        self.note(test, "failed", self.describe(error))

    def addSkip(self, test, reason):
        self.note(test, "skipped", reason)

    def addSubTest(self, test, subtest, error):
        if error is not None:
            outcome = "failed" if issubclass(error[0], test.failureException) else "error"
            self.note(test, outcome, self.describe(error))

    def addUnexpectedSuccess(self, test):
        self.note(test, "failed", "unexpected success")

unittest.defaultTestLoader.loadTestsFromName("test.{module}").run(Outcomes())
write(end=True)
sys.stdout.flush()
os._exit(0)  # threads of a test that failed may still run
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test."""

    outcome: str
    detail: str = ""
    """The end of the traceback, or the reason of a skip."""


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """The outcomes of a module on one side."""

    tests: Mapping[str, Outcome]
    ended: bool
    """Whether all tests were reached."""
    how: str = ""
    """How the run ended, if it did not reach all tests."""


@dataclass(slots=True)
class Comparison:
    """Sums over all modules."""

    tests: int = 0
    differences: list[dict[str, str]] = field(default_factory=list)
    skipped_inside: list[dict[str, str]] = field(default_factory=list)
    ended_early_outside: list[str] = field(default_factory=list)

    def add(self, module: str, inside: ModuleRun, outside: ModuleRun) -> None:
        """Compare the two runs of a module."""
        self.tests += len(outside.tests)
        if not outside.ended:
            self.ended_early_outside.append(f"{module}: {outside.how}")
        groups = [(name, outcome) for name, outcome in inside.tests.items() if name not in outside.tests]
        cause = next((outcome.detail for _, outcome in groups if outcome.outcome in FAILURES), inside.how)
        skip = next((outcome.detail for _, outcome in groups if outcome.outcome == SKIPPED), None)
        for name, before in outside.tests.items():
            if before.outcome in FAILURES:
                continue
            now = inside.tests.get(name) or Outcome(NOT_REACHED if skip is None else SKIPPED, skip or cause)
            row = {"test": name, "outcome": now.outcome, "detail": now.detail}
            if now.outcome in FAILURES:
                self.differences.append(row)
            elif now.outcome == SKIPPED and before.outcome == PASSED:
                self.skipped_inside.append(row)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement. Return exit code 1 if there are too many differences, or one without a reason."""
    return command.run_benchmark(_parser(), argv, lambda args: asyncio.run(_measure(args)), tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("conformance", __doc__, "python", "isolation")
    parser.add_argument("--modules", type=lambda text: tuple(text.split(",")), help="some modules (default: all)")
    parser.add_argument(
        "--limit-s",
        type=arguments.seconds,
        default=60.0,
        help="seconds for a module in a fresh interpreter (default: 60)",
    )
    return parser


def test_modules(python: str) -> list[str]:
    """The modules and packages of `test` of a Python, by name. Raises `BenchFailed` if it has no such package."""
    query = "import os, test; print(os.path.dirname(test.__file__))"
    run = subprocess.run([python, "-I", "-c", query], capture_output=True, text=True, check=False)
    directory = Path(run.stdout.strip() or os.devnull)
    names = {path.stem for path in directory.glob("test_*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    if not names:
        raise command.BenchFailed(f"{python} has no package `test` with CPython's own tests; name a Python that has it")
    return sorted(names)


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    python = service.guest_python(args.python)
    known = test_modules(python)
    if unknown := [name for name in args.modules or () if name not in known]:
        raise command.Misuse(f"--modules: {python} has no module test.{unknown[0]}")
    modules = args.modules or [name for name in known if name not in excluded_modules()]
    comparison = Comparison()
    flags = ["--isolation", args.isolation, "--profiles", "bare"]
    with service.running(python, flags) as server, command.counted_progress("modules", len(modules)) as advance:
        async with AsyncClient(server.url) as client:
            for module in modules:
                inside, outside = await asyncio.gather(
                    run_inside(client, module, args.limit_s * CALL_TIME_FACTOR),
                    asyncio.to_thread(run_outside, python, module, args.limit_s),
                )
                comparison.add(module, inside, outside)
                advance()
    return summarize(comparison, len(modules))


async def run_inside(client: AsyncClient, module: str, limit_s: float) -> ModuleRun:
    """Run a module in a call."""
    limits = {"timeout_s": limit_s, "memory_mb": LIMITS.memory_mb, "output_kb": LIMITS.output_kb}
    limits |= {"processes": LIMITS.processes, "disk_mb": LIMITS.disk_mb}
    options = {"profile": "bare", "echo": False, "network": Network.LOOPBACK}
    call = Call.decode({"code": program(module), "limits": limits, **options})
    result = await client.execute(call)
    if result.status is Status.UNAVAILABLE:
        raise command.BenchFailed(f"{module}: {result.error}")
    error = f" {result.error.message}" if result.error else ""
    return parse(result.stdout, f"the call ended as {result.status}{error} {result.stderr[-500:]}")


def run_outside(python: str, module: str, limit_s: float) -> ModuleRun:
    """Run a module in a fresh interpreter, in a directory of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, tempfile.TemporaryFile() as output:
        script = Path(directory, "main.py")
        script.write_text(program(module))
        environ = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory}
        process = subprocess.Popen(
            [python, script.name],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=drop_privileges,
        )
        try:
            how = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            how = f"not at its end after {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # processes that a test has left
            process.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    return parse(text, how)


def drop_privileges() -> None:
    """Give up root's privileges. A call does not have them, and some tests would use them on this machine."""
    if os.geteuid() == 0:
        kernel.limit_bounding_set(frozenset())


def program(module: str) -> str:
    """The script that runs a module on both sides."""
    return PROGRAM.replace("{module}", module).replace("{MARK}", MARK).replace("{TEST_LIMIT_S}", str(TEST_LIMIT_S))


def parse(text: str, how: str) -> ModuleRun:
    """The outcomes in the output of `PROGRAM`."""
    lines = [json.loads(line[1:]) for line in text.split("\n") if line.startswith(MARK) and line.endswith("}")]
    tests = {line["test"]: Outcome(line["outcome"], line["detail"]) for line in lines if "test" in line}
    ended = any("end" in line for line in lines)
    return ModuleRun(tests, ended, "" if ended else how)


def summarize(comparison: Comparison, num_modules: int) -> dict[str, Any]:
    """The result."""
    unexplained = [row["test"] for row in comparison.differences if not reason_of(row)]
    num_differences = len(comparison.differences)
    return {
        "modules": num_modules,
        "tests": comparison.tests,
        "differences": comparison.differences,
        "skipped_inside": comparison.skipped_inside,
        "ended_early_outside": comparison.ended_early_outside,
        "requirements": [
            requirements.at_most("tests that fail only in a call", MAX_DIFFERENCES, num_differences),
            requirements.at_most("of them without a reason", 0, len(unexplained)),
        ],
    }


def reason_of(difference: Mapping[str, str]) -> str:
    """Why a test fails only in a call, or an empty text if no reason is known."""
    reason = reason_for(difference["test"], difference["detail"])
    return reason.text if reason else ""


def tables(result: Result) -> list[Block]:
    """A row for each reason, and a row for each group of modules that are left out."""
    examples = {reason_of(row): row["test"].removeprefix("test.") for row in reversed(result["differences"])}
    counts = Counter(map(reason_of, result["differences"]))
    rows = [
        (reason or "no reason is known", f"`{examples[reason]}`", f"{number}")
        for reason, number in counts.most_common()
    ]
    left_out = [(needs, f"{len(names.split())}") for needs, names in EXCLUDED_MODULES.items()]
    differences, skipped = len(result["differences"]), len(result["skipped_inside"])
    text = (
        f"{result['modules']} modules with {result['tests']:,} tests: {differences} fail in a call and not in a fresh "
        f"interpreter; {skipped} pass there and skip themselves in a call."
    )
    return [
        text,
        *([Table(("why the test fails in a call", "for example", "tests"), rows)] if rows else []),
        Table(("modules that are left out, by what they need", "modules"), left_out),
        *requirements.unmet(result),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
