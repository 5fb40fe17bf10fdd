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
from collections.abc import Callable
from hashlib import blake2b

from trainer.episodes.episode import Problem
from trainer.episodes.turn_parser import PYTHON_TOOL_NAME, MalformedCall, parse_turn

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
    return [
        Problem(f"{SOURCE}-{_digest(text):016x}", text, str(_value(steps)), SOURCE)
        for text, steps in _drawn(n, seed, fresh).items()
    ]


def traces(n: int, seed: int, *, faults: int) -> list[Messages]:
    """A conversation for each of `generate(n, seed)`, from the problem to the boxed answer; `faults` is a seed, too."""
    rng = random.Random(f"traces {faults}")
    return [_conversation(text, steps, rng) for text, steps in _drawn(n, seed, fresh=False).items()]


Steps = tuple[int, list[tuple[str, int]]]
"""A number, and what is done to it, in order."""


def _drawn(n: int, seed: int, fresh: bool) -> dict[str, Steps]:
    """Texts, and what each asks for."""
    rng = random.Random(f"problems {seed} {fresh}")
    drawn: dict[str, Steps] = {}
    while len(drawn) < n:
        text, steps = _problem(rng)
        if (_digest(text) % FRESH_SHARE == 0) == fresh:
            drawn.setdefault(text, steps)
    return drawn


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _problem(rng: random.Random) -> tuple[str, Steps]:
    first = rng.choice(list(_FIRST))
    phrase, a, b = rng.choice(_FIRST[first]), rng.randint(100, 999), rng.randint(11, 99)
    text, rest = phrase.format(a=a, b=b), [(first, b)]
    if rng.random() < 0.5:
        then, c = rng.choice(list(_THEN)), rng.randint(2, 99)
        text, rest = text + _THEN[then].format(c=c), [*rest, (then, c)]
    return f"{text}.", (a, rest)


def _value(steps: Steps) -> int:
    value, rest = steps
    for sign, number in rest:
        value = _OPERATORS[sign](value, number)
    return value


def _code(steps: Steps) -> str:
    """`print((347*29)+12)`: brackets around what comes first, so that signs can change without them."""
    start, ((sign, number), *rest) = steps
    code = f"{start}{sign}{number}"
    for then, after in rest:
        code = f"({code}){then}{after}"
    return f"print({code})"


def _conversation(text: str, steps: Steps, rng: random.Random) -> Messages:
    if rng.random() < WRONG:
        at = rng.randrange(len(steps[1]))
        sign, number = steps[1][at]
        steps[1][at] = (rng.choice([other for other in _OPERATORS if other != sign]), number)
    messages = [{"role": "user", "content": text}]
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
    if breaks := rng.choice((*_BREAKS, None)):
        call, said = _call(breaks(code)), _syntax_error(breaks(code))
    else:
        call = _call(code).replace("}}", "}")
        (bad,) = parse_turn(call).tool_calls
        assert isinstance(bad, MalformedCall)
        said = bad.response
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
    return f"<tool_call>\n{json.dumps({'name': PYTHON_TOOL_NAME, 'arguments': {'code': code}})}\n</tool_call>"
