"""Calls whose result is known beforehand and belongs to that call alone.

Every call contains a number of its own and returns a function of this number. So the result of another call does not
match, and neither does the result of a run that ended half-way. No result depends on speed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.workloads.code_kinds import CODES
from bench.workloads.hostile_calls import ENDLESS_LOOP
from bench.workloads.tool_calls import labelled_calls
from sandbox.types import Result

SHORT_TIMEOUT_S = 0.1
LONG_TIMEOUT_S = 300.0
"""A time-out in seconds that only endless calls reach, on any machine."""
FIRST_NUMBER = 10_000_000
"""The smallest number of a call. All numbers have eight digits, so that no number is a part of another one."""
STDLIB_WEIGHTS = {"value": 30, "stdin": 20, "files": 12, "error": 8, "exit": 4, "crash": 3, "timeout": 3}
"""Kinds of calls that need only the standard library, and their relative frequency."""
KIND_WEIGHTS = {**STDLIB_WEIGHTS, "numeric": 8, "symbolic": 2, "scientific": 1}
COMPILE_ERRORS = ("SyntaxError", "IndentationError")


@dataclass(frozen=True, slots=True)
class ExpectedResult:
    """The statuses that a result may have, and the fields that it must have.

    A field has the name that it has in the API's results. Two more names are allowed: `message` is the message of the
    error, and `first_line` is the first line of stdout.
    """

    statuses: Collection[str]
    fields: Mapping[str, object]
    allows_no_output: bool = False
    """True if the call may time out before it prints its first line."""


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call, as the API takes it, and its expected result. Tallies group calls by `group`, such as "short"."""

    call: Mapping[str, Any]
    group: str
    expected: ExpectedResult

    def matches(self, result: Mapping[str, Any]) -> bool:
        """Whether `result` can only be the result of this call."""
        if result["id"] != self.call.get("id", "") or result["status"] not in self.expected.statuses:
            return False
        if self.expected.allows_no_output and not result["stdout"]:
            return True
        return all(_field(result, name) == value for name, value in self.expected.fields.items())


def _field(result: Mapping[str, Any], name: str) -> object:
    match name:
        case "message":
            return result["error"]["message"] if result["status"] == "error" else ""
        case "first_line":
            return result["stdout"].partition("\n")[0]
        case "files":
            return Result.decode(result).files
        case _:
            return result.get(name)


def checked_calls(count: int, seed: int, weights: Mapping[str, int] = KIND_WEIGHTS) -> Iterator[CheckedCall]:
    """`count` calls of these kinds; the same for the same seed."""
    rng = random.Random(seed)
    kinds: Sequence[str] = list(weights)
    for number in rng.sample(range(FIRST_NUMBER, FIRST_NUMBER + 8 * count), count):
        yield _checked_call(rng.choices(kinds, list(weights.values()))[0], number)


def _checked_call(kind: str, n: int) -> CheckedCall:
    options: dict[str, Any] = {}
    expected: dict[str, object] = {"stdout": "", "value": None, "message": "", "files": {}}
    status = "ok"
    match kind:
        case "value":
            code = f"print({n} * 3)\n{n} ** 2"
            expected |= {"stdout": f"{n * 3}\n", "value": str(n**2)}
        case "stdin":
            code = "n = int(input())\nprint(n * 7)"
            options = {"stdin": f"{n}\n"}
            expected |= {"stdout": f"{n * 7}\n"}
        case "files":
            code = "with open('in.txt') as a, open('out.txt', 'w') as b:\n    b.write(f'{int(a.read()) * 11}')"
            options = {"files": {"in.txt": str(n).encode()}, "return_files": ["out.txt"]}
            expected |= {"files": {"out.txt": str(n * 11).encode()}}
        case "error":
            code, status = f"raise ValueError({n} * 13)", "error"
            expected |= {"message": str(n * 13)}
        case "exit":
            code, status = f"import sys\nprint({n} * 17)\nsys.exit(3)", "error"
            expected |= {"stdout": f"{n * 17}\n", "message": "3"}
        case "crash":
            code, status = f"import ctypes\nprint({n} * 19, flush=True)\nctypes.string_at(0)", "killed"
            expected |= {"stdout": f"{n * 19}\n"}
        case "timeout":
            code, status = f"print({n} * 23, flush=True)\nwhile True: pass", "timeout"
            expected |= {"stdout": f"{n * 23}\n"}
        case "numeric":
            code = f"import numpy\nint(numpy.full(1000, {n}).sum())"
            expected |= {"value": str(n * 1000)}
        case "symbolic":
            code = f"import sympy\nx = sympy.Symbol('x')\nstr(sympy.expand((x + {n}) ** 2))"
            expected |= {"value": repr(f"x**2 + {2 * n}*x + {n * n}")}
        case _:
            code = f"import scipy.linalg\nround(scipy.linalg.det([[{n}, 1], [0, 2]]))"
            options = {"profile": "scientific"}
            expected |= {"value": str(2 * n)}
    limits = {"timeout_s": SHORT_TIMEOUT_S if kind == "timeout" else LONG_TIMEOUT_S}
    call = {"code": code, "id": f"checked-{n}", "limits": limits, **options}
    return CheckedCall(call, kind, ExpectedResult((status,), expected, allows_no_output=kind == "timeout"))


def numbered_calls(
    kind: str, count: int, seed: int, loop_share: float = 0.0, loop_timeout_s: float = 1.0
) -> Iterator[CheckedCall]:
    """Yield `count` calls. The first line of the output of each call is a number that no other call prints.

    `kind` is "print" for calls that do nothing else, a kind of `CODES`, or "mix" for the mix of real traffic.

    The share `loop_share` of the calls are endless loops, evenly spread, of the group `loop`. All other calls are of
    the group `short`.
    """
    mix = labelled_calls(count, seed) if kind == "mix" else None
    for n in range(count):
        template, call = next(mix) if mix else (None, {"code": "" if kind == "print" else CODES[kind]})
        first_line, status = str(n * n + seed), template.status if template else "ok"
        if math.floor((n + 1) * loop_share) > math.floor(n * loop_share):
            call, status = {"code": ENDLESS_LOOP, "limits": {"timeout_s": loop_timeout_s}}, "timeout"
        elif template and template.end in COMPILE_ERRORS:
            first_line = ""
        code = f"print({n} * {n} + {seed}, flush=True)\n{call['code']}"
        expected = ExpectedResult((status,), {"first_line": first_line})
        group = "loop" if status == "timeout" else "short"
        yield CheckedCall({**call, "code": code, "id": f"numbered-{n}"}, group, expected)
