"""Answer checks as calls: a pair of answers becomes a `Call`, and the call's `Result` becomes a `Verdict`.

A pair is the reference answer, `gold`, and the `answer` to check; both may be whole completions. For each pair, one
call in the sandbox extracts both answers and compares them. A pair on which the comparison hangs or crashes affects no
other pair. The code of the call imports `guest/answer_check.py` as the module `rstar_answer_check`, a name that its
zygote (the process from which the call is forked) gives to it.

- Both answers are data: they are sent as standard input and never executed.
- If the pair causes a failure (a time-out, a crash, used up memory), the outcome is `unparsable`. After a failure of
  the service it is `unavailable`, and for a malformed pair `invalid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sandbox.errors import InvalidCall
from sandbox.fields import check_flag, check_names
from sandbox.guest.protocol import ANSWER_CHECK_MODULE, MAX_ANSWER_TEXT_CHARS
from sandbox.types import (
    CALL_FIELDS,
    MAX_STDIN_CHARS,
    Call,
    Outcome,
    Profile,
    Result,
    Status,
    Strictness,
    Verdict,
)

MIN_OUTPUT_KB = 8
"""Minimum `output_kb` of a check. The report of a check has at most 200 characters of each answer."""
VERIFY_CALL_FIELDS = {name: CALL_FIELDS[name] for name in ("limits", "priority", "tenant", "deadline_s")}
"""Fields of a call that a request may set for its checks."""
OPTION_FIELDS = {
    "strictness": "the rules by which answers are equal",
    "rounding": "with strict: whether a decimal also equals a gold that rounds to it",
}
"""Fields of a request that say how its pairs are compared."""

_CODE = f"import {ANSWER_CHECK_MODULE}\n{ANSWER_CHECK_MODULE}.outcome()"
_COMPARED = (Outcome.EQUIVALENT, Outcome.NOT_EQUIVALENT, Outcome.UNPARSABLE)
"""Outcomes that a report may have."""
_STATUSES_CAUSED_BY_PAIR = (Status.TIMEOUT, Status.MEMORY_LIMIT, Status.OUTPUT_LIMIT, Status.KILLED)
"""`Status.ERROR` is not among them: `answer_check.py` catches all exceptions that a pair causes, so any other exception
is a fault of the guest's Python, such as a missing library."""


class CheckTemplate(NamedTuple):
    """What all checks of a request share: a call without code, and how answers are compared."""

    call: Call
    strictness: Strictness = Strictness.STRICT
    rounding: bool = False


def check_template(fields: Mapping[str, Any]) -> CheckTemplate:
    """Return the template for the shared fields of a request. Raises `InvalidCall`."""
    check_names(fields, {**VERIFY_CALL_FIELDS, **OPTION_FIELDS}, "verify")
    call_fields = {name: value for name, value in fields.items() if name in VERIFY_CALL_FIELDS}
    strictness, rounding = fields.get("strictness", Strictness.STRICT), fields.get("rounding", False)
    if strictness not in tuple(Strictness):
        raise InvalidCall(f"verify.strictness: expected one of {', '.join(Strictness)}, got {strictness!r:.80}")
    check_flag(rounding, "verify.rounding")
    if rounding and strictness != Strictness.STRICT:
        raise InvalidCall(f"verify.rounding: expected false with strictness={strictness}, which has rules of its own")
    return CheckTemplate(Call.decode_defaults(call_fields, "verify"), Strictness(strictness), rounding)


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


def build_check(gold: str, answer: str, template: CheckTemplate) -> Call:
    """Return the call that compares `gold` and `answer`, with the fields of `template`. A text over
    `MAX_ANSWER_TEXT_CHARS` is cut one character above it, so that the check still refuses it."""
    texts = [text[: MAX_ANSWER_TEXT_CHARS + 1].encode("utf-8", "surrogatepass") for text in (gold, answer)]
    header = {"strictness": template.strictness, "rounding": template.rounding, "gold_bytes": len(texts[0])}
    limits = template.call.limits
    limits = replace(limits, output_kb=max(limits.output_kb, MIN_OUTPUT_KB))
    stdin = b"\n".join((json.dumps(header).encode(), b"".join(texts)))
    return replace(template.call, code=_CODE, stdin=stdin, profile=Profile.VERIFY, limits=limits)


def verdict_of(result: Result) -> Verdict:
    """Return the verdict for the result of a check."""
    if result.status is Status.OK and (verdict := _decode_report(result.value or "")):
        return replace(verdict, usage=result.usage)
    message = str(result.error or "the answer check returned no outcome")
    if result.status in _STATUSES_CAUSED_BY_PAIR:
        return Verdict(Outcome.UNPARSABLE, result.status, message, result.usage)
    if result.status is Status.INVALID:
        return Verdict(Outcome.INVALID, Status.INVALID, message)
    return Verdict(Outcome.UNAVAILABLE, Status.UNAVAILABLE, message, result.usage)


def _decode_report(value: str) -> Verdict | None:
    """Return the verdict for the value of a finished check, the report of `guest/answer_check.py`; None for other
    values."""
    try:
        report = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(report, dict) or report.get("outcome") not in _COMPARED:
        return None
    extracted = {name: str(report[name]) for name in ("gold", "answer") if report.get(name) is not None}
    return Verdict(Outcome(report["outcome"]), message=str(report.get("message", "")), extracted=extracted)
