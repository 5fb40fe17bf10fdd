"""A benchmark as a command: exit codes, progress, tables, and the JSON object on the last line.

An entry point `bench/NAME.py` exports:

- `tables(result) -> list[Block]`: its tables, for the terminal and for the documents;
- `draw(axes, result)`, if `bench.report` draws it;
- `main(argv)`, which calls `run_benchmark` with a function that measures and returns the result.

Tables go to stdout, progress and errors to stderr. With `--json` the last line of stdout is the JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.harness import requirements
from bench.harness.arguments import command_line
from bench.harness.tables import STDERR, Block, Result, show
from sandbox.errors import SandboxError

MAX_EXAMPLES = 5
"""Maximum number of wrong results that are printed."""


class BenchFailed(Exception):
    """The measurement could not be made. The message is the reason."""


class Misuse(Exception):
    """The arguments contradict each other. The message says what was expected."""


def run_benchmark(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    tables: Callable[[Result], list[Block]],
) -> int:
    """Parse the arguments, measure, then print the tables and the result.

    Returns the exit code: 0 if all of `result["requirements"]` hold, 1 if one does not or if the measurement failed.
    Exits with 2 for wrong arguments.
    """
    name = parser.prog.rpartition(".")[2]
    args = parser.parse_args(argv)
    with _interruptible():
        try:
            result = {"bench": name, **measure(args)}
        except KeyboardInterrupt:
            return 130
        except Misuse as error:
            parser.error(str(error))
        except (BenchFailed, SandboxError, OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    result["holds"] = requirements.hold(result.get("requirements", ()))
    show(tables(result))
    for line in requirements.unmet(result):
        print(f"{name}: {line}", file=sys.stderr)
    print_result(result, parser, args)
    return 0 if result["holds"] else 1


def print_result(result: Result, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Print the result with its command line and the machine, if `--json` is given."""
    if args.json:
        print(json.dumps({"command": command_line(parser, args), **result, "machine": machine()}), flush=True)


def print_examples(name: str, examples: Sequence[str]) -> None:
    """Print the first few wrong results on stderr."""
    for line in examples[:MAX_EXAMPLES]:
        print(f"{name}: {line:.2000}", file=sys.stderr)


def machine() -> dict[str, Any]:
    """The machine and the commit on which a result was measured."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def children_cpu_s() -> float:
    """The CPU seconds of all children of this process that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def progress() -> Progress:
    """Progress bars on stderr, to which tasks are added."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=STDERR, transient=True)


@contextmanager
def counted_progress(description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr. Yields the function that advances the bar, by 1 if called without an argument."""
    with progress() as bar:
        task = bar.add_task(description, total=total)
        yield lambda count=1: bar.advance(task, count)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM too, so that a killed benchmark stops its server."""
    previous = {
        # A shell starts background jobs with SIGINT ignored, so Python does not install this handler in them.
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)),
    }
    try:
        yield
    finally:
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit of the checkout, with a `+` if files differ from the commit. Empty outside a checkout."""
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if changed else "")
