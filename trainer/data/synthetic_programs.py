"""Generated programming problems for the tiny model, and deliberately noisy conversations that teach it to program.

A problem asks for a program of three lines. The program reads whole numbers from a line and selects some of them. It
prints their sum, their count, the largest or the smallest, after one more operation. The problem has tests as
`/v1/judge` takes them, for the environment `code`. The conversations contain faults on purpose: a wrong condition, a
wrong function, a missing bracket. After SFT the model makes these faults at about the rates below, and RL can remove
all of them.

Invariants:
- Equal arguments give equal problems and equal conversations.
- The hash of a problem's text decides whether the problem is for training or held out. Seeds and counts do not matter.
- A program with another condition or another function fails at least one of the problem's tests.
- A text has at most eight words. So a training problem shares eight consecutive words with an evaluation problem only
  if they have the same words (`trainer.data.decontamination`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.data.synthetic import Messages, assistant_message, is_held_out, text_digest
from trainer.episodes.episode import Problem
from trainer.episodes.turn_parser import program_prompt

SOURCE = "programs"
WRONG_CONDITION_RATE = 0.25
"""The share of conversations whose program selects the other numbers."""
WRONG_FUNCTION_RATE = 0.2
"""The share of conversations whose program applies another function to the selected numbers."""
SYNTAX_ERROR_RATE = 0.15
"""The share of conversations whose program lacks its last bracket."""
TESTS_PER_PROBLEM = 3
MIN_SELECTED = 2
"""In each test, the condition selects at least this number of numbers, and so does the opposite condition."""

_VERBS = {
    "sum": "Sum the {kind}inputs{condition}",
    "len": "Count the {kind}inputs{condition}",
    "max": "Take the largest {kind}input{condition}",
    "min": "Take the smallest {kind}input{condition}",
}
_FUNCTIONS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "len": len, "max": max, "min": min}
_OTHER_FUNCTION = {"sum": "len", "len": "sum", "max": "min", "min": "max"}
_CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "x % 2 == 0": lambda x, _: x % 2 == 0,
    "x % 2 == 1": lambda x, _: x % 2 == 1,
    "x > {bound}": lambda x, bound: x > bound,
    "x < {bound}": lambda x, bound: x < bound,
}
_CONDITION_TEXTS = {
    "x % 2 == 0": ("even ", ""),
    "x % 2 == 1": ("odd ", ""),
    "x > {bound}": ("", " above {bound}"),
    "x < {bound}": ("", " below {bound}"),
}
"""For each condition, the words before and after the word `input`."""
_OTHER_CONDITION = {
    "x % 2 == 0": "x % 2 == 1",
    "x % 2 == 1": "x % 2 == 0",
    "x > {bound}": "x < {bound}",
    "x < {bound}": "x > {bound}",
}
_OPERATORS = {"+": "plus", "-": "minus", "*": "times"}


@dataclass(frozen=True, slots=True)
class _Task:
    function: str
    condition: str
    bound: int
    operator: str
    operand: int

    def text(self) -> str:
        kind, condition = _CONDITION_TEXTS[self.condition]
        verb = _VERBS[self.function].format(kind=kind, condition=condition.format(bound=self.bound))
        return f"{verb}, {_OPERATORS[self.operator]} {self.operand}."

    def program(self) -> str:
        condition = self.condition.format(bound=self.bound)
        return (
            "n = [int(x) for x in input().split()]\n"
            f"n = [x for x in n if {condition}]\n"
            f"print({self.function}(n) {self.operator} {self.operand})"
        )

    def output(self, numbers: Sequence[int]) -> int:
        """Return what the program prints for `numbers`, of which it must select at least one."""
        value = _FUNCTIONS[self.function]([x for x in numbers if self.selects(x)])
        return {"+": value + self.operand, "-": value - self.operand, "*": value * self.operand}[self.operator]

    def selects(self, number: int) -> bool:
        return _CONDITIONS[self.condition](number, self.bound)


def generate(n: int, seed: int, *, held_out: bool = False) -> list[Problem]:
    """Return `n` different problems with tests. Held-out ones share no text with training problems."""
    return [_problem(text, task) for text, task in _tasks(n, seed, held_out).items()]


def conversations(n: int, seed: int, *, fault_seed: int) -> list[Messages]:
    """Return a conversation for each of `generate(n, seed)`: the problem, and a turn with a program.

    `fault_seed` chooses the faults of the programs (module docstring).
    """
    rng = random.Random(f"programs {fault_seed}")
    return [_conversation(text, task, rng) for text, task in _tasks(n, seed, held_out=False).items()]


def _tasks(n: int, seed: int, held_out: bool) -> dict[str, _Task]:
    """Return `n` texts with the programs that they ask for."""
    rng = random.Random(f"programming problems {seed} {held_out}")
    tasks: dict[str, _Task] = {}
    while len(tasks) < n:
        task = _Task(
            rng.choice(list(_VERBS)),
            rng.choice(list(_CONDITIONS)),
            rng.randint(20, 80),
            rng.choice(list(_OPERATORS)),
            rng.randint(2, 99),
        )
        if is_held_out(text := task.text()) == held_out:
            tasks.setdefault(text, task)
    return tasks


def _problem(text: str, task: _Task) -> Problem:
    return Problem(
        f"{SOURCE}-{text_digest(text):016x}",
        text,
        "",
        SOURCE,
        environment="code",
        options={"tests": _tests(text, task)},
    )


def _tests(text: str, task: _Task) -> list[dict[str, Any]]:
    """Return tests that no program with one of the faults passes. They depend only on the problem."""
    rng = random.Random(f"tests {text}")
    wrong = [
        replace(task, function=function, condition=condition)
        for function in (task.function, _OTHER_FUNCTION[task.function])
        for condition in (task.condition, _OTHER_CONDITION[task.condition])
    ][1:]
    while True:
        inputs = [_numbers(task, rng) for _ in range(TESTS_PER_PROBLEM)]
        expected = [task.output(numbers) for numbers in inputs]
        if all([other.output(numbers) for numbers in inputs] != expected for other in wrong):
            return [
                {"stdin": " ".join(map(str, numbers)) + "\n", "expected": f"{value}\n"}
                for numbers, value in zip(inputs, expected, strict=True)
            ]


def _numbers(task: _Task, rng: random.Random) -> list[int]:
    """Return the numbers of one test."""
    opposite = replace(task, condition=_OTHER_CONDITION[task.condition])
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(5, 7))]
        if all(sum(map(each.selects, numbers)) >= MIN_SELECTED for each in (task, opposite)):
            return numbers


def _conversation(text: str, task: _Task, rng: random.Random) -> Messages:
    if rng.random() < WRONG_CONDITION_RATE:
        task = replace(task, condition=_OTHER_CONDITION[task.condition])
    if rng.random() < WRONG_FUNCTION_RATE:
        task = replace(task, function=_OTHER_FUNCTION[task.function])
    program = task.program()
    if rng.random() < SYNTAX_ERROR_RATE:
        program = program[:-1]
    answer = f"<answer>\n```python\n{program}\n```\n</answer>"
    return [
        {"role": "user", "content": program_prompt(text)},
        assistant_message("A short program.", answer),
    ]
