"""The problems and conversations in the files that `rstar-train init` writes. Equal arguments give equal rows.

The second argument of the functions that return problems is true for held-out ones, which share no text with others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trainer.data import synthetic, synthetic_programs
from trainer.data.synthetic import Messages, assistant_message, is_held_out
from trainer.episodes.episode import Problem
from trainer.recipe.new_run_files.my_environment import EXPECTED_CALL, Warehouse

SEED = 0
GUESS_RATE = 0.25
"""The share of the agent's conversations in which the model guesses, and is wrong."""
MALFORMED_CALL_RATE = 0.3
"""The share of the agent's other conversations that begin with a wrong call."""
Row = Mapping[str, Any]


def math_rows(count: int, held_out: bool) -> list[Row]:
    """Return questions with answers, as short as a row may be."""
    return [{"prompt": each.text, "answer": each.answer} for each in synthetic.generate(count, SEED, held_out=held_out)]


def code_rows(count: int, held_out: bool) -> list[Row]:
    """Return programs to write, with tests."""
    return [_written(problem) for problem in synthetic_programs.generate(count, SEED, held_out=held_out)]


def agent_rows(count: int, held_out: bool) -> list[Row]:
    """Return questions for the environment `Warehouse`."""
    return [_written(problem) for problem in _agent_problems(count, "held out" if held_out else "train")]


def _written(problem: Problem) -> Row:
    """Return a problem as a row, without the fields that are empty by default."""
    required = ("id", "text", "answer", "source")
    return {name: value for name, value in asdict(problem).items() if value or name in required}


def _agent_problems(count: int, use: str) -> list[Problem]:
    """Return `count` problems with different texts. `use` chooses them: `held out`, or a name for other ones."""
    rng, problems = random.Random(f"warehouse {SEED} {use}"), dict[str, Problem]()
    while len(problems) < count:
        items = [str(number) for number in rng.sample(range(1000, 10_000), 3)]
        stock = {item: rng.randint(100, 999) for item in items}
        text = f"How many pieces of item {items[0]} are there?"
        if is_held_out(text) == (use == "held out"):
            name, options = f"warehouse-{items[0]}", {"stock": stock}
            problem = Problem(name, text, str(stock[items[0]]), "warehouse", "my_environment:Warehouse", options)
            problems.setdefault(text, problem)
    return list(problems.values())


def agent_conversations(count: int) -> list[Messages]:
    """Return conversations about other items, each with calls of the tool and an answer. Some have faults on purpose,
    which RL can remove."""
    rng = random.Random(f"warehouse conversations {SEED}")
    return [_agent_conversation(problem, rng) for problem in _agent_problems(count, "sft")]


def _agent_conversation(problem: Problem, rng: random.Random) -> Messages:
    item, *_ = problem.options["stock"]
    messages = [{"role": "user", "content": Warehouse.prompt(problem)}]
    if rng.random() < GUESS_RATE:
        return [*messages, _answer("I guess.", str(rng.randint(100, 999)))]
    if rng.random() < MALFORMED_CALL_RATE:
        messages += [
            assistant_message("I look.", _look_up(name=item)),
            {"role": "tool", "content": EXPECTED_CALL},
        ]
    messages += [
        assistant_message("I look.", _look_up(item=item)),
        {"role": "tool", "content": problem.answer},
    ]
    return [*messages, _answer("There it is.", problem.answer)]


def _answer(thought: str, number: str) -> dict[str, str]:
    return assistant_message(thought, f"<answer>\n\\boxed{{{number}}}\n</answer>")


def _look_up(**arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'look_up', 'arguments': arguments})}\n</tool_call>"
