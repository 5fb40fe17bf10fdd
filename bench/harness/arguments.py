"""Option parsers that benchmarks share, and the command line that a result keeps."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

NOT_IN_COMMAND = (
    "json", "python", "url", "code_judge", "sandbox_fusion", "scalebox", "folder", "results", "vllm", "out", "wheels",
)  # fmt: skip
"""Options that do not change what is measured. A result's command line leaves them out."""


SERVER_OPTIONS = ("python", "isolation", "stdlib-only")
"""Names of the options of the server that a benchmark starts."""
_SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "python": {"metavar": "PATH", "help": "the guest's Python (default: the server's default)"},
    "isolation": {"default": "auto", "help": "isolation level of the server (default: auto)"},
    "stdlib-only": {"action": "store_true", "help": "only zygotes and calls of the standard library (faster start)"},
    "seed": {"type": int, "default": 0, "help": "seed of everything random (default: 0)"},
}


def parser(name: str, doc: str | None, *shared_options: str) -> argparse.ArgumentParser:
    """A parser with `--json` and the named options; the first line of `doc` is its description."""
    result = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=(doc or "").strip().splitlines()[0])
    result.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for option in shared_options:
        result.add_argument(f"--{option}", **_SHARED_OPTIONS[option])
    return result


def server_flags(args: argparse.Namespace) -> list[str]:
    """The flags of `rstar-sandbox serve` for `SERVER_OPTIONS`."""
    return ["--isolation", args.isolation, *(["--profiles", "bare"] if args.stdlib_only else [])]


def add_in_flight(parser: argparse.ArgumentParser, default: int, unit: str = "calls") -> None:
    """Add `--in-flight`."""
    parser.add_argument("--in-flight", type=count, default=default, help=f"{unit} in flight (default: {default})")


def count(text: str) -> int:
    """Parse a whole number from 1 up."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text}")
    return number


def seconds(text: str) -> float:
    """Parse a duration or a rate: finite and above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected a fraction from 0 to 1, got {text}")
    return number


def url(text: str) -> str:
    """Parse the address of a service; a trailing slash is dropped."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"expected an address such as http://127.0.0.1:8642, got {text}")
    return text.rstrip("/")


def file(text: str) -> Path:
    """Parse the path of a file that exists."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file, got {text!r}")
    return Path(text)


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names, each of which must be in `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown name {unknown[0]!r}; expected some of {', '.join(known)}")
        return names

    return parse


def command_line(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The command that repeats a measurement: every option that differs from its default, except `NOT_IN_COMMAND`."""
    parts = [parser.prog]
    for name, value in vars(args).items():
        if name in NOT_IN_COMMAND or value == parser.get_default(name):
            continue
        parts.append(f"--{name.replace('_', '-')}")
        if value is not True:
            values = value if isinstance(value, list | tuple) else [value]
            parts.append((" " if isinstance(value, list) else ",").join(map(_short_name, values)))
    return " ".join(parts)


def _short_name(value: object) -> str:
    """A file's name without its directory; other values as text."""
    is_file = isinstance(value, str | os.PathLike) and os.path.exists(value)
    return Path(str(value)).name if is_file else str(value)
