"""Texts and episodes that are hostile to the pages and tables of `rstar-train show`, and its command line."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

from tests.trainer.run_folders import STAGE_STEPS, episode
from trainer import cli
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus
from trainer.runs.run_folder import RunFolder

FIRST_RL_STEP, LAST_STEP = STAGE_STEPS["sft"] + 1, sum(STAGE_STEPS.values())
HOSTILE_TEXTS = [
    "<img src=x onerror=hacked=1>", "</script><script>hacked=1</script>", "<svg onload=hacked=1>", "__proto__",
    "'\"`${hacked=1}", "constructor", "\u202eright to left", "javascript:hacked=1", "\ud800 lone", "\x1b[31mred\x07",
    "<!--<script>", "{{policy}}{{data}}", "\u2028 line", "x" * 3000,
]  # fmt: skip
"""Markup and scripts (each sets `hacked` if it runs), names of JavaScript's own properties, control characters,
characters that change the direction of writing, a lone surrogate, placeholders of the template, a very long word."""


def show_arguments(*args: str) -> argparse.Namespace:
    return cli._parser().parse_args(["show", *args])


def all_episodes(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for step in folder.episode_steps() for row in folder.read_episodes(step)]


def hostile_episode(text: str) -> Episode:
    """Return an episode with `text` wherever a model or a data set may write."""
    call = ToolCall(text, {"code": text, "input": text}, ToolCallStatus.ERROR, text, is_truncated=True)
    harmless = episode(random.Random(1), problem_id="p", sample=0, skill=1.0)
    turn_text = f"<reason>{text}<tool_call>{text}</tool_call>{text}"
    turn = replace(harmless.turns[0], text=turn_text, tool_calls=(call,), engine=text)
    return replace(harmless, problem=Problem(text, text, text, text), turns=(turn,), answer=text, error=text)
