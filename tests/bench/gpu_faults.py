"""A part of `bench.gpu` whose checks fail in the ways in which checks can fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from bench.gpu_parts.check import Checks, Finding, Settings, Skipped


def fail() -> Finding:
    raise ValueError("the kernel is wrong")


def skip() -> Finding:
    raise Skipped("needs 99.0 GB")


def hang() -> Finding:
    while True:
        time.sleep(3600)


def crash() -> Finding:
    print("the driver is lost", flush=True)
    os._exit(3)


KINDS: dict[str, Callable[[], Finding]] = {
    "fails": fail,
    "skips": skip,
    "measures": lambda: {"holds": True, "ratio": 0.5, "no_number": float("nan")},
    "hangs": hang,
    "crashes": crash,
}


def checks(settings: Settings) -> Checks:
    """Return the checks whose names `settings.card` has, in its order."""
    return {name: KINDS[name] for name in settings.card.split()}
