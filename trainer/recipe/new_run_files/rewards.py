"""A reward of your own. `reward.function = "rewards:score"` in run.toml turns it on.

`problem` is a row of your data: `text`, `answer`, `options`. `response` is the text of the model's turns. Return a
finite number: a larger one is better. docs/environments.md describes functions for whole groups, time limits and
failures.
"""

from __future__ import annotations

from trainer.episodes.episode import Problem
from trainer.episodes.turn_parser import boxed_answer

MAX_BONUS = 0.1
BONUS_CHARS = 1000


def score(problem: Problem, response: str) -> float:
    """Return 1 for the right answer, with up to `MAX_BONUS` more for a response of fewer than `BONUS_CHARS`."""
    if boxed_answer(response) != problem.answer:
        return 0.0
    return 1.0 + MAX_BONUS * max(0.0, 1 - len(response) / BONUS_CHARS)
