"""Problems on which a failing tool call costs no reward, and on which accuracy stays near one half.

An example is "Mix 47 and 12, then add 5." It is solved with two calls, one for each operation. In the conversations for
SFT, each call is written with probability 1/2 as `show(...)`, which raises `NameError`, and otherwise as `print(...)`.
After an error the call is repeated with `print`, which always works. So a failing call costs only a turn and some
tokens. A stage has enough of both, so `show` and `print` lead to equal rewards.

"Mix" means plus in one half of the problems and minus in the other half. A hash of the numbers decides which, so the
text does not show it. The conversations use plus and minus with probability 1/2 each. So the rewards within a group
differ, and on problems that it has not seen no model can be right more often than half of the time.
"""

from __future__ import annotations

import json
import random
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.tiny_model import write_tiny_model
from trainer.episodes.turn_parser import PYTHON_TOOL_NAME

TRACEBACK = """\
Traceback (most recent call last):
  File "main.py", line 1, in <module>
    {code}
    ^^^^
NameError: name 'show' is not defined"""
"""The sandbox's response to `show(...)`."""
HELD_OUT_MODULUS = 8
"""One in this number of problems is held out for evaluation."""
BROKEN_CALL_RATE = 0.5


class Numbers(NamedTuple):
    """The numbers of a problem: mix `a` and `b`, then add `c`."""

    a: int
    b: int
    c: int

    @property
    def text(self) -> str:
        return f"Mix {self.a} and {self.b}, then add {self.c}."

    @property
    def digest(self) -> int:
        return int.from_bytes(blake2b(self.text.encode(), digest_size=8).digest())

    @property
    def is_held_out(self) -> bool:
        return self.digest % HELD_OUT_MODULUS == 0

    @property
    def sign(self) -> str:
        """The operation that "mix" means."""
        return "+-"[self.digest // HELD_OUT_MODULUS % 2]


def write_files(folder: Path, seed: int, *, problems: int, conversations: int, held_out: int) -> None:
    """Write `problems.jsonl`, `conversations.jsonl`, `held_out.jsonl` and a tiny model in `model`, whose tokenizer has
    learned the words of the task. Equal arguments write equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"ambiguous {seed}")
    everything = [Numbers(a, b, c) for a in range(30, 100) for b in range(10, 30) for c in range(2, 10)]
    rng.shuffle(everything)
    training = [numbers for numbers in everything if not numbers.is_held_out]
    _write(folder / "problems.jsonl", [_problem(numbers) for numbers in training[:problems]])
    _write(folder / "held_out.jsonl", [_problem(numbers) for numbers in everything if numbers.is_held_out][:held_out])
    taught = [_conversation(rng.choice(training), rng) for _ in range(conversations)]
    _write(folder / "conversations.jsonl", taught)
    write_tiny_model(folder / "model", seed, [row["messages"] for row in taught])


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _problem(numbers: Numbers) -> dict[str, Any]:
    answer = (numbers.a + numbers.b if numbers.sign == "+" else numbers.a - numbers.b) + numbers.c
    return {"id": f"mix-{numbers.digest:016x}", "text": numbers.text, "answer": str(answer), "source": "mix"}


def _conversation(numbers: Numbers, rng: random.Random) -> dict[str, Any]:
    mixed = numbers.a + numbers.b if (sign := rng.choice("+-")) == "+" else numbers.a - numbers.b
    messages = [{"role": "user", "content": numbers.text}]
    messages += _calls("Mix.", f"{numbers.a}{sign}{numbers.b}", mixed, rng)
    messages += _calls("Add.", f"{mixed}+{numbers.c}", mixed + numbers.c, rng)
    messages.append(_assistant("Done.", f"<answer>\n\\boxed{{{mixed + numbers.c}}}\n</answer>"))
    return {"messages": messages}


def _calls(thought: str, expression: str, value: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a call that works, in half of the cases after one that fails."""
    failing = rng.random() < BROKEN_CALL_RATE
    code = f"show({expression})"
    first = [_assistant(thought, _call(code)), _tool(TRACEBACK.format(code=code))] if failing else []
    return [*first, _assistant("Again." if failing else thought, _call(f"print({expression})")), _tool(str(value))]


def _assistant(thought: str, text: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<reason>{thought}</reason>\n{text}"}


def _tool(response: str) -> dict[str, str]:
    return {"role": "tool", "content": response}


def _call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': PYTHON_TOOL_NAME, 'arguments': {'code': code}})}\n</tool_call>"
