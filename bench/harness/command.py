"""How every benchmark speaks: machine facts, tables, plots, and the one JSON object on the last line.

Tables and progress go to stderr, so that stdout is the JSON object alone where `--json` asks for it. A benchmark's
`main` is `run_as_command(...)`, which turns what it raises into exit codes: 0 fine, 1 failed, 2 misuse.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sandbox.errors import SandboxError

CONSOLE = Console(stderr=True)
OUT = Console()


class BenchFailed(Exception):
    """The measurement could not be made; says why."""


ASIDE = ("json", "plot", "python", "url", "folder", "results")
"""Arguments that leave a measurement what it is."""


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Arguments that every benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc.strip().splitlines()[0])
    made.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    made.add_argument("--plot", metavar="FILE.png", help="draw the result (needs the [bench] extra)")
    made.add_argument("--python", metavar="PATH", help="the guest's Python (default: what the server would take)")
    return made


def count(text: str) -> int:
    """An argument that counts something: a whole number from 1 up."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text}")
    return number


def seconds(text: str) -> float:
    """An argument that is a span of time, or a rate: finite, and over 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number over 0, got {text}")
    return number


def url(text: str) -> str:
    """An argument that is the address of a service."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"expected an address such as http://127.0.0.1:8088, got {text}")
    return text.rstrip("/")


def file(text: str) -> Path:
    """An argument that is a file to read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    return Path(text)


def run_as_command(name: str, work: Callable[[], int]) -> int:
    """`work`, its failures turned into a line on stderr and an exit code. SIGTERM cleans up as Ctrl-C does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_term = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return work()
    except KeyboardInterrupt:
        return 130
    except (BenchFailed, SandboxError, OSError, ValueError) as why:
        print(f"{name}: {why}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, before_term)


def machine() -> dict[str, Any]:
    """Where and of what a figure was taken, to be kept beside it."""
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


def finish(figures: Mapping[str, Any], parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Print `figures` with the command and the machine's facts, if that was asked for."""
    if args.json:
        print(json.dumps({"command": command(parser, args), **figures, "machine": machine()}), flush=True)


def command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """What was asked for, but for how it is shown and whose Python it was. Of files, their names."""
    parts = [parser.prog]
    for name, value in vars(args).items():
        if name in ASIDE or value == parser.get_default(name):
            continue
        parts.append(f"--{name.rstrip('_').replace('_', '-')}")
        if value is not True:
            several = value if isinstance(value, list | tuple) else [value]
            parts.append((" " if isinstance(value, list) else ",").join(map(_named, several)))
    return " ".join(parts)


def _named(value: object) -> str:
    is_file = isinstance(value, str | os.PathLike) and os.path.exists(value)
    return os.path.basename(value) if is_file else str(value)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; the first column is text, the others are numbers or short words."""
    table = Table(title=title, box=None, header_style="bold", title_style="bold", title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    OUT.print(table)


def show_asked(title: str, verdicts: Iterable[Mapping[str, Any]]) -> None:
    """What is needed, what came, and whether that holds: rows of `what`, `needed`, `got` and `holds`."""
    show(title, *asked(verdicts))


def asked(verdicts: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns and the lines of such a table."""

    def line(row: Mapping[str, Any]) -> tuple[str, ...]:
        got = f"{row['got']:,.0f}" if row["got"] >= 100 else f"{row['got']:.3g}"
        return row["what"], row["needed"], got, "yes" if row["holds"] else "**no**"

    return ("", "needed", "got", "holds"), [line(row) for row in verdicts]


def progress() -> Progress:
    """A progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=CONSOLE, transient=True)


def plot(path: str | None, draw: Callable[[Any], None], size: tuple[float, float] = (8.0, 4.5)) -> None:
    """Have `draw(axes)` draw one picture into `path`; without matplotlib, say what is missing."""
    if path is None:
        return
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        print("no plot: it needs matplotlib; pip install '.[bench]'", file=sys.stderr)
        return
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=150)
    print(f"plot: {path}", file=sys.stderr)


def percentiles(values: Iterable[float], points: Sequence[int] = (50, 99)) -> dict[str, float]:
    """The percentiles at `points`, as {"p50": ..., "p99": ...}; empty without values."""
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in points if ordered}


def quantiles(values: Iterable[float], count: int = 201) -> list[float]:
    """The least, the most, and `count` - 2 at even steps between them; empty without values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(ordered[round(last * step / (count - 1))], 2) for step in range(count) if ordered]


def median(values: Iterable[float], digits: int = 3) -> float:
    """The median, rounded for people."""
    return round(statistics.median(values), digits)


def spread(figure: Mapping[str, float] | None) -> str:
    """A mean and its deviation over seeds; what there is none of is a dash."""
    if figure is None:
        return "-"
    mean, sd = figure["mean"], figure["sd"]
    digits = 0 if abs(mean) >= 100 or mean == sd == 0 else 3
    return f"{mean:,.{digits}f} ± {sd:,.{digits}f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The checkout's commit, with a + if files differ from it; empty outside a checkout."""
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if changed else "")
