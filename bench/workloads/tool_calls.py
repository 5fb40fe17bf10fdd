"""Tool calls in the mix that RL on competition mathematics produces, and calls read from a file.

The templates in `tool_calls.txt` are filled with seeded numbers: equal `n` and `seed` give equal calls everywhere.
`SHARES` are the shares of calls by imported library and by how they end. They were measured on rollouts of models like
rStar2-Agent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from sandbox.types import CALL_FIELDS

ENDLESS_TIMEOUT_S = 1.0
"""Time-out of the endless calls. All other calls here are much shorter."""

CONTINUED_SHARE = 0.42
"""Share of calls that repeat an earlier call's code above their own, as models do when no state is kept."""

SHARES: dict[tuple[str, str], float] = {
    ("sympy", "ok"): 0.465,
    ("sympy", "error"): 0.145,
    ("numpy", "ok"): 0.025,
    ("numpy", "error"): 0.005,
    ("scipy", "ok"): 0.028,
    ("scipy", "error"): 0.002,
    ("math", "ok"): 0.003,
    ("plain", "ok"): 0.229,
    ("plain", "error"): 0.093,
    ("plain", "timeout"): 0.005,
}
"""61 % import sympy, 3 % numpy, 3 % scipy; 75 % end as `ok`, 24.5 % in an error, 0.5 % are endless."""


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """Code with placeholders."""

    name: str
    family: str
    """The imported library; `plain` if there is none."""
    end: str
    """How a call ends: `ok`, `timeout` or the type of its error."""
    ranges: tuple[tuple[str, int, int], ...]
    """Name, minimum and maximum of each placeholder."""
    stdin: str
    code: str

    @property
    def status(self) -> str:
        """The status that the call must end with."""
        return self.end if self.end in ("ok", "timeout") else "error"

    def fill(self, rng: random.Random) -> dict[str, Any]:
        """A call as `/v1/batch` takes it, with random numbers for the placeholders."""
        numbers = {name: str(rng.randint(low, high)) for name, low, high in self.ranges}
        call: dict[str, Any] = {"code": Template(self.code).substitute(numbers)}
        if self.stdin:
            call["stdin"] = Template(self.stdin).substitute(numbers)
        if self.end == "timeout":
            call["limits"] = {"timeout_s": ENDLESS_TIMEOUT_S}
        return call


def sample_calls(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """`n` calls in the mix of `SHARES`."""
    return [call for _, call in labelled_calls(n, seed)]


def labelled_calls(n: int, seed: int = 0) -> Iterator[tuple[CallTemplate, dict[str, Any]]]:
    """The calls of `sample_calls`, each with its template."""
    rng = random.Random(seed)
    groups = list(SHARES)
    for group in rng.choices(groups, weights=[SHARES[group] for group in groups], k=n):
        template = rng.choice(_members(*group))
        call = template.fill(rng)
        if rng.random() < CONTINUED_SHARE:
            earlier = rng.choice(_members(template.family, "ok"))
            call["code"] = f"{earlier.fill(rng)['code']}\n{call['code']}" if not earlier.stdin else call["code"]
        yield template, call


def load_calls(path: str | Path) -> list[dict[str, Any]]:
    """Calls from a JSONL file; fields that no call has are dropped.

    Raises `ValueError` if a row has no `code`, or if the file has no row.
    """
    calls = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict) or "code" not in row:
                raise ValueError(f"{path}:{number}: expected an object with a 'code', got {line[:60]!r}")
            calls.append({name: row[name] for name in CALL_FIELDS if name in row})
    if not calls:
        raise ValueError(f"{path}: expected at least one call, got none")
    return calls


@cache
def templates() -> tuple[CallTemplate, ...]:
    """All templates of `tool_calls.txt`."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    return tuple(_parse(block) for block in text.split("\n### ")[1:])


@cache
def _members(family: str, status: str) -> tuple[CallTemplate, ...]:
    return tuple(t for t in templates() if (t.family, t.status) == (family, status))


def _parse(block: str) -> CallTemplate:
    header, _, body = block.partition("\n")
    name, family, end, ranges = (part.strip() for part in header.split("|"))
    lines = body.splitlines(keepends=True)
    stdin = [line[2:] for line in lines if line.startswith("< ")]
    code = "".join(lines[len(stdin) :]).rstrip("\n") + "\n"
    return CallTemplate(name, family, end, tuple(map(_range, ranges.split())), "".join(stdin), code)


def _range(text: str) -> tuple[str, int, int]:
    name, _, span = text.partition("=")
    low, _, high = span.partition("..")
    return name, int(low), int(high)
