"""Checks of answers as calls: from a pair of answers to a `Call`, and from its `Result` to a `Verdict`.

What compares is the math-verify library, inside the sandbox, in a call of its own for each pair (`guest/checker.py`):
one that hangs or crashes costs itself alone.

Invariants:
- Both answers are data. They travel as standard input and meet no code but the checker's.
- Whatever the pair does to its checker is a verdict about the pair: `unparsable`. What we fail to do is `unavailable`.
  A malformed pair is `invalid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandbox.errors import InvalidCall
from sandbox.types import MAX_STDIN_BYTES, Call, Outcome, Profile, Result, Status, Verdict

MAX_ANSWER_CHARS = 4096
"""Of an answer that can be read, in characters. The checker has the same number; no more than that is sent to it."""
VERIFY_CALL_FIELDS = ("limits", "priority", "tenant")
"""What a caller may say of the calls that check its pairs."""

_CODE = "import rstar_checker\nrstar_checker.outcome()"
_VERDICT_OF_WORD = {
    "'equivalent'": Verdict(Outcome.EQUIVALENT),
    "'not_equivalent'": Verdict(Outcome.NOT_EQUIVALENT),
    "'no gold'": Verdict(
        Outcome.UNPARSABLE, message=f"gold is empty, too long (over {MAX_ANSWER_CHARS}), or no answer"
    ),
    "'no answer'": Verdict(Outcome.UNPARSABLE, message=f"answer is empty, too long (over {MAX_ANSWER_CHARS}), or none"),
    "'failed'": Verdict(Outcome.UNPARSABLE, message="math-verify failed on this pair"),
}
_STATUSES_OF_PAIR = (Status.TIMEOUT, Status.MEMORY_LIMIT, Status.OUTPUT_LIMIT, Status.KILLED)


def shared_fields(fields: Mapping[str, Any], where: str = "verify") -> Call:
    """What all calls of a request share, from the wire. Raises `InvalidCall`."""
    for name in fields:
        if name not in VERIFY_CALL_FIELDS:
            raise InvalidCall(f"{where}: unknown field {name!r:.80}; the fields are {', '.join(VERIFY_CALL_FIELDS)}")
    return Call.decode_defaults(fields, where)


def decode_pair(raw: Any, where: str) -> tuple[str, str]:
    """`{"gold": ..., "answer": ...}`. Raises `InvalidCall`."""
    if not isinstance(raw, Mapping) or raw.keys() != {"gold", "answer"}:
        came = f"the fields {', '.join(map(str, raw))}"[:120] if isinstance(raw, Mapping) else type(raw).__name__
        raise InvalidCall(f"{where}: expected an object of gold and answer, got {came}")
    for name, text in raw.items():
        if not isinstance(text, str) or len(text) > MAX_STDIN_BYTES:
            came = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise InvalidCall(f"{where}.{name}: expected text of at most {MAX_STDIN_BYTES} characters, got {came}")
    return raw["gold"], raw["answer"]


def check_call(gold: str, answer: str, shared: Call) -> Call:
    """The call that compares them, with the limits, priority and tenant of another."""
    texts = json.dumps([gold[: MAX_ANSWER_CHARS + 1], answer[: MAX_ANSWER_CHARS + 1]])
    return replace(shared, code=_CODE, stdin=texts, profile=Profile.VERIFY)


def verdict_of(result: Result) -> Verdict:
    """What a check's result means."""
    said = _VERDICT_OF_WORD.get(result.value or "") if result.status is Status.OK else None
    if said is not None:
        return replace(said, usage=result.usage)
    message = f"{result.error.type}: {result.error.message}" if result.error else "the checker said nothing"
    if result.status in _STATUSES_OF_PAIR:
        return Verdict(Outcome.UNPARSABLE, result.status, message, result.usage)
    if result.status is Status.INVALID:
        return Verdict(Outcome.INVALID, Status.INVALID, message)
    return Verdict(Outcome.UNAVAILABLE, Status.UNAVAILABLE, message, result.usage)
