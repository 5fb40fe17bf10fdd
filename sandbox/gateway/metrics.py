"""The gateway's counters and histograms, and the Prometheus text of all metrics.

`METRICS` is the only list of metric names. Gauges are read from their owners at scrape time. Counters are plain
numbers and not objects of `prometheus-client`, because they change several times per call and those objects take a lock
for each change. `prometheus-client` only renders the numbers at a scrape.
"""

from __future__ import annotations

import math
import platform
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

VERSION = version("rstar-sandbox")

METRICS: dict[str, tuple[str, str]] = {
    "build_info": ("gauge", "version of the gateway and of its Python"),
    "calls_total": ("counter", "finished calls, by status"),
    "calls_waiting": ("gauge", "admitted calls that wait for a slot"),
    "calls_dispatched": ("gauge", "calls sent to executors and not finished"),
    "calls_bytes": ("gauge", "bytes of code, stdin and files of unfinished calls"),
    "results_bytes": ("gauge", "bytes of results that clients have not read"),
    "clients_stalled_total": ("counter", "connections closed because the client did not read"),
    "calls_retried_total": ("counter", "calls requeued because their zygote or executor died"),
    "calls_cancelled_total": ("counter", "calls cancelled because the client disconnected or cancelled their program"),
    "requests_refused_total": ("counter", "requests answered with an error, by HTTP status"),
    "queue_seconds": ("histogram", "seconds that a call waited for a slot"),
    "run_seconds": ("histogram", "seconds that a call ran"),
    "answer_seconds": ("histogram", "seconds from the admission of a call to its result"),
    "body_bytes_total": ("counter", "bytes of HTTP bodies, by direction"),
    "tenant_calls_total": ("counter", "finished calls of a tenant of the tenants file, by status"),
    "tenant_calls_unfinished": ("gauge", "admitted calls of the tenant without a result"),
    "tenant_calls_dispatched": ("gauge", "calls of the tenant sent to executors and not finished"),
    "tenant_calls_bytes": ("gauge", "bytes of code, stdin and files of the tenant's unfinished calls"),
    "tenant_run_seconds_total": ("counter", "seconds that calls of the tenant ran"),
    "tenant_cpu_seconds_total": ("counter", "CPU seconds that calls of the tenant used"),
    "executors_ready": ("gauge", "executors that accept calls"),
    "executor_restarts_total": ("counter", "restarts of executors"),
    "nodes": ("gauge", "nodes of the cluster, by state"),
    "node_restarts_total": ("counter", "restarts of a node's executors after its loss, by node"),
    "executor_queued": ("gauge", "calls that wait in the executor for a slot"),
    "executor_running": ("gauge", "calls in slots of the executor"),
    "executor_running_long": ("gauge", "long calls in slots of the executor"),
    "executor_slots": ("gauge", "slots of the executor for short calls"),
    "executor_long_slots": ("gauge", "slots of the executor for long calls"),
    "executor_sessions": ("gauge", "open sessions of the executor"),
    "executor_zygotes": ("gauge", "live zygotes, by profile"),
    "executor_zygote_restarts_total": ("counter", "restarts of zygotes"),
    "executor_retried_total": (
        "counter",
        "calls started again because a start failed (no process, descriptor or cgroup)",
    ),
    "executor_demoted_total": ("counter", "demotions of long calls to a lower CPU priority"),
    "executor_promoted_total": ("counter", "promotions of long calls to normal priority"),
    "executor_missed_imports_total": ("counter", "imports by calls of modules that no zygote had preloaded, by module"),
}
"""Type and description of every metric, by its name without prefix."""
TENANT_METRICS = frozenset({"build_info", "executors_ready"})
"""Metrics without the label `tenant` that a request with the token of a tenant may read. All other metrics without
this label contain information about other tenants."""
PREFIX = "rstar_sandbox_"
_PREFERRED_NUMBERS = (1, 1.12, 1.25, 1.4, 1.6, 1.8, 2, 2.24, 2.5, 2.8, 3.15, 3.55, 4, 4.5, 5, 5.6, 6.3, 7.1, 8, 9)
"""Twenty steps per decade (Renard's R20 series): neighbours differ by at most 15 %."""
_DECADES = range(-4, 3)
BOUNDS_S = tuple(float(f"{number}e{decade}") for decade in _DECADES for number in _PREFERRED_NUMBERS)
"""Upper bounds of a histogram's buckets in seconds: 0.1 ms to 15 minutes."""
SCRAPED_BUCKETS = tuple(
    BOUNDS_S.index(float(f"{number}e{decade}")) for decade in _DECADES[1:] for number in (1, 2.5, 5)
)
"""Indexes in `BOUNDS_S` of the buckets in the Prometheus text: three per decade, from 1 ms on. There are so few because
each bucket is a time series of its own, and few durations are below 1 ms. The counts are cumulative, so they contain
the counts of the buckets that are left out."""

MetricSample = tuple[str, Mapping[str, str], float]
"""Name without prefix, labels, value."""


class Histogram:
    """Counts of durations per bucket of `BOUNDS_S`, and their sum in seconds."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def samples(self, name: str) -> Iterator[MetricSample]:
        cumulative = list(accumulate(self.counts))
        for index in SCRAPED_BUCKETS:
            yield f"{name}_bucket", {"le": str(BOUNDS_S[index])}, cumulative[index]
        yield f"{name}_bucket", {"le": "+Inf"}, cumulative[-1]
        yield f"{name}_sum", {}, self.total_s
        yield f"{name}_count", {}, cumulative[-1]


def quantiles_s(counts: Sequence[int], shares: Sequence[float]) -> list[float]:
    """Return the quantiles in seconds, one per share (0 to 1), of a histogram that is not empty.

    Each quantile is the geometric mean of its bucket's bounds, at most 7 % from the true value. A quantile outside of
    `BOUNDS_S` is returned as the nearer end of `BOUNDS_S`.
    """
    cumulative = list(accumulate(counts))
    quantiles = []
    for share in shares:
        index = bisect_left(cumulative, max(1, math.ceil(share * cumulative[-1])))
        if 0 < index < len(BOUNDS_S):
            quantiles.append(math.sqrt(BOUNDS_S[index - 1] * BOUNDS_S[index]))
        else:
            quantiles.append(BOUNDS_S[-1 if index else 0])
    return quantiles


class TenantUsage:
    """What the finished calls of one tenant have used."""

    __slots__ = ("by_status", "cpu_s", "run_s")

    def __init__(self) -> None:
        self.by_status: Counter[str] = Counter()
        """Finished calls."""
        self.run_s = self.cpu_s = 0.0


class Counters:
    """The gateway's own counters and histograms."""

    def __init__(self) -> None:
        self.by_status: Counter[str] = Counter()
        """Finished calls."""
        self.by_tenant: dict[str, TenantUsage] = {}
        """Usage by tenant, for each tenant that is or was in the tenants file. Other names of tenants are left out:
        callers choose them, so their number has no bound."""
        self.refused: Counter[int] = Counter()
        """Requests answered with an error, by HTTP status."""
        self.retried = 0
        self.cancelled = 0
        self.stalled = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.queue_s = Histogram()
        self.run_s = Histogram()
        self.answer_s = Histogram()

    def count_calls(self, status: str, tenant: str, calls: int = 1) -> None:
        """Count finished calls of one tenant."""
        self.by_status[status] += calls
        if (usage := self.by_tenant.get(tenant)) is not None:
            usage.by_status[status] += calls

    def add_tenants(self, names: Iterable[str]) -> None:
        """Count the calls of these tenants from now on."""
        for name in names:
            self.by_tenant.setdefault(name, TenantUsage())

    def samples(self) -> Iterator[MetricSample]:
        yield "build_info", {"version": VERSION, "python": platform.python_version()}, 1
        for status, count in sorted(self.by_status.items()):
            yield "calls_total", {"status": status}, count
        for http_status, count in sorted(self.refused.items()):
            yield "requests_refused_total", {"status": str(http_status)}, count
        yield "calls_retried_total", {}, self.retried
        yield "calls_cancelled_total", {}, self.cancelled
        yield "clients_stalled_total", {}, self.stalled
        yield "body_bytes_total", {"direction": "in"}, self.bytes_in
        yield "body_bytes_total", {"direction": "out"}, self.bytes_out
        yield from self.queue_s.samples("queue_seconds")
        yield from self.run_s.samples("run_seconds")
        yield from self.answer_s.samples("answer_seconds")


def with_worker_label(by_worker: Mapping[int, Iterable[MetricSample]]) -> Iterator[MetricSample]:
    """Yield the samples of several workers, each with the label `worker`."""
    for worker, samples in sorted(by_worker.items()):
        for name, labels, value in samples:
            yield name, {**labels, "worker": str(worker)}, value


class PrometheusText:
    """Renders samples in the Prometheus text format. Has its own registry, so that nothing global is exposed."""

    def __init__(self, samples: Callable[[], Iterable[MetricSample]]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_SampleCollector(samples))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _SampleCollector(Collector):
    """Groups the samples by metric, in the order of `METRICS`."""

    def __init__(self, samples: Callable[[], Iterable[MetricSample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        metrics = {
            name: Metric(PREFIX + name.removesuffix("_total"), description, kind)
            for name, (kind, description) in METRICS.items()
        }
        for name, labels, value in self._samples():
            metric = metrics.get(name) or metrics[name.rpartition("_")[0]]  # NAME_bucket, NAME_sum, NAME_count
            metric.add_sample(PREFIX + name, dict(labels), value)
        return (metric for metric in metrics.values() if metric.samples)
