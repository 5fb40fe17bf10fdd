"""Tests of bench.layers: the ratios, the requirement, and a run in which every step is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import layers
from bench.harness import requirements
from sandbox import jail
from tests.bench.conftest import RefusedArguments, RunBenchmark


def _costs(cpu_ms: dict[str, float]) -> dict[tuple[str, str], list[float]]:
    """Return three rounds of the profile `bare`. A step that is not in `cpu_ms` takes 1 ms."""
    return {("bare", step): [cpu_ms.get(step, 1.0)] * 3 for step in layers.STEPS}


@pytest.mark.parametrize(("http_ms", "holds"), [(1.5, True), (2.4, True), (3.3, False)])
def test_the_ratio_to_os_fork_is_bounded_and_the_ratio_to_the_floor_is_only_reported(
    http_ms: float, holds: bool
) -> None:
    """The floor takes 1 ms and os.fork 2 ms of CPU, so a call over HTTP may take 3.2 ms."""
    args = layers._parser().parse_args(["--profiles", "bare"])
    result = layers.summarize(_costs({"http": http_ms, "os.fork": 2.0}), args)
    assert result["profiles"]["bare"]["ratio"] == http_ms
    assert result["profiles"]["bare"]["ratio_os_fork"] == http_ms / 2
    assert requirements.hold(result["requirements"]) is holds
    sentence = layers.tables(result)[1]
    assert isinstance(sentence, str)
    assert ("cheapest fork: all but bare" in sentence) is (http_ms > 1.6)


def test_an_unknown_profile_is_refused(refused_arguments: RefusedArguments) -> None:
    assert "huge" in refused_arguments(layers.main, "--profiles", "bare,huge")


@pytest.mark.runtime
def test_every_step_is_measured(guest_python: Path, run_benchmark: RunBenchmark) -> None:
    if jail.choose_level("auto").level is not jail.Level.NAMESPACES:
        pytest.skip("needs isolation=namespaces")
    sizes = ["--calls", "8", "--rounds", "1", "--profiles", "bare"]
    exit_code, result = run_benchmark(layers.main, *sizes, "--python", str(guest_python))
    assert exit_code == (0 if result["holds"] else 1)
    steps = result["profiles"]["bare"]["steps"]
    assert list(steps) == list(layers.STEPS)
    assert all(step["cpu_ms"] > 0 for step in steps.values())
