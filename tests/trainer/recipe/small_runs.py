"""Runs of a model so small that a test trains it: their configuration, their folders, and the phases of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.config_loading import load_config
from trainer.recipe.phases import Phase, RecipeRun
from trainer.recipe.runner import RunPhase

SMALL = """
[model]
dtype = "float32"
system_prompt = "Use Python."
[engines]
max_num_seqs = 8
max_model_len = 96
[sft]
batch_size = 16
micro_batch_size = 16
epochs = 1
learning_rate = 1e-2
max_conversation_tokens = 96
[eval]
max_response_tokens = 24
max_turns = 2
[rl]
problems_per_step = 2
samples_per_problem = 8
kept_per_problem = 4
micro_batch_tokens = 4096
learning_rate = 1e-4
warmup_steps = 0
max_response_tokens = 24
max_turns = 2
save_steps = 1
[stages.rl1]
steps = 6
[stages.rl2]
steps = 1
difficulty_filter_samples = 3
"""
GAMES = "examples.games:GameEnvironment"
GUESSES = ("1", "2")
"""The answers that the model learns to give to every problem, equally often. The first is the correct one."""
OWN_REWARD = "tests.trainer.environments.test_own_reward:length"
"""The function returns the number of characters of a response."""
STEP_TIMEOUT_S = 600
"""Seconds for one training step on a machine that runs other tests, too."""


def small_config(folder: Path, *sets: str) -> RunConfig:
    """Return the configuration `SMALL` with the settings `sets`, of a run in `folder`/run."""
    file = folder / "run.toml"
    file.write_text(SMALL, encoding="utf-8")
    return load_config(file, {}, [f"run_dir={folder / 'run'}", *sets])


def guessing_config(folder: Path, endpoints: Sequence[str]) -> RunConfig:
    """Configure a run whose model guesses one of `GUESSES`, so that about half of each group is correct."""
    answers = [f"\n</reason>\n<answer>\n\\boxed{{{guess}}}\n</answer>" for guess in GUESSES]
    train_texts = [f"Number {number}?" for number in range(6)]
    conversations = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"<reason>{answer}"}]}
        for text in train_texts * 40
        for answer in answers
    ]
    write_lines(folder / "chats.jsonl", conversations)
    for source, texts in (("train", train_texts), ("fresh", ["Which one?", "What is it?"])):
        rows = [{"id": text, "text": text, "answer": GUESSES[0], "source": source} for text in texts]
        write_lines(folder / f"{source}.jsonl", rows)
    sources = {"sft.data": "chats", "data.train": "train", "eval.data": "fresh"}
    sets = [f'{key}=["{folder / name}.jsonl"]' for key, name in sources.items()]
    return small_config(folder, *sets, f"sandbox.endpoints={json.dumps(list(endpoints))}")


def write_lines(file: Path, rows: Sequence[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def in_this_process(last_stage: str) -> RunPhase:
    """Return a function that runs `prepare`, `sft` and the training of `last_stage` in this process, and skips the
    other phases."""

    from trainer.recipe.phase_work import PHASE_FUNCTIONS

    def run_phase(phase: Phase, command: Sequence[str], lock_fd: int) -> int:
        run = RecipeRun(load_config(Path(command[command.index(phase.command) + 1]), {}))
        if phase.command in ("prepare", "sft") or phase == Phase("grpo", last_stage):
            PHASE_FUNCTIONS[phase.command](run, phase)
        return 0

    return run_phase


def copy_run(tuned_run: RecipeRun, folder: Path, *sets: str) -> RecipeRun:
    """Return a copy of a run in `folder`, with the settings `sets`."""
    shutil.copytree(tuned_run.dir, folder)
    return RecipeRun(load_config(folder, {}, [f"run_dir={folder}", *sets]))
