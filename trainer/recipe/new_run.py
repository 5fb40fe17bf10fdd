"""Writes the folder of a new run: `rstar-train init FOLDER --kind math|code|agent`.

    run.toml             the settings, each with its description and what to change for another model
    train.jsonl          problems to train on
    eval.jsonl           other problems to evaluate on
    sft.jsonl            agent only: conversations that teach the tool
    rewards.py           math only: a reward function, which run.toml names in a comment
    my_environment.py    agent only: an environment with a tool of its own

The run learns on two CPU cores within minutes, with a generated model. Descriptions of settings are the comments in
`trainer.config`. Only settings are written whose value is not the default, or that a first run often changes.

Invariant: an existing file is never changed. The folder may exist, but must have none of the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from textwrap import wrap
from typing import Any

from trainer.config import TINY_MODEL, ConfigError, RunConfig, StageConfig
from trainer.data.synthetic import SYSTEM_PROMPT, Messages
from trainer.json_files import write_rows
from trainer.recipe import new_run_files
from trainer.recipe.new_run_data import SEED, Row, agent_conversations, agent_rows, code_rows, math_rows
from trainer.setting_comments import setting_comments

CONFIG_FILE, TRAIN_FILE, EVAL_FILE, SFT_FILE = "run.toml", "train.jsonl", "eval.jsonl", "sft.jsonl"
REWARDS_FILE, ENVIRONMENT_FILE = "rewards.py", "my_environment.py"
TRAIN_PROBLEMS, EVAL_PROBLEMS, AGENT_CONVERSATIONS = 512, 128, 6000
STAGE = "rl1"
COMMENT_WIDTH = 100
Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between the kinds of runs."""

    title: str
    settings: Tables
    rows: Callable[[int, bool], list[Row]]
    """Returns that many problems as rows; held-out ones if the second argument is true."""
    examples: Tables = field(default_factory=dict)
    """Settings that are written as comments."""
    modules: Sequence[str] = ()
    """The files of `trainer.recipe.new_run_files` that are copied."""
    conversations: Callable[[int], list[Messages]] | None = None
    """Returns that many conversations for SFT, if they are written to a file."""


_SHARED: Tables = {
    "": {"seed": SEED, "run_dir": "run"},
    "model": {"path": TINY_MODEL, "dtype": "float32", "system_prompt": SYSTEM_PROMPT},
    "engines": {"kind": "local", "max_num_seqs": 64},
    "data": {"train": [TRAIN_FILE]},
    "sft": {
        "epochs": 1.0,
        "learning_rate": 4e-3,
        "batch_size": 16,
        "micro_batch_size": 16,
        "save_steps": 250,
    },
    f"stages.{STAGE}": {
        "steps": 20,
        "problems_per_step": 16,
        "samples_per_problem": 16,
        "kept_per_problem": 8,
        "learning_rate": 5e-4,
        "warmup_steps": 2,
        "micro_batch_tokens": 8192,
        "save_steps": 5,
    },
    "eval": {"data": [EVAL_FILE], "samples_per_problem": 4},
    "tracking": {"trackers": []},
}
_CHANGES = {
    "run_dir": "another name for each run; the same command continues a run that was stopped",
    "model.path": 'a folder, or a hub name such as "Qwen/Qwen2.5-1.5B-Instruct"',
    "model.dtype": '"bfloat16" on a GPU',
    "model.system_prompt": "delete this line, so that the model reads the instructions and the tools",
    "engines.kind": '"vllm" on a GPU, with gpus_per_node = 1 in a table [hardware] (docs/training.md#vllm)',
    "engines.max_model_len": "prompt and longest response together, such as 8192",
    "data.train": 'your rows, such as {"prompt": "What is 2 + 3?", "answer": "5"}',
    "sft.data": "your conversations (docs/training.md#sft-data); delete [sft] if the model knows the tool format",
    "sft.learning_rate": "about 1e-5",
    f"stages.{STAGE}.steps": "100 or more",
    f"stages.{STAGE}.learning_rate": "about 1e-6",
    f"stages.{STAGE}.max_response_tokens": "2048 or more, with micro_batch_tokens above it",
    "eval.data": "problems that are not in data.train; rows that share 8 words with them are not trained on",
    "tracking.trackers": '"tensorboard", "wandb" or "trackio"',
}
"""What to write instead for a run of one's own."""


def _sizes(max_model_len: int, sft_data: str, max_response_tokens: int, max_turns: int) -> Tables:
    limits = {"max_response_tokens": max_response_tokens, "max_turns": max_turns}
    return {
        "engines": {"max_model_len": max_model_len},
        "sft": {"data": [sft_data], "max_conversation_tokens": max_model_len},
        f"stages.{STAGE}": limits,
        "eval": limits,
    }


KINDS = {
    "math": _Kind(
        "questions with answers, and Python as the tool",
        _sizes(640, "generated:16000", 384, 4),
        math_rows,
        examples={"reward": {"function": "rewards:score"}},
        modules=[REWARDS_FILE],
    ),
    "code": _Kind(
        "programs to write; the reward is whether a program passes the tests of its problem",
        {**_sizes(384, "generated-programs:12000", 128, 1), "sandbox": {"timeout_s": 2.0}},
        code_rows,
    ),
    "agent": _Kind(
        "questions for an environment with a tool of its own",
        {**_sizes(640, SFT_FILE, 384, 4), "model": {"system_prompt": "Use the tool."}},
        agent_rows,
        modules=[ENVIRONMENT_FILE],
        conversations=agent_conversations,
    ),
}


def write_new_run(folder: Path, kind_name: str) -> list[Path]:
    """Write the files of a new run, and return their paths. Raises `ConfigError` if one of them exists, or the folder
    cannot be written."""
    kind = KINDS[kind_name]
    names = [CONFIG_FILE, TRAIN_FILE, EVAL_FILE, *kind.modules, *([SFT_FILE] if kind.conversations else [])]
    paths = [folder / name for name in names]
    if existing := [path for path in paths if path.exists()]:
        raise ConfigError(
            f"{existing[0]} exists: expected a folder without it; nothing was written, name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(config_text(kind), encoding="utf-8")
        for module in kind.modules:
            source = Path(new_run_files.__path__[0], module)
            (folder / module).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        write_rows(folder / TRAIN_FILE, kind.rows(TRAIN_PROBLEMS, False))
        write_rows(folder / EVAL_FILE, kind.rows(EVAL_PROBLEMS, True))
        if kind.conversations:
            conversations = kind.conversations(AGENT_CONVERSATIONS)
            write_rows(folder / SFT_FILE, ({"messages": messages} for messages in conversations))
    except OSError as error:
        raise ConfigError(f"{folder}: expected a folder that can be written ({error.strerror})") from None
    return paths


def config_text(kind: _Kind) -> str:
    """Return the file of settings of a kind of run."""
    head = (
        f"A run of rstar-train: {kind.title}. In this folder, `PYTHONPATH=. rstar-train recipe {CONFIG_FILE}` runs it. "
        "A comment describes the setting below it. A line that begins with `Yours:` says what to write for a model "
        "and data of your own. docs/reference/trainer-settings.md has all settings."
    )
    parts = [_commented(head)]
    for table in dict.fromkeys([*_SHARED, *kind.settings, *kind.examples]):
        examples, lines = kind.examples.get(table, {}), [f"[{table}]"] if table else []
        values = {**_SHARED.get(table, {}), **kind.settings.get(table, {}), **examples}
        for name in (setting.name for setting in fields(_table_class(table)) if setting.name in values):
            lines += _setting_lines(table, name, values[name], is_example=name in examples)
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _setting_lines(table: str, name: str, value: Any, *, is_example: bool) -> Iterable[str]:
    if text := setting_comments(_table_class(table)).get(name):
        yield _commented(text[0].upper() + text[1:])
    if change := _CHANGES.get(f"{table}.{name}".lstrip(".")):
        yield _commented(f"Yours: {change}.")
    yield f"{'# ' if is_example else ''}{name} = {json.dumps(value)}"


def _table_class(table: str) -> Any:
    """Return the dataclass whose fields are the settings of a table."""
    if table.startswith("stages."):
        return StageConfig
    default: Any = RunConfig.__dataclass_fields__[table].default_factory if table else RunConfig
    return default


def _commented(text: str) -> str:
    return "\n".join(f"# {line}" for line in wrap(text, COMMENT_WIDTH, break_on_hyphens=False))
