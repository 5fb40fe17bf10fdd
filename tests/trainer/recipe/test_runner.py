"""The recipe's order, what is over and what is not, and that a kill leaves neither a stray child nor a second run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError, RunConfig, load
from trainer.json_files import RecordError, write_json
from trainer.recipe.runner import NotReady, Run, Unit, UnitFailed, argv, recipe
from trainer.runs.run_folder import LAYOUT_VERSION

STAGES = """
[sft]
data = ["generated:8"]
[stages.rl1]
steps = 3
[stages.rl2]
steps = 2
drop_solved = 8
data = ["generated:4"]
"""
NO = "--no-preflight"
ORDER = ["prepare", "sft", "eval sft", "grpo rl1", "eval rl1", "filter rl2", "grpo rl2", "eval rl2"]


def _config(folder: Path, *sets: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(STAGES, encoding="utf-8")
    return load(file, {}, [f"run_dir={folder / 'run'}", *sets])


class Children:
    """Stands in for processes: a unit is over at once, unless it is the one that fails."""

    def __init__(self, config: RunConfig, fails: str = "", preflight: int = 0) -> None:
        self.run, self.fails, self.started = Run(config), fails, list[str]()
        self.preflight, self.preflights = preflight, list[RunConfig]()

    def __call__(self, unit: Unit, command: Sequence[str], lock: int) -> int:
        if unit.command == "preflight":
            self.preflights.append(load(Path(command[-1]), {}))
            return self.preflight
        self.started.append(str(unit))
        if str(unit) == self.fails:
            return 1
        found: dict[str, Any] = {"seconds": 2.0, "model": f"{unit.stage}/model", "checkpoint": unit.stage, "step": 5}
        if unit.command == "eval":
            found["scores"] = {"accuracy": 0.5, "tool_error_ratio": 0.25, "one_answer": 0.75}
        self.run.finish(unit, found)
        return 0


def test_units_run_in_the_recipe_s_order_and_sum_up(tmp_path: Path) -> None:
    config = _config(tmp_path)
    children = Children(config)
    run = recipe(config, start=children)
    assert children.started == ORDER
    scores = {"accuracy": 0.5, "tool_error_ratio": 0.25, "one_answer": 0.75}
    expected = [{"name": name, **scores, "seconds": s} for name, s in (("sft", 4.0), ("rl1", 4.0), ("rl2", 6.0))]
    assert run.summary() == {"stages": expected}
    written = run.record.read_summary()
    assert written is not None
    assert written["stages"] == expected


def test_nothing_starts_before_the_preflight_and_its_folder_may_still_change(tmp_path: Path) -> None:
    config = _config(tmp_path)
    children = Children(config, preflight=2)
    with pytest.raises(NotReady, match="nothing was started; mend what is named above, or give --no-preflight"):
        recipe(config, start=children)
    assert (children.started, children.preflights) == ([], [config])
    crashed = Children(config, preflight=1)
    with pytest.raises(UnitFailed, match="preflight ended with exit code 1; nothing was started"):
        recipe(config, start=crashed)
    other = _config(tmp_path, 'data.train=["else"]')
    again = Children(other)
    recipe(other, start=again)
    assert again.started == ORDER
    third = Children(other, preflight=2)
    recipe(other, start=third)
    assert third.preflights == [], "all is over"


def test_the_preflight_can_be_left_out(tmp_path: Path) -> None:
    config = _config(tmp_path)
    children = Children(config, preflight=2)
    recipe(config, start=children, has_preflight=False)
    assert (children.started, children.preflights) == (ORDER, [])


def test_without_conversations_there_is_no_sft(tmp_path: Path) -> None:
    units = [str(unit) for unit in Run(_config(tmp_path, "sft.data=[]")).units()]
    assert units[:2] == ["prepare", "grpo rl1"]


@pytest.mark.parametrize("fails", ORDER)
def test_what_is_over_never_runs_again(tmp_path: Path, fails: str) -> None:
    config = _config(tmp_path)
    children = Children(config, fails)
    with pytest.raises(UnitFailed, match=f"{fails} ended with exit code 1"):
        recipe(config, start=children)
    again = Children(config)
    recipe(config, start=again)
    assert children.started + again.started[1:] == ORDER
    assert again.started[0] == fails


def test_each_training_starts_from_the_one_before(tmp_path: Path) -> None:
    run = Run(_config(tmp_path))
    for unit in run.units():
        run.finish(unit, {"model": str(unit)})
    assert [run.trained(name, before=True)["model"] for name in ("sft", "rl1", "rl2")] == ["prepare", "sft", "grpo rl1"]
    with pytest.raises(ConfigError, match="stage 'rl3': did you mean rl"):
        run.trained("rl3")


def test_a_unit_out_of_turn_says_what_comes_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`rstar-train sft` comes first, or `rstar-train recipe` for all"):
        Run(_config(tmp_path)).trained("rl1", before=True)


def test_a_stage_trains_on_its_own_problems_or_the_run_s(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run = Run(config)
    assert run.problems(config.stage("rl1")) == run.folder / "data/train.jsonl"
    assert run.problems(config.stage("rl2")) == run.folder / "stages/rl2/problems.jsonl"
    config = _config(tmp_path, "stages.rl2.drop_solved=0")
    assert run.problems(config.stage("rl2")) == run.folder / "data/rl2.jsonl"


def test_training_is_launched_and_the_rest_is_not(tmp_path: Path) -> None:
    config = _config(tmp_path, 'hardware.launch=["torchrun", "--nproc-per-node=8"]')
    folder = str(tmp_path / "run")
    assert argv(Unit("eval", "rl1"), config) == [sys.executable, "-m", "trainer", "eval", folder, "--stage", "rl1", NO]
    expected = ["torchrun", "--nproc-per-node=8", "-m", "trainer", "grpo", folder, "--stage", "rl1", NO]
    assert argv(Unit("grpo", "rl1"), config) == expected


def test_a_folder_keeps_its_settings(tmp_path: Path) -> None:
    config = _config(tmp_path)
    recipe(config, start=Children(config))
    other = _config(tmp_path, "stages.rl1.steps=4", 'data.train=["else"]')
    with pytest.raises(RecordError, match=r"other settings \(data\.train, stages\.rl1\.steps\)"):
        recipe(other, start=Children(other))
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = _config(tmp_path, f"run_dir={tmp_path / 'moved'}", 'sandbox.endpoints=["http://elsewhere"]')
    children = Children(moved)
    recipe(moved, start=children)
    assert children.started == []
    assert load(tmp_path / "moved", {}) == moved


def test_a_folder_from_before_a_setting_came_goes_on(tmp_path: Path) -> None:
    config = _config(tmp_path)
    recipe(config, start=Children(config))
    written = Run(config).record.read_config()
    assert written
    del written["sft"]["warmup"], written["stages"]["rl1"]["epsilon_high"]
    write_json(tmp_path / "run/config.json", {"layout_version": LAYOUT_VERSION, "config": written})
    children = Children(config)
    recipe(config, start=children)
    assert children.started == []
    other = _config(tmp_path, "sft.warmup=0.5")
    with pytest.raises(RecordError, match=r"other settings \(sft\.warmup\)"):
        recipe(other, start=Children(other))


def test_only_the_last_checkpoint_stays(tmp_path: Path) -> None:
    run = Run(_config(tmp_path))

    def trained(name: str) -> list[str]:
        for step in (3, 6):
            (run.stage(name) / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        unit = Unit("sft" if name == "sft" else "grpo", name)
        run.finish(unit, {"checkpoint": f"stages/{name}/checkpoints/checkpoint-6"} if name != "sft" else {})
        run.finish(Unit("eval", name), {"scores": {}})
        return sorted(
            str(path.relative_to(run.folder / "stages")) for path in run.folder.glob("stages/*/checkpoints/*")
        )

    assert trained("sft") == [], "no stage takes the optimiser of SFT"
    assert trained("rl1") == ["rl1/checkpoints/checkpoint-6"]
    assert trained("rl2") == ["rl2/checkpoints/checkpoint-6"]


def test_a_second_recipe_waits_for_the_first(tmp_path: Path) -> None:
    config = _config(tmp_path)
    said: list[str] = []
    is_inside, may_go = threading.Event(), threading.Event()
    children = Children(config)

    def first(unit: Unit, command: Sequence[str], lock: int) -> int:
        is_inside.set()
        assert may_go.wait(120)
        return children(unit, command, lock)

    def say(text: str) -> None:
        said.append(text)
        may_go.set()

    second = Children(config)
    thread = threading.Thread(target=recipe, args=(config,), kwargs={"start": first})
    thread.start()
    assert is_inside.wait(120)
    recipe(config, start=second, say=say)
    thread.join()
    assert "another recipe works here" in said[0]
    assert (children.started, second.started) == (ORDER, [])


PARENT = """
import os, signal, sys
from trainer.recipe.runner import Unit, start_child
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands are deaf to it
child = "import os, sys, time; os.write(1, b'up'); time.sleep(600)"
start_child(Unit("prepare"), [sys.executable, "-c", child], os.open(os.devnull, os.O_RDONLY))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_child_ends_with_the_recipe(how: signal.Signals) -> None:
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=write, stderr=subprocess.DEVNULL) as parent:
        os.close(write)
        assert os.read(read, 2) == b"up"
        os.kill(parent.pid, how)
        assert os.read(read, 1) == b"", "all that held the pipe have ended"
    os.close(read)


def test_a_child_does_not_see_settings_in_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.recipe.runner import start_child

    monkeypatch.setenv("RSTAR_TRAIN_SEED", "3")
    code = f"import json, os; json.dump(sorted(os.environ), open({str(tmp_path / 'seen.json')!r}, 'w'))"
    with (tmp_path / "lock").open("w") as lock:
        assert start_child(Unit("prepare"), [sys.executable, "-c", code], lock.fileno()) == 0
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert "PATH" in seen
    assert "RSTAR_TRAIN_SEED" not in seen


def test_a_run_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=r"run_dir=.*run: expected a folder .* File exists"):
        recipe(_config(tmp_path))
