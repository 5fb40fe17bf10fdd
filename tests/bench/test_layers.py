"""The layers are measured as they are run, and the ratios are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import layers
from bench.harness import requirements
from sandbox import jail


def _costs(values: dict[str, float]) -> dict[tuple[str, str], list[layers.Cost]]:
    return {("bare", step): [layers.Cost(values.get(step, 1.0), 1.0)] * 3 for step in layers.STEPS}


@pytest.mark.parametrize(("whole", "holds"), [(1.5, True), (2.4, True), (3.3, False)])
def test_the_requirement_is_on_os_fork_and_the_ratio_to_the_floor_is_reported(whole: float, holds: bool) -> None:
    args = layers._parser().parse_args(["--profiles", "bare"])
    result = layers.summarize(_costs({"http": whole, "os.fork": 2.0}), args)
    assert result["profiles"]["bare"]["ratio"] == whole
    assert result["profiles"]["bare"]["ratio_os_fork"] == whole / 2
    assert result["max_ratio"] == 1.6
    assert requirements.hold(result["requirements"]) is holds
    assert ("cheapest fork: all but bare" in layers.tables(result)[1]) is (whole > 1.6)


def test_an_unknown_profile_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        layers.main(["--profiles", "bare,huge"])
    assert leaving.value.code == 2
    assert "huge" in capsys.readouterr().err


@pytest.mark.runtime
def test_every_step_is_measured(guest_python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if jail.choose_level("auto").level is not jail.Level.NAMESPACES:
        pytest.skip("needs isolation=namespaces")
    sizes = ["--calls", "8", "--rounds", "1", "--profiles", "bare", "--at-most", "1e9"]
    assert layers.main([*sizes, "--python", str(guest_python), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out.splitlines()[-1])["profiles"]["bare"]["steps"]
    assert list(steps) == list(layers.STEPS)
    assert all(step["cpu_ms"] > 0 and step["wall_ms"] > 0 for step in steps.values())
