"""What the gateway counts, and how Prometheus reads it.

`METRICS` is the one list of names. Gauges are read from their owners when somebody scrapes; only counters and
histograms live here.
"""

from __future__ import annotations

import platform
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

VERSION = version("rstar-sandbox")

METRICS: dict[str, tuple[str, str]] = {
    "build_info": ("gauge", "version of the gateway and of its Python"),
    "calls_total": ("counter", "calls answered, by status"),
    "calls_waiting": ("gauge", "calls admitted that wait for a slot"),
    "calls_running": ("gauge", "calls handed to executors"),
    "calls_bytes": ("gauge", "bytes of code, stdin and files of admitted calls"),
    "calls_retried_total": ("counter", "calls put back because their executor was lost"),
    "calls_cancelled_total": ("counter", "calls dropped because their client went away"),
    "calls_invalid_total": ("counter", "calls in batches that were malformed"),
    "requests_refused_total": ("counter", "requests answered with an error, by HTTP status"),
    "queue_seconds": ("histogram", "seconds a call waited for a slot"),
    "run_seconds": ("histogram", "seconds a call ran"),
    "body_bytes_total": ("counter", "bytes of bodies, by direction"),
    "executors_ready": ("gauge", "executors that take calls"),
    "executor_restarts_total": ("counter", "executors started again"),
}
PREFIX = "rstar_sandbox_"
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Sample = tuple[str, Mapping[str, str], float]
"""Name without prefix, labels, value."""


class Histogram:
    """Counts of seconds per bucket of `BUCKETS_S`, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds

    def samples(self, name: str) -> Iterator[Sample]:
        below = 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            below += count
            yield f"{name}_bucket", {"le": bound}, below
        yield f"{name}_sum", {}, self.total
        yield f"{name}_count", {}, below


class Counters:
    """Everything that only grows."""

    def __init__(self) -> None:
        self.by_status: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.retried = 0
        self.cancelled = 0
        self.invalid = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.queue_s = Histogram()
        self.run_s = Histogram()

    def samples(self) -> Iterator[Sample]:
        yield "build_info", {"version": VERSION, "python": platform.python_version()}, 1
        for status, count in sorted(self.by_status.items()):
            yield "calls_total", {"status": status}, count
        for code, count in sorted(self.refused.items()):
            yield "requests_refused_total", {"status": str(code)}, count
        yield "calls_retried_total", {}, self.retried
        yield "calls_cancelled_total", {}, self.cancelled
        yield "calls_invalid_total", {}, self.invalid
        yield "body_bytes_total", {"direction": "in"}, self.bytes_in
        yield "body_bytes_total", {"direction": "out"}, self.bytes_out
        yield from self.queue_s.samples("queue_seconds")
        yield from self.run_s.samples("run_seconds")


def executor_samples(number: int, stats: Mapping[str, Any]) -> Iterator[Sample]:
    """An executor's own numbers, under its own names: plain ones, and one level of named ones."""
    for key, value in stats.items():
        name = f"executor_{re.sub('[^a-zA-Z0-9_]', '_', str(key))}"
        named = value.items() if isinstance(value, Mapping) else [("", value)]
        for label, number_of in named:
            if isinstance(number_of, (int, float)):
                yield name, {"executor": str(number)} | ({"name": str(label)} if label else {}), number_of


def render(samples: Iterator[Sample]) -> str:
    """The Prometheus text format, samples of one metric together."""
    families: dict[str, list[str]] = {name: [] for name in METRICS}
    for name, labels, value in samples:
        families.setdefault(_family(name), []).append(f"{PREFIX}{name}{_labels(labels)} {value:.15g}")
    lines: list[str] = []
    for name, values in families.items():
        if values:
            kind, doc = METRICS.get(name) or (_kind(name), "as the executor counts it")
            lines += [f"# HELP {PREFIX}{name} {doc}", f"# TYPE {PREFIX}{name} {kind}", *values]
    return "\n".join(lines) + "\n"


def _family(name: str) -> str:
    base = re.sub("_(bucket|sum|count)$", "", name)
    return base if METRICS.get(base, ("",))[0] == "histogram" else name


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
