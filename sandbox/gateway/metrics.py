"""What the gateway counts, how Prometheus reads it, and what percentiles it knows.

`METRICS` is the one list of names. Gauges are read from their owners when somebody scrapes; only counters and
histograms live here.
"""

from __future__ import annotations

import math
import platform
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Any

VERSION = version("rstar-sandbox")

METRICS: dict[str, tuple[str, str]] = {
    "build_info": ("gauge", "version of the gateway and of its Python"),
    "calls_total": ("counter", "calls answered, by status"),
    "calls_waiting": ("gauge", "calls admitted that wait for a slot"),
    "calls_running": ("gauge", "calls handed to executors"),
    "calls_bytes": ("gauge", "bytes of code, stdin and files of admitted calls"),
    "results_bytes": ("gauge", "bytes of results that clients have not read"),
    "clients_stalled_total": ("counter", "connections cut because their client did not read"),
    "calls_retried_total": ("counter", "calls put back because their executor was lost"),
    "calls_cancelled_total": ("counter", "calls dropped because their client went away"),
    "requests_refused_total": ("counter", "requests answered with an error, by HTTP status"),
    "queue_seconds": ("histogram", "seconds a call waited for a slot"),
    "run_seconds": ("histogram", "seconds a call ran"),
    "answer_seconds": ("histogram", "seconds from a call's admission to its answer"),
    "body_bytes_total": ("counter", "bytes of bodies, by direction"),
    "executors_ready": ("gauge", "executors that take calls"),
    "executor_restarts_total": ("counter", "executors started again"),
}
PREFIX = "rstar_sandbox_"
_PREFERRED = (1, 1.12, 1.25, 1.4, 1.6, 1.8, 2, 2.24, 2.5, 2.8, 3.15, 3.55, 4, 4.5, 5, 5.6, 6.3, 7.1, 8, 9)
"""Twenty steps a decade (Renard's R20): two neighbours differ by at most 15 %."""
_DECADES = range(-4, 3)
BOUNDS_S = tuple(float(f"{number}e{decade}") for decade in _DECADES for number in _PREFERRED)
"""Upper ends of the buckets that a histogram counts in: 0.1 ms to 15 minutes."""
SCRAPED = tuple(BOUNDS_S.index(float(f"{number}e{decade}")) for decade in _DECADES[1:] for number in (1, 2.5, 5))
"""Which of them Prometheus sees."""

Sample = tuple[str, Mapping[str, str], float]
"""Name without prefix, labels, value."""


class Histogram:
    """Counts of seconds per bucket of `BOUNDS_S`, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total += seconds

    def samples(self, name: str) -> Iterator[Sample]:
        below = list(accumulate(self.counts))
        for place in SCRAPED:
            yield f"{name}_bucket", {"le": str(BOUNDS_S[place])}, below[place]
        yield f"{name}_bucket", {"le": "+Inf"}, below[-1]
        yield f"{name}_sum", {}, self.total
        yield f"{name}_count", {}, below[-1]


def quantiles_s(counts: Sequence[int], of: Sequence[float]) -> list[float]:
    """Seconds below which each share of `of` lies, going by the counts of a histogram that is not empty.

    The geometric middle of the right bucket, so at most 7 % from the truth within `BOUNDS_S`; beyond, the nearer end.
    """
    below = list(accumulate(counts))
    found = []
    for share in of:
        place = bisect_left(below, max(1, math.ceil(share * below[-1])))
        inside = 0 < place < len(BOUNDS_S)
        found.append(math.sqrt(BOUNDS_S[place - 1] * BOUNDS_S[place]) if inside else BOUNDS_S[-1 if place else 0])
    return found


class Counters:
    """Everything that only grows."""

    def __init__(self) -> None:
        self.by_status: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.retried = 0
        self.cancelled = 0
        self.stalled = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.queue_s = Histogram()
        self.run_s = Histogram()
        self.answer_s = Histogram()

    def samples(self) -> Iterator[Sample]:
        yield "build_info", {"version": VERSION, "python": platform.python_version()}, 1
        for status, count in sorted(self.by_status.items()):
            yield "calls_total", {"status": status}, count
        for code, count in sorted(self.refused.items()):
            yield "requests_refused_total", {"status": str(code)}, count
        yield "calls_retried_total", {}, self.retried
        yield "calls_cancelled_total", {}, self.cancelled
        yield "clients_stalled_total", {}, self.stalled
        yield "body_bytes_total", {"direction": "in"}, self.bytes_in
        yield "body_bytes_total", {"direction": "out"}, self.bytes_out
        yield from self.queue_s.samples("queue_seconds")
        yield from self.run_s.samples("run_seconds")
        yield from self.answer_s.samples("answer_seconds")


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
