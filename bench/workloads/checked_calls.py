"""Calls of which each has an answer that nothing but its own code and input give.

Every riddle has a number of its own, and wants it back, changed: an answer that went to another call, or that half a
run gave, is not what was expected. No answer depends on speed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sandbox.types import Call, Limits, Profile, Result, Status

SHORT_S = 0.1
PATIENT_S = 300.0
"""What no riddle needs, on whatever machine."""
FIRST = 10_000_000
LEAN = {"value": 30, "stdin": 20, "files": 12, "error": 8, "exit": 4, "crash": 3, "timeout": 3}
"""Kinds of riddles that the standard library solves, and how many of each there are to how many of the others."""
KINDS = {**LEAN, "numeric": 8, "symbolic": 2, "scientific": 1}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a riddle's result says, without what depends on the machine."""

    id: str
    status: Status
    stdout: str = ""
    value: str | None = None
    message: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Result) -> Answer:
        message = result.error.message if result.error and result.status is Status.ERROR else ""
        return cls(result.id, result.status, result.stdout, result.value, message, result.files)


@dataclass(frozen=True, slots=True)
class Riddle:
    """A call and its answer."""

    kind: str
    call: Call
    answer: Answer

    def is_solved_by(self, result: Result) -> bool:
        """Whether this is the verdict on this call. One that ran out of time may not have come to its first line."""
        if self.answer.status is Status.TIMEOUT and not result.stdout:
            return (result.id, result.status) == (self.call.id, Status.TIMEOUT)
        return Answer.of(result) == self.answer


def make(count: int, seed: int, kinds: Mapping[str, int] = KINDS) -> Iterator[Riddle]:
    """`count` riddles of these kinds; the same for the same seed."""
    rng = random.Random(seed)
    names: Sequence[str] = list(kinds)
    for number in rng.sample(range(FIRST, FIRST + 8 * count), count):
        yield _riddle(rng.choices(names, list(kinds.values()))[0], number)


def _riddle(kind: str, n: int) -> Riddle:
    more: dict[str, object] = {}
    said: dict[str, object] = {"status": Status.OK}
    match kind:
        case "value":
            code = f"print({n} * 3)\n{n} ** 2"
            said |= {"stdout": f"{n * 3}\n", "value": str(n**2)}
        case "stdin":
            code = "n = int(input())\nprint(n * 7)"
            more = {"stdin": f"{n}\n"}
            said |= {"stdout": f"{n * 7}\n"}
        case "files":
            code = "with open('in.txt') as a, open('out.txt', 'w') as b:\n    b.write(f'{int(a.read()) * 11}')"
            more = {"files": {"in.txt": str(n).encode()}, "return_files": ("out.txt",)}
            said |= {"files": {"out.txt": str(n * 11).encode()}}
        case "error":
            code = f"raise ValueError({n} * 13)"
            said = {"status": Status.ERROR, "message": str(n * 13)}
        case "exit":
            code = f"import sys\nprint({n} * 17)\nsys.exit(3)"
            said = {"status": Status.ERROR, "stdout": f"{n * 17}\n", "message": "3"}
        case "crash":
            code = f"import ctypes\nprint({n} * 19, flush=True)\nctypes.string_at(0)"
            said = {"status": Status.KILLED, "stdout": f"{n * 19}\n"}
        case "timeout":
            code = f"print({n} * 23, flush=True)\nwhile True: pass"
            said = {"status": Status.TIMEOUT, "stdout": f"{n * 23}\n"}
        case "numeric":
            code = f"import numpy\nint(numpy.full(1000, {n}).sum())"
            said |= {"value": str(n * 1000)}
        case "symbolic":
            code = f"import sympy\nx = sympy.Symbol('x')\nstr(sympy.expand((x + {n}) ** 2))"
            said |= {"value": repr(f"x**2 + {2 * n}*x + {n * n}")}
        case _:
            code = f"import scipy.linalg\nround(scipy.linalg.det([[{n}, 1], [0, 2]]))"
            more = {"profile": Profile.SCIENTIFIC}
            said |= {"value": str(2 * n)}
    limits = Limits(timeout_s=SHORT_S if kind == "timeout" else PATIENT_S)
    call = Call(code, id=f"riddle-{n}", limits=limits, **more)  # type: ignore[arg-type]
    return Riddle(kind, call, Answer(call.id, **said))  # type: ignore[arg-type]
