"""Tests of the configuration of traces by the environment variables of OpenTelemetry."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from sandbox.errors import ConfigError
from sandbox.gateway.observe.traces import Traces


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_without_a_configured_exporter_there_are_no_traces(environ: dict[str, str]) -> None:
    assert Traces.from_environment(environ) is None


def test_the_gateway_imports_opentelemetry_only_if_it_is_configured() -> None:
    code = (
        "import sys, sandbox.gateway\nfrom sandbox.gateway.observe.traces import Traces\nTraces.from_environment({})\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_named_exporter_is_used_and_stopped() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk (extra dev)")
    traces = Traces.from_environment({"OTEL_TRACES_EXPORTER": "console"})
    assert traces is not None
    traces.stop()
    del traces
    gc.collect()  # the SDK starts a thread in each forked process while its processor exists, even a stopped one


def test_an_exporter_that_is_not_installed_is_an_error() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk (extra dev)")
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER=nothing: the exporter nothing is not installed"):
        Traces.from_environment({"OTEL_TRACES_EXPORTER": "nothing"})
