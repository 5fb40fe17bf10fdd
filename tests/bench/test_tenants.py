"""bench.tenants: the requirement on the delay, and a small run."""

from __future__ import annotations

import pytest

from bench import tenants
from bench.harness.requirements import unmet
from bench.tenants import TenantsRun
from tests.bench.conftest import RunBenchmark
from tests.executor.calling import OWN_PYTHON


@pytest.mark.parametrize(
    ("run", "unmet_requirement"),
    [
        (TenantsRun(3, [5.0], [54.0], [1.0, 1.0], num_slept=3), None),
        (TenantsRun(3, [5.0], [56.0], [1.0, 1.0], num_slept=3), "median delay of a short call in ms is 51"),
        (TenantsRun(3, [5.0], [5.0], [1.0, 1.0], num_slept=2), "calls that slept is 2, expected ≥ 3"),
        (TenantsRun(3, [5.0], [5.0], [1.0, 1.0], num_slept=3, mismatched=1), "mismatched short calls is 1"),
    ],
)
def test_the_calls_of_another_tenant_may_not_delay_short_calls(run: TenantsRun, unmet_requirement: str | None) -> None:
    lines = unmet(tenants.summarize(run))
    if unmet_requirement is None:
        assert lines == []
    else:
        assert lines[0].startswith(f"Not met: {unmet_requirement}")


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.usefixtures("needs_isolation")
def test_calls_that_sleep_in_all_slots_of_a_tenant_do_not_delay_those_of_another(run_benchmark: RunBenchmark) -> None:
    """The time in the queue is compared, because the latency also depends on the other work of the machine."""
    sizes = ["--sleeping", "1000", "--sleep-s", "1", "--short", "20", "--python", OWN_PYTHON]
    _, result = run_benchmark(tenants.main, *sizes)
    assert result["beside_queue_ms"]["p50"] <= 50


@pytest.mark.usefixtures("needs_isolation")
def test_a_small_run_has_a_complete_result(run_benchmark: RunBenchmark) -> None:
    sizes = ["--sleeping", "8", "--sleep-s", "0.2", "--short", "4", "--python", OWN_PYTHON]
    exit_code, result = run_benchmark(tenants.main, *sizes)
    assert result["calls_beside"] > 0 and result["alone_ms"]["p50"] > 0
    assert {row["name"]: row["measured"] for row in result["requirements"]}["calls that slept"] == 8
    assert exit_code == (0 if result["holds"] else 1)
