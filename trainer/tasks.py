"""Generated problems for the tiny model, and deliberately noisy conversations that teach it the tool. Pure and seeded.

A problem is a sum in words, one or two steps deep, with numbers too long to do in the head: a Python call does it. The
conversations are what a first, careless teacher would leave behind: calls that are broken and tried again, wrong
operators, doubled answers. After SFT on them the model samples those faults at about their rates, all of them in the
reach of RL; the faults come from `seed`, not from the problem, so nothing but the reward tells right from wrong.

Invariants:
- All is a function of its arguments. Equal seeds give equal problems and equal conversations.
- A text is either for training or fresh, by a hash of itself: the two never overlap, whatever the seeds and counts.
- The tool's responses are what the sandbox would say: the values are computed, the errors are Python's own.
"""

from __future__ import annotations

import json
import operator
import random
import re
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b

from trainer.chat import TOOL_SCHEMA, Malformed, parse
from trainer.trajectory import Problem

Messages = list[dict[str, str]]

PREAMBLE = "Use Python."
"""The system message: a short one, since a tiny model pays for every token."""
SOURCE = "tiny"
FRESH_SHARE = 8
"""One text of so many is kept for evaluation."""
BROKEN = 0.48
"""How often a call of the conversations is broken: the tool-error ratio that they teach."""
WRONG = 0.25
"""How often a conversation's operator is not the problem's."""
DOUBLED = 0.21
"""How often the answer is given twice."""
MOST_BROKEN = 3

_TOOL = TOOL_SCHEMA["function"]["name"]  # type: ignore[index]
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_FIRST = {
    "+": ("Add {a} and {b}", "Take {a} plus {b}"),
    "-": ("Subtract {b} from {a}", "Take {a} minus {b}"),
    "*": ("Multiply {a} by {b}", "Take {a} times {b}"),
    "//": ("Find how often {b} fits into {a}", "Take {a} over {b}, rounded down"),
    "%": ("Find what {a} leaves when divided by {b}", "Take {a} modulo {b}"),
}
_THEN = {"+": ", then add {c}", "-": ", then subtract {c}", "*": ", then multiply by {c}"}
_BREAKS: tuple[Callable[[str], str], ...] = (
    lambda code: code[:-1],
    lambda code: code + ")",
    lambda code: re.sub(r"\d+\)$", ")", code),
)
"""A bracket too few, one too many, and a number left out: what makes a call bad Python."""


def generate(n: int, seed: int, *, fresh: bool = False) -> list[Problem]:
    """`n` different problems with integer answers; `fresh` ones share no text with those for training."""
    rng = random.Random(f"problems {seed} {fresh}")
    problems: dict[str, Problem] = {}
    while len(problems) < n:
        text, answer = _problem(rng)
        digest = blake2b(text.encode(), digest_size=8)
        if (int.from_bytes(digest.digest()) % FRESH_SHARE == 0) == fresh:
            problems.setdefault(text, Problem(f"{SOURCE}-{digest.hexdigest()}", text, answer, SOURCE))
    return list(problems.values())


def traces(problems: Sequence[Problem], seed: int) -> list[Messages]:
    """A conversation for each of `problems`, which must be of `generate`: from the problem to the boxed answer."""
    rng = random.Random(f"traces {seed}")
    return [_conversation(problem, rng) for problem in problems]


def _problem(rng: random.Random) -> tuple[str, str]:
    first = rng.choice(list(_FIRST))
    text = rng.choice(_FIRST[first]).format(a=rng.randint(100, 999), b=rng.randint(11, 99))
    if rng.random() < 0.5:
        text += rng.choice(list(_THEN.values())).format(c=rng.randint(2, 99))
    text += "."
    return text, str(_value(_steps(text)))


Steps = tuple[int, list[tuple[str, int]]]
"""A number, and what is done to it, in order."""


def _steps(text: str) -> Steps:
    """What `text` asks for. The inverse of the phrases."""
    for first, phrases in _FIRST.items():
        for phrase in phrases:
            if found := _pattern(phrase).match(text):
                steps = [(first, int(found["b"]))]
                for then, phrase_then in _THEN.items():
                    if after := _pattern(phrase_then).match(text, found.end()):
                        steps.append((then, int(after["c"])))
                return int(found["a"]), steps
    raise ValueError(f"expected a problem of trainer.tasks.generate, got {text!r:.100}")


@cache
def _pattern(phrase: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(phrase)))


def _value(steps: Steps) -> int:
    value, rest = steps
    for sign, number in rest:
        value = _OPERATORS[sign](value, number)
    return value


def _code(steps: Steps) -> str:
    """`print((347*29)+12)`: brackets around what comes first, so that signs can change without them."""
    start, rest = steps
    code = str(start)
    for sign, number in rest:
        code = f"({code}){sign}{number}" if code != str(start) else f"{code}{sign}{number}"
    return f"print({code})"


def _conversation(problem: Problem, rng: random.Random) -> Messages:
    start, rest = _steps(problem.text)
    if rng.random() < WRONG:
        at = rng.randrange(len(rest))
        rest[at] = (rng.choice([sign for sign in _OPERATORS if sign != rest[at][0]]), rest[at][1])
    steps = start, rest
    messages = [{"role": "user", "content": problem.text}]
    thought = "I let Python do it."
    while len(messages) < 2 * MOST_BROKEN and rng.random() < BROKEN:
        messages += _broken(thought, _code(steps), rng)
        thought = "That failed. Again."
    value = str(_value(steps))
    messages += [_says(thought, _call(_code(steps))), {"role": "tool", "content": value}]
    answer = f"\n<answer>\n\\boxed{{{value}}}\n</answer>"
    messages.append(_says("Python says so.", answer.lstrip() + answer * (rng.random() < DOUBLED)))
    return messages


def _broken(thought: str, code: str, rng: random.Random) -> Messages:
    """A call that fails, with what the tool says: bad Python, or bad JSON."""
    breaks = rng.choice((*_BREAKS, None))
    call = _call(breaks(code)) if breaks else _call(code).replace("}}", "}")
    match parse(call).calls:
        case (Malformed(response=said),):
            pass
        case _:
            said = _syntax_error(breaks(code) if breaks else code)
    return [_says(thought, call), {"role": "tool", "content": said}]


def _syntax_error(code: str) -> str:
    try:
        compile(code, "main.py", "exec")
    except SyntaxError as why:
        return "".join(traceback.format_exception_only(why)).rstrip("\n")
    raise AssertionError(f"{code!r} is not broken")


def _says(thought: str, what: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<reason>{thought}</reason>\n{what}"}


def _call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': _TOOL, 'arguments': {'code': code}})}\n</tool_call>"
