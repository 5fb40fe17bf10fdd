"""OpenTelemetry traces of requests, if the SDK is installed and the standard environment variables configure it.

    request             from its head to the end of its response; its parent is the client's span in `traceparent`
    ├── queue, run      two spans per call with the times of its result, for the first `MAX_TRACED_CALLS` of a request
    └── response        from the time at which the first result is encoded to the end of the response

`queue` and `run` do not include the time that the frames between gateway and executor take, because no result reports
it. If a call was sent to an executor more than once, its spans show the last attempt.

Without the extra `otel`, or without one of `ENABLING_VARIABLES`, nothing is imported and a request has no trace.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from sandbox.errors import ConfigError
from sandbox.gateway.calls.batch import Batch
from sandbox.types import EncodedResult

log = logging.getLogger(__name__)

ENABLING_VARIABLES = (
    "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)  # fmt: skip
MAX_TRACED_CALLS = 100
"""Calls of a request that get spans. A span costs about as much as the whole call in the gateway."""
_EXPORTERS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""Names of the entry points for the exporter `otlp`, by OTEL_EXPORTER_OTLP_PROTOCOL."""
_NS_PER_MS = 1_000_000


class Traces:
    """Starts the trace of each request. `provider` is a `TracerProvider` of the SDK."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("rstar_sandbox")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Traces | None:
        """Return traces as the variables of OpenTelemetry configure them; None if they configure none. Raises
        `ConfigError` if the exporter that they name is not installed."""
        is_enabled = any(environ.get(name) for name in ENABLING_VARIABLES)
        if not is_enabled or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        exporter = environ.get("OTEL_TRACES_EXPORTER", "otlp")
        if exporter == "none":
            return None
        if importlib.util.find_spec("opentelemetry") is None:
            log.warning("OTEL_* variables are set, but traces need the package: pip install 'rstar-sandbox[otel]'")
            return None
        return cls(_provider(exporter, environ))

    def start(self, method: str, path: str, headers: Mapping[str, str], request_id: str) -> RequestTrace:
        """Start the span of a request. The headers may have a `traceparent`."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{method} {path}",
            context=self._propagator.extract(carrier),
            kind=_span_kind(),
            attributes={"http.request.method": method, "url.path": path, "rstar.request_id": request_id},
        )
        return RequestTrace(self._tracer, span)

    def stop(self) -> None:
        """Export the spans that were not exported yet. Blocks for up to some seconds."""
        self._provider.shutdown()


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: Any, span: Any) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._clock_offset_ns = time.time_ns() - time.monotonic_ns()
        """Wall time minus monotonic time. The call table has monotonic times."""
        self._traced_calls = 0
        self._responded_at_ns: int | None = None

    def add_batch(self, batch: Batch) -> None:
        """Record spans of the batch's calls as their results are read."""
        if self._span.is_recording():
            admitted_at = batch.admitted_at  # the lambda must not refer to the batch: that would be a reference cycle
            batch.on_read = lambda result: self._add_result(result, admitted_at)

    def end(self, status: int, tenant: str, calls: int) -> None:
        """End the response and the request, which has this HTTP status."""
        if self._responded_at_ns is not None:
            self._add_span("response", self._responded_at_ns, time.time_ns())
        attributes = {"http.response.status_code": status, "rstar.tenant": tenant, "rstar.calls": calls}
        self._span.set_attributes(attributes)
        self._span.end()

    def _add_result(self, result: EncodedResult, admitted_at: float) -> None:
        if self._responded_at_ns is None:
            self._responded_at_ns = time.time_ns()
        usage = result["usage"]
        if self._traced_calls >= MAX_TRACED_CALLS or result["status"] == "invalid":  # an invalid call has no times
            return
        self._traced_calls += 1
        admitted_ns = int(admitted_at * 1e9) + self._clock_offset_ns
        started_ns = admitted_ns + int(usage["queue_ms"] * _NS_PER_MS)
        self._add_span("queue", admitted_ns, started_ns, result)
        if result["status"] != "unavailable":
            self._add_span("run", started_ns, started_ns + int(usage["run_ms"] * _NS_PER_MS), result)

    def _add_span(self, name: str, start_ns: int, end_ns: int, result: EncodedResult | None = None) -> None:
        attributes: dict[str, Any] = {}
        if result is not None:
            attributes = {"rstar.id": result["id"], "rstar.status": result["status"]}
        span = self._tracer.start_span(name, context=self._context, start_time=start_ns, attributes=attributes)
        span.end(end_time=end_ns)


def _span_kind() -> Any:
    from opentelemetry.trace import SpanKind

    return SpanKind.SERVER


def _provider(exporter: str, environ: Mapping[str, str]) -> Any:
    """Return a provider with the exporter of this name. The SDK reads the other variables itself: the endpoint, the
    sampler, the resource and the sizes of batches. Raises `ConfigError` if the exporter is not installed."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    name = _EXPORTERS.get(protocol or "http/protobuf", exporter) if exporter == "otlp" else exporter
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if found is None:
        raise ConfigError(f"OTEL_TRACES_EXPORTER={exporter}: the exporter {name} is not installed; install or unset it")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(found.load()()))
    return provider
