"""Generated problems for the tiny model, and deliberately noisy conversations that teach it the tool.

A problem is a calculation in words, with one or two steps. Its numbers are too long for the model to calculate itself;
a Python call solves it. The conversations contain faults on purpose: broken calls that are tried again, wrong
operators, doubled answers. After SFT the model makes these faults at about the rates below, and RL can remove all of
them. The faults depend on a seed and not on the problem. So the model can learn to avoid them only from the reward.

Invariants:
- Equal arguments give equal problems and equal conversations.
- The hash of a problem's text decides whether the problem is for training or held out. Seeds and counts do not matter.
- Tool responses are those of the sandbox: computed values, and Python's own error messages.
"""

from __future__ import annotations

import json
import operator
import random
import re
import traceback
from collections.abc import Callable
from hashlib import blake2b

from trainer.episodes.episode import Problem
from trainer.episodes.turn_parser import PYTHON_TOOL_NAME, MalformedCall, parse_turn

Messages = list[dict[str, str]]

SYSTEM_PROMPT = "Use Python."
"""The system message. It is short, since every token of a prompt costs time."""
SOURCE = "tiny"
HELD_OUT_MODULUS = 8
"""One in this number of texts is held out for evaluation."""
BROKEN_CALL_RATE = 0.48
"""The share of calls that are broken. After SFT, this is about the model's tool-error ratio."""
WRONG_OPERATOR_RATE = 0.25
"""The share of conversations with an operator that is not the problem's."""
DOUBLE_ANSWER_RATE = 0.21
"""The share of conversations that give the answer twice."""
MAX_BROKEN_CALLS = 3
"""The largest number of broken calls in a conversation."""

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_FIRST_STEP = {
    "+": ("Add {a} and {b}", "Take {a} plus {b}"),
    "-": ("Subtract {b} from {a}", "Take {a} minus {b}"),
    "*": ("Multiply {a} by {b}", "Take {a} times {b}"),
    "//": ("Find how often {b} fits into {a}", "Take {a} over {b}, rounded down"),
    "%": ("Find what {a} leaves when divided by {b}", "Take {a} modulo {b}"),
}
_SECOND_STEP = {"+": ", then add {c}", "-": ", then subtract {c}", "*": ", then multiply by {c}"}
_FAULTS: tuple[Callable[[str], str], ...] = (
    lambda code: code[:-1],
    lambda code: code + ")",
    lambda code: re.sub(r"\d+\)$", ")", code),
)
"""Faults that make code invalid: a bracket too few, a bracket too many, a number left out."""

Calculation = tuple[int, list[tuple[str, int]]]
"""A start value, and the operations on it in order."""


def generate(n: int, seed: int, *, held_out: bool = False) -> list[Problem]:
    """Return `n` different problems with integer answers. Held-out ones share no text with training problems."""
    return [
        Problem(f"{SOURCE}-{text_digest(text):016x}", text, str(_value(calculation)), SOURCE)
        for text, calculation in _calculations(n, seed, held_out).items()
    ]


def conversations(n: int, seed: int, *, fault_seed: int) -> list[Messages]:
    """Return a conversation for each of `generate(n, seed)`, from the problem to the boxed answer.

    `fault_seed` chooses the faults of the conversations (module docstring).
    """
    rng = random.Random(f"traces {fault_seed}")
    return [
        _conversation(text, calculation, rng) for text, calculation in _calculations(n, seed, held_out=False).items()
    ]


def _calculations(n: int, seed: int, held_out: bool) -> dict[str, Calculation]:
    """Return `n` texts with the calculations that they ask for."""
    rng = random.Random(f"problems {seed} {held_out}")
    calculations: dict[str, Calculation] = {}
    while len(calculations) < n:
        text, calculation = _problem(rng)
        if is_held_out(text) == held_out:
            calculations.setdefault(text, calculation)
    return calculations


def text_digest(text: str) -> int:
    """Return a number that names a problem, and decides whether it is held out."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def is_held_out(text: str) -> bool:
    """Return whether the problem with this text is for evaluation only."""
    return text_digest(text) % HELD_OUT_MODULUS == 0


def _problem(rng: random.Random) -> tuple[str, Calculation]:
    first = rng.choice(list(_FIRST_STEP))
    phrase, a, b = rng.choice(_FIRST_STEP[first]), rng.randint(100, 999), rng.randint(11, 99)
    text, operations = phrase.format(a=a, b=b), [(first, b)]
    if rng.random() < 0.5:
        second, c = rng.choice(list(_SECOND_STEP)), rng.randint(2, 99)
        text, operations = text + _SECOND_STEP[second].format(c=c), [*operations, (second, c)]
    return f"{text}.", (a, operations)


def _value(calculation: Calculation) -> int:
    value, operations = calculation
    for sign, number in operations:
        value = _OPERATORS[sign](value, number)
    return value


def _code(calculation: Calculation) -> str:
    """Return code such as `print((347*29)+12)`. The brackets keep the order if an operator is replaced."""
    start, ((sign, number), *rest) = calculation
    code = f"{start}{sign}{number}"
    for next_sign, next_number in rest:
        code = f"({code}){next_sign}{next_number}"
    return f"print({code})"


def _conversation(text: str, calculation: Calculation, rng: random.Random) -> Messages:
    if rng.random() < WRONG_OPERATOR_RATE:
        operations = calculation[1]
        index = rng.randrange(len(operations))
        sign, number = operations[index]
        operations[index] = (rng.choice([other for other in _OPERATORS if other != sign]), number)
    messages = [{"role": "user", "content": text}]
    thought = "I let Python do it."
    # Each broken call adds two messages to the first one.
    while len(messages) < 2 * MAX_BROKEN_CALLS and rng.random() < BROKEN_CALL_RATE:
        messages += _broken_call(thought, _code(calculation), rng)
        thought = "That failed. Again."
    value = str(_value(calculation))
    messages += [assistant_message(thought, _call(_code(calculation))), {"role": "tool", "content": value}]
    answer = f"\n<answer>\n\\boxed{{{value}}}\n</answer>"
    messages.append(
        assistant_message("Python says so.", answer.lstrip() + answer * (rng.random() < DOUBLE_ANSWER_RATE))
    )
    return messages


def _broken_call(thought: str, code: str, rng: random.Random) -> Messages:
    """Return a call with invalid Python or invalid JSON, and its response."""
    if fault := rng.choice((*_FAULTS, None)):
        call, response = _call(fault(code)), _syntax_error(fault(code))
    else:
        call = _call(code).replace("}}", "}")
        (malformed,) = parse_turn(call).tool_calls
        assert isinstance(malformed, MalformedCall)
        response = malformed.response
    return [assistant_message(thought, call), {"role": "tool", "content": response}]


def _syntax_error(code: str) -> str:
    try:
        compile(code, "main.py", "exec")
    except SyntaxError as error:
        return "".join(traceback.format_exception_only(error)).rstrip("\n")
    raise AssertionError(f"{code!r} is valid")


def assistant_message(thought: str, text: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<reason>{thought}</reason>\n{text}"}


def _call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': PYTHON_TOOL_NAME, 'arguments': {'code': code}})}\n</tool_call>"
