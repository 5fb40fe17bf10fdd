"""Runs one part of `bench.gpu`: `python -m bench.gpu_parts MODULE SETTINGS FILE`.

SETTINGS is JSON. FILE gets a line of JSON when a check starts, and one with its finding when it ends. So a process that
is killed leaves the findings that it has made, and the name of the check that it has not finished.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.gpu_parts.check import Checks, Finding, Settings, Skipped, free_memory

MAX_ERROR_LINES = 8
"""If a check fails by an exception, its finding has this many lines from the end of the traceback."""


def main(module: str, settings_json: str, file: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the check stops what it has started
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a part needs no network, and would wait for it
    settings = Settings(**json.loads(settings_json))
    with Path(file).open("a", encoding="utf-8") as output:

        def write(row: dict[str, Any]) -> None:
            output.write(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n")
            output.flush()

        try:
            checks: Checks = import_module(module).checks(settings)
        except Skipped as reason:
            write({"check": "all", "holds": None, "reason": str(reason)})
            return
        for name, measure in checks.items():
            write({"check": name})
            started_at = perf_counter()
            try:
                finding: Finding = measure()
            except Skipped as reason:
                finding = {"holds": None, "reason": str(reason)}
            except Exception:  # boundary: the next checks run all the same
                finding = {"holds": False, "reason": last_lines(traceback.format_exc())}
            write({"check": name, "seconds": round(perf_counter() - started_at, 1), **finding})
            free_memory()


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-MAX_ERROR_LINES:])


def _finite(value: Any) -> Any:
    """Return None for NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
