"""Tests of `rstar-train recipe`: the order of its phases, and how it resumes and ends.

A phase is one command of a recipe, which runs as a child process: prepare, sft, filter, grpo or eval. If the recipe is
killed, its child ends too. Only one recipe works on a run folder at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import ConfigError, RunConfig
from trainer.config_loading import load_config
from trainer.json_files import RecordError, write_json
from trainer.recipe.phases import EvalResult, FilterResult, Phase, PhaseResult, RecipeRun, TrainResult
from trainer.recipe.runner import NotReady, PhaseFailed, phase_command, run_recipe
from trainer.runs.run_folder import LAYOUT_VERSION

STAGES = """
[sft]
data = ["generated:8"]
[stages.rl1]
steps = 3
[stages.rl2]
steps = 2
difficulty_filter_samples = 8
data = ["generated:4"]
"""
NO_PREFLIGHT = "--no-preflight"
PHASES_IN_ORDER = ["prepare", "sft", "eval sft", "grpo rl1", "eval rl1", "filter rl2", "grpo rl2", "eval rl2"]
SCORES = {"accuracy": 0.5, "tool_error_ratio": 0.25, "one_answer": 0.75}
"""Three metrics of an evaluation. `one_answer` is the share of the episodes that give exactly one answer."""


def _config(directory: Path, *overrides: str) -> RunConfig:
    file = directory / "run.toml"
    file.write_text(STAGES, encoding="utf-8")
    return load_config(file, {}, [f"run_dir={directory / 'run'}", *overrides])


def fake_result(phase: Phase) -> PhaseResult:
    if phase.command == "eval":
        return EvalResult(SCORES)
    if phase.command == "filter":
        return FilterResult(problems=4, kept=3)
    return TrainResult(model=f"{phase.stage}/model", step=5, checkpoint=phase.stage)


class FakeChildren:
    """Runs no process. Each phase ends at once: the phase `failing` with exit code 1, and every other phase with a
    result that reports 2 seconds."""

    def __init__(self, config: RunConfig, failing: str = "", preflight_code: int = 0) -> None:
        self.run = RecipeRun(config)
        self.failing = failing
        self.started: list[str] = []
        self.preflight_code = preflight_code
        """Exit code of the preflight, which checks what the run needs before its first phase."""
        self.preflights: list[RunConfig] = []
        """The configuration of each preflight that has run."""

    def __call__(self, phase: Phase, command: Sequence[str], lock_fd: int) -> int:
        if phase.command == "preflight":
            self.preflights.append(load_config(Path(command[-1]), {}))
            return self.preflight_code
        self.started.append(str(phase))
        if str(phase) == self.failing:
            return 1
        self.run.write_result(phase, fake_result(phase))
        path = self.run.result_path(phase)
        write_json(path, {**json.loads(path.read_text()), "seconds": 2.0})
        return 0


def test_phases_run_in_order_and_the_summary_adds_their_seconds(tmp_path: Path) -> None:
    config = _config(tmp_path)
    children = FakeChildren(config)
    run = run_recipe(config, run_phase=children)
    assert children.started == PHASES_IN_ORDER
    expected = [{"name": name, **SCORES, "seconds": s} for name, s in (("sft", 4.0), ("rl1", 4.0), ("rl2", 6.0))]
    assert run.summary() == {"stages": expected}
    written = run.run_folder.read_summary()
    assert written is not None
    assert written["stages"] == expected


def test_nothing_starts_if_the_preflight_fails_and_the_settings_may_still_change(tmp_path: Path) -> None:
    config = _config(tmp_path)
    children = FakeChildren(config, preflight_code=2)
    with pytest.raises(NotReady, match="nothing was started; repair what is listed above, or start anyway with --no-"):
        run_recipe(config, run_phase=children)
    assert (children.started, children.preflights) == ([], [config])
    crashing = FakeChildren(config, preflight_code=1)
    with pytest.raises(PhaseFailed, match="preflight failed with exit code 1; nothing was started"):
        run_recipe(config, run_phase=crashing)
    other = _config(tmp_path, 'data.train=["else"]')
    working = FakeChildren(other)
    run_recipe(other, run_phase=working)
    assert working.started == PHASES_IN_ORDER
    finished = FakeChildren(other, preflight_code=2)
    run_recipe(other, run_phase=finished)
    assert finished.preflights == [], "a finished run needs no preflight"


def test_the_preflight_can_be_skipped(tmp_path: Path) -> None:
    config = _config(tmp_path)
    children = FakeChildren(config, preflight_code=2)
    run_recipe(config, run_phase=children, has_preflight=False)
    assert (children.started, children.preflights) == (PHASES_IN_ORDER, [])


def test_the_log_has_the_run_folder_each_phase_and_an_estimate_of_the_time_left(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run_dir = tmp_path / "run"
    lines: list[str] = []
    run_recipe(config, run_phase=FakeChildren(config), log=lines.append)
    assert lines[1] == f"recipe: writes to {run_dir}; `rstar-train show {run_dir}` shows the run at any time"
    assert [line.partition(" (")[0] for line in lines[2:]] == [
        f"[{i}/8] {phase}" for i, phase in enumerate(PHASES_IN_ORDER, 1)
    ]
    # The estimate assumes that each remaining phase takes as long as the last finished phase with the same command.
    # Without a finished phase for each of the remaining commands, the line has no estimate.
    estimates = [line.partition(" (")[2] for line in lines[2:]]
    assert estimates == ["", "", "", "", "", "", "about 4 s left)", "about 2 s left)"]


def test_an_interrupt_logs_how_to_continue(tmp_path: Path) -> None:
    config = _config(tmp_path)
    lines: list[str] = []

    def interrupt(phase: Phase, command: Sequence[str], lock_fd: int) -> int:
        if phase.command == "preflight":
            return 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(config, run_phase=interrupt, log=lines.append)
    assert lines[-1] == f"recipe: interrupted in prepare; `rstar-train recipe {tmp_path / 'run'}` continues there"
    assert load_config(tmp_path / "run", {}) == config, "the command in the log must need no other configuration"


def test_without_conversations_there_is_no_sft(tmp_path: Path) -> None:
    phases = [str(phase) for phase in RecipeRun(_config(tmp_path, "sft.data=[]")).phases()]
    assert phases[:2] == ["prepare", "grpo rl1"]


@pytest.mark.parametrize("failing", PHASES_IN_ORDER)
def test_a_finished_phase_never_runs_again(tmp_path: Path, failing: str) -> None:
    config = _config(tmp_path)
    children = FakeChildren(config, failing)
    with pytest.raises(PhaseFailed, match=f"{failing} failed with exit code 1; `rstar-train recipe .* continues there"):
        run_recipe(config, run_phase=children)
    second_children = FakeChildren(config)
    run_recipe(config, run_phase=second_children)
    assert second_children.started[0] == failing
    assert children.started + second_children.started[1:] == PHASES_IN_ORDER


def test_each_training_phase_starts_from_the_model_of_the_training_phase_before(tmp_path: Path) -> None:
    run = RecipeRun(_config(tmp_path))
    for phase in run.phases():
        result = fake_result(phase)
        run.write_result(phase, replace(result, model=str(phase)) if isinstance(result, TrainResult) else result)
    models = [run.trained_model(stage, of_previous_stage=True).model for stage in ("sft", "rl1", "rl2")]
    assert models == ["prepare", "sft", "grpo rl1"]
    with pytest.raises(ConfigError, match="stage 'rl3': did you mean rl"):
        run.trained_model("rl3")


def test_the_error_of_a_phase_that_runs_too_early_names_the_phase_to_run_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `rstar-train sft` first, or `rstar-train recipe` for all phases"):
        RecipeRun(_config(tmp_path)).trained_model("rl1", of_previous_stage=True)


def test_a_stage_without_problems_of_its_own_trains_on_those_of_the_run(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run = RecipeRun(config)
    assert run.problems_path(config.stage_config("rl1")) == run.dir / "data/train.jsonl"
    assert run.problems_path(config.stage_config("rl2")) == run.dir / "stages/rl2/problems.jsonl"
    config = _config(tmp_path, "stages.rl2.difficulty_filter_samples=0")
    assert run.problems_path(config.stage_config("rl2")) == run.dir / "data/rl2.jsonl"


def test_results_are_files_named_after_their_phase(tmp_path: Path) -> None:
    run = RecipeRun(_config(tmp_path))
    names = [str(run.result_path(phase).relative_to(run.dir / "stages")) for phase in run.phases()]
    assert names == [
        "initial/prepare.json",
        "sft/train.json",
        "sft/eval.json",
        "rl1/train.json",
        "rl1/eval.json",
        "rl2/filter.json",
        "rl2/train.json",
        "rl2/eval.json",
    ]


def test_the_launcher_starts_training_phases_only(tmp_path: Path) -> None:
    config = _config(tmp_path, 'hardware.launcher=["torchrun", "--nproc-per-node=1"]')
    arguments = [str(tmp_path / "run"), "--stage", "rl1", NO_PREFLIGHT]
    assert phase_command(Phase("eval", "rl1"), config) == [sys.executable, "-m", "trainer", "eval", *arguments]
    expected = ["torchrun", "--nproc-per-node=1", "-m", "trainer", "grpo", *arguments]
    assert phase_command(Phase("grpo", "rl1"), config) == expected


def test_a_run_folder_keeps_its_settings(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run_recipe(config, run_phase=FakeChildren(config))
    other = _config(tmp_path, "stages.rl1.steps=4", 'data.train=["else"]')
    with pytest.raises(RecordError, match=r"other settings \(data\.train, stages\.rl1\.steps\)"):
        run_recipe(other, run_phase=FakeChildren(other))
    (tmp_path / "run").rename(tmp_path / "moved")
    changed = ("stages.rl1.max_unavailable_share=0.5", "collect.deadline_s=7", 'sandbox.endpoints=["http://elsewhere"]')
    moved = _config(tmp_path, f"run_dir={tmp_path / 'moved'}", *changed)
    children = FakeChildren(moved)
    run_recipe(moved, run_phase=children)
    assert children.started == []
    assert load_config(tmp_path / "moved", {}) == moved


def test_a_run_folder_that_lacks_a_newer_setting_continues_with_the_default_of_the_setting(tmp_path: Path) -> None:
    config = _config(tmp_path)
    run_recipe(config, run_phase=FakeChildren(config))
    written = RecipeRun(config).run_folder.read_config()
    assert written
    del written["sft"]["warmup_ratio"], written["stages"]["rl1"]["max_grad_norm"]
    write_json(tmp_path / "run/config.json", {"layout_version": LAYOUT_VERSION, "config": written})
    children = FakeChildren(config)
    run_recipe(config, run_phase=children)
    assert children.started == []
    other = _config(tmp_path, "sft.warmup_ratio=0.5")
    with pytest.raises(RecordError, match=r"other settings \(sft\.warmup_ratio\)"):
        run_recipe(other, run_phase=FakeChildren(other))


def test_a_run_folder_of_an_older_layout_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    write_json(tmp_path / "run/config.json", {"layout_version": 1, "config": {}})
    with pytest.raises(RecordError, match=r"expected layout_version 2, got 1"):
        run_recipe(config, run_phase=FakeChildren(config))


def test_only_the_checkpoint_of_the_last_training_stays(tmp_path: Path) -> None:
    run = RecipeRun(_config(tmp_path))

    def checkpoints_after(stage: str) -> list[str]:
        for step in (3, 6):
            (run.stage_dir(stage) / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        checkpoint = "" if stage == "sft" else f"stages/{stage}/checkpoints/checkpoint-6"
        result = TrainResult("model", step=6, checkpoint=checkpoint)
        run.write_result(Phase("sft" if stage == "sft" else "grpo", stage), result)
        run.write_result(Phase("eval", stage), EvalResult())
        return sorted(str(path.relative_to(run.dir / "stages")) for path in run.dir.glob("stages/*/checkpoints/*"))

    assert checkpoints_after("sft") == [], "the checkpoint of SFT stays, and no RL stage uses its optimizer"
    assert checkpoints_after("rl1") == ["rl1/checkpoints/checkpoint-6"]
    assert checkpoints_after("rl2") == ["rl2/checkpoints/checkpoint-6"]


def test_keep_checkpoints_keeps_the_newest_checkpoints_of_each_training(tmp_path: Path) -> None:
    run = RecipeRun(_config(tmp_path, "storage.keep_checkpoints=2"))
    for stage in ("sft", "rl1"):
        for step in (3, 12, 6):
            (run.stage_dir(stage) / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
    run.write_result(Phase("grpo", "rl1"), TrainResult("m", step=12, checkpoint="stages/rl1/checkpoints/checkpoint-12"))
    assert sorted(path.name for path in run.dir.glob("stages/*/checkpoints/*")) == [
        *["checkpoint-12"] * 2, *["checkpoint-6"] * 2
    ]  # fmt: skip


def test_a_second_recipe_in_the_same_folder_waits_for_the_first(tmp_path: Path) -> None:
    config = _config(tmp_path)
    lines: list[str] = []
    has_started = threading.Event()
    second_is_waiting = threading.Event()
    children = FakeChildren(config)

    def run_slowly(phase: Phase, command: Sequence[str], lock_fd: int) -> int:
        has_started.set()
        assert second_is_waiting.wait(120)
        return children(phase, command, lock_fd)

    def log(text: str) -> None:
        lines.append(text)
        second_is_waiting.set()

    second = FakeChildren(config)
    thread = threading.Thread(target=run_recipe, args=(config,), kwargs={"run_phase": run_slowly})
    thread.start()
    assert has_started.wait(120)
    run_recipe(config, run_phase=second, log=log)
    thread.join()
    assert "another recipe works here" in lines[0]
    assert (children.started, second.started) == (PHASES_IN_ORDER, [])


PARENT = """
import os, signal, sys
from trainer.recipe.runner import Phase, run_child
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore SIGINT
child = "import os, sys, time; os.write(1, b'up'); time.sleep(600)"
run_child(Phase("prepare"), [sys.executable, "-c", child], os.open(os.devnull, os.O_RDONLY))
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_child_ends_with_the_recipe(sent: signal.Signals) -> None:
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=write, stderr=subprocess.DEVNULL) as parent:
        os.close(write)
        assert os.read(read, 2) == b"up"
        os.kill(parent.pid, sent)
        assert os.read(read, 1) == b"", "every process that held the pipe has ended"
    os.close(read)


def test_a_child_does_not_see_settings_in_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.recipe.runner import run_child

    monkeypatch.setenv("RSTAR_TRAIN_SEED", "3")
    names = tmp_path / "names.json"
    code = f"import json, os; json.dump(sorted(os.environ), open({str(names)!r}, 'w'))"
    with (tmp_path / "lock").open("w") as lock:
        assert run_child(Phase("prepare"), [sys.executable, "-c", code], lock.fileno()) == 0
    assert "PATH" in json.loads(names.read_text())
    assert "RSTAR_TRAIN_SEED" not in json.loads(names.read_text())


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=r"run_dir=.*run: expected a writable folder, got: File exists"):
        run_recipe(_config(tmp_path))
