"""Answer checks as calls: a pair of answers becomes a `Call`, and the call's `Result` becomes a `Verdict`.

A pair is the reference answer, `gold`, and the `answer` to check. math-verify compares them inside the sandbox, in a
call of its own for each pair. A pair on which it hangs or crashes affects no other pair. The code of the call imports
`guest/checker.py`, to which the zygote gives the module name `rstar_checker`.

- Both answers are data: they are sent as standard input and never executed.
- If the pair causes a failure (a time-out, a crash, used up memory), the outcome is `unparsable`. After a failure of
  the service it is `unavailable`, and for a malformed pair `invalid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandbox.errors import InvalidCall
from sandbox.fields import check_names
from sandbox.types import CALL_FIELDS, MAX_STDIN_CHARS, Call, Outcome, Profile, Result, Status, Verdict

MAX_ANSWER_CHARS = 4096
"""Maximum length of an answer in characters; longer answers are unparsable. The checker in the guest has the same
number. A text over `MAX_STDIN_CHARS` is refused before, as in every call, because it is a malformed request."""
VERIFY_CALL_FIELDS = {name: CALL_FIELDS[name] for name in ("limits", "priority", "tenant", "deadline_s")}
"""Fields of a call that a request may set for its checks."""

_CODE = "import rstar_checker\nrstar_checker.outcome()"
_VERDICT_BY_VALUE = {
    "'equivalent'": Verdict(Outcome.EQUIVALENT),
    "'not_equivalent'": Verdict(Outcome.NOT_EQUIVALENT),
    "'no gold'": Verdict(
        Outcome.UNPARSABLE, message=f"gold is empty, too long (over {MAX_ANSWER_CHARS} characters), or not mathematics"
    ),
    "'no answer'": Verdict(
        Outcome.UNPARSABLE,
        message=f"answer is empty, too long (over {MAX_ANSWER_CHARS} characters), or not mathematics",
    ),
    "'failed'": Verdict(Outcome.UNPARSABLE, message="math-verify failed on this pair"),
}
"""Verdict for each `Result.value` of a check: the `repr` of the text that the checker returns."""
_STATUSES_CAUSED_BY_PAIR = (Status.TIMEOUT, Status.MEMORY_LIMIT, Status.OUTPUT_LIMIT, Status.KILLED)
"""`Status.ERROR` is not among them: the checker catches all exceptions that a pair causes, so any other exception is a
fault of the guest's Python, such as a missing library."""


def template_call(fields: Mapping[str, Any], where: str = "verify") -> Call:
    """Return a call without code that has the fields that all checks of a request share. Raises `InvalidCall`."""
    check_names(fields, VERIFY_CALL_FIELDS, where)
    return Call.decode_defaults(fields, where)


def decode_pair(raw: Any, where: str) -> tuple[str, str]:
    """Return gold and answer from `{"gold": ..., "answer": ...}`. Raises `InvalidCall`."""
    if not isinstance(raw, Mapping) or raw.keys() != {"gold", "answer"}:
        received = f"the fields {', '.join(map(str, raw))}"[:120] if isinstance(raw, Mapping) else type(raw).__name__
        raise InvalidCall(f"{where}: expected an object of gold and answer, got {received}")
    for name, text in raw.items():
        if not isinstance(text, str) or len(text) > MAX_STDIN_CHARS:
            received = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise InvalidCall(f"{where}.{name}: expected text of at most {MAX_STDIN_CHARS} characters, got {received}")
    return raw["gold"], raw["answer"]


def build_check(gold: str, answer: str, template: Call) -> Call:
    """Return the call that compares `gold` and `answer`, with the fields of `template`. A text that is too
    long is cut one character above the maximum, so that the checker still refuses it."""
    texts = json.dumps([gold[: MAX_ANSWER_CHARS + 1], answer[: MAX_ANSWER_CHARS + 1]])
    return replace(template, code=_CODE, stdin=texts, profile=Profile.VERIFY)


def verdict_of(result: Result) -> Verdict:
    """Return the verdict for the result of a check."""
    verdict = _VERDICT_BY_VALUE.get(result.value or "") if result.status is Status.OK else None
    if verdict is not None:
        return replace(verdict, usage=result.usage)
    message = str(result.error or "the checker returned no outcome")
    if result.status in _STATUSES_CAUSED_BY_PAIR:
        return Verdict(Outcome.UNPARSABLE, result.status, message, result.usage)
    if result.status is Status.INVALID:
        return Verdict(Outcome.INVALID, Status.INVALID, message)
    return Verdict(Outcome.UNAVAILABLE, Status.UNAVAILABLE, message, result.usage)
