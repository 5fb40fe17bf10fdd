"""The layers are measured as they are run, and the sums are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import layers
from sandbox import jail


def _costs(values: dict[str, float]) -> dict[tuple[str, str], list[layers.Cost]]:
    return {("bare", step): [layers.Cost(values.get(step, 1.0), 1.0)] * 3 for step in layers.STEPS}


@pytest.mark.parametrize(("whole", "over"), [(1.5, []), (2.4, ["floor"]), (3.3, ["os.fork", "floor"])])
def test_the_promise_is_about_os_fork_and_the_lower_floor_is_told_too(whole: float, over: list[str]) -> None:
    args = layers._parser().parse_args(["--profiles", "bare"])
    figures = layers.summarise(_costs({"http": whole, "os.fork": 2.0}), args)
    assert figures["profiles"]["bare"]["ratio"] == whole
    assert figures["profiles"]["bare"]["ratio_os_fork"] == whole / 2
    assert figures["at_most"] == 1.6
    assert figures["over"] == {floor: ["bare"] if floor in over else [] for floor in layers.RATIOS}
    assert figures["holds"] is ("os.fork" not in over)


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
