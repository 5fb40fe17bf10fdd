"""Recipes with the sandbox: the tiny one, killed and resumed, and a pretrained model that learns the Python tool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from bench.gpu_parts.__main__ import last_lines
from bench.gpu_parts.check import Checks, Finding, Settings, Skipped
from trainer.config import RunConfig
from trainer.config_loading import load_config
from trainer.environments.connection import open_sandbox
from trainer.json_files import read_json
from trainer.recipe.phases import Phase, RecipeRun, TrainResult
from trainer.recipe.runner import NO_PREFLIGHT
from trainer.rollout.loop_thread import LoopThread
from trainer.training.context import latest_checkpoint

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.toml"
STAGE = "rl1"
POLL_S = 0.1
PARITY = "reward.function=bench.gpu_parts.recipe:parity"
"""The setting of a reward that differs within most groups, so that an untrained model has something to learn."""
SCORES = ("accuracy", "tool_error_ratio", "one_answer")


def checks(settings: Settings) -> Checks:
    return {
        "tiny recipe, resumed after kill -9": partial(_tiny, settings),
        "pretrained model with the Python tool": partial(_pretrained, settings),
    }


def parity(response: str) -> float:
    """Return a reward that needs no skill."""
    return float(len(response) % 2)


def _tiny(settings: Settings) -> Finding:
    conversations, steps, problems = settings.choose((8000, 6, 128), (32, 3, 8))
    config = recipe_config(
        settings, "tiny", steps, f"sft.data=generated:{conversations}", f"eval.data=generated:{problems}",
        *settings.choose((), (PARITY,)),
    )  # fmt: skip
    if settings.device == "cpu":
        small = {"problems_per_step": 2, "samples_per_problem": 4, "kept_per_problem": 2, "max_response_tokens": 128}
        config = replace(config, stages={STAGE: replace(config.stages[STAGE], **small)})
    with sandboxed(settings, config) as config:
        run = RecipeRun(config)
        killed_at = _kill_after_checkpoint(config)
        before = {row["step"]: row for row in run.run_folder.read_metrics()}
        sft = run.result(Phase("sft", "sft"))
        run_recipe(config)
    rows = list(run.run_folder.read_metrics())
    losses = [row["loss"] for row in rows if row["stage"] == STAGE]
    has_resumed = run.result(Phase("sft", "sft")) == sft and all(
        row == before[row["step"]] for row in rows if row["step"] <= killed_at
    )
    finding = {"killed_after_step": killed_at, "is_resumed": has_resumed, **_scores(run)}
    holds = has_resumed and any(losses) and [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {
        "holds": holds and (settings.device == "cpu" or finding["rl1_accuracy"] > finding["sft_accuracy"]),
        **finding,
    }


def _pretrained(settings: Settings) -> Finding:
    """SFT on conversations with the tool, then a stage of RL, of the model in the folder `settings.pretrained`."""
    if not settings.pretrained:
        raise Skipped("no model: --pretrained DIR names the folder of one")
    conversations, steps, problems = settings.choose((2000, 4, 64), (16, 1, 4))
    config = recipe_config(
        settings, "pretrained", steps, f"model.path={settings.pretrained}", f"sft.data=generated:{conversations}",
        f"eval.data=generated:{problems}", "sft.epochs=1", "sft.learning_rate=2e-4", "rl.learning_rate=1e-5",
        f"model.dtype={settings.choose('bfloat16', 'float32')}", "sft.micro_batch_size=4",
        "rl.problems_per_step=4", "rl.samples_per_problem=8", "rl.kept_per_problem=4",
        "engines.max_model_len=1024", "sft.max_conversation_tokens=1024",
    )  # fmt: skip
    with sandboxed(settings, config) as config:
        run_recipe(config)
    finding = _scores(RecipeRun(config))
    return {"holds": settings.device == "cpu" or finding["rl1_accuracy"] >= finding["sft_accuracy"], **finding}


def recipe_config(settings: Settings, name: str, steps: int, *changes: str) -> RunConfig:
    """Return the tiny recipe with its first RL stage alone, which saves a checkpoint after each step."""
    gpus = int(settings.device == "cuda")
    config = load_config(
        CONFIG, {}, [f"run_dir={settings.path / name}", f"hardware.gpus_per_node={gpus}", "rl.save_steps=1", *changes]
    )
    return replace(config, stages={STAGE: replace(config.stages[STAGE], steps=steps)})


@contextmanager
def sandboxed(settings: Settings, config: RunConfig) -> Iterator[RunConfig]:
    """Start a sandbox whose calls run in `settings.python`, and yield settings that use it."""
    arguments = ["--python", settings.python or sys.executable, "--isolation", settings.isolation]
    with LoopThread() as loop_thread:
        sandbox = loop_thread.enter(open_sandbox("local", arguments=arguments))
        yield replace(config, sandbox=replace(config.sandbox, endpoints=sandbox.endpoints))


def run_recipe(config: RunConfig) -> None:
    """Run or continue a recipe. Raises `RuntimeError` with the end of its output if it fails."""
    with _started(config) as (recipe, log):
        if exit_code := recipe.wait():
            raise RuntimeError(f"the recipe ended with exit code {exit_code}:\n{last_lines(log.read_text())}")


def _kill_after_checkpoint(config: RunConfig) -> int:
    """Start a recipe, and kill all its processes after the first checkpoint of the RL stage. Return the number of
    training steps in the newest checkpoint."""
    run = RecipeRun(config)
    with _started(config) as (recipe, log):
        while (checkpoint := latest_checkpoint(run.stage_dir(STAGE) / "checkpoints")) is None:
            if recipe.poll() is not None:
                raise RuntimeError(f"the recipe ended before its first checkpoint:\n{last_lines(log.read_text())}")
            time.sleep(POLL_S)
        os.killpg(recipe.pid, signal.SIGKILL)
    sft = run.result(Phase("sft", "sft"))
    assert isinstance(sft, TrainResult)
    checkpoint = latest_checkpoint(run.stage_dir(STAGE) / "checkpoints") or checkpoint
    return sft.step + int(str((read_json(checkpoint / "trainer_state.json") or {})["global_step"]))


@contextmanager
def _started(config: RunConfig) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start `rstar-train recipe` in a process group of its own, which is killed at the end of the block."""
    run_dir = Path(config.run_dir)
    settings, log = run_dir.with_name(f"{run_dir.name}.json"), run_dir.with_name(f"{run_dir.name}.log")
    settings.write_text(json.dumps(asdict(config)))
    command = [sys.executable, "-m", "trainer", "recipe", str(settings), NO_PREFLIGHT]
    with log.open("ab") as output:
        recipe = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            yield recipe, log
        finally:
            if recipe.poll() is None:
                os.killpg(recipe.pid, signal.SIGKILL)
                recipe.wait()


def _scores(run: RecipeRun) -> Finding:
    """Return the scores after SFT and after the RL stage."""
    return {f"{row['name']}_{score}": row[score] for row in run.summary()["stages"] for score in SCORES}
