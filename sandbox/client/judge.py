"""The client's requests to `/v1/judge`: how programs and their results are encoded. `transport` sends them.

A program with a test that is `unavailable` for a retryable reason is sent again, unless another of its
tests has `Poison`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox.client.pending_results import Submission
from sandbox.judging.programs import JudgedProgram, JudgeOutcome, Program
from sandbox.types import Limits, UnavailableReason, unavailable_reason

MAX_TESTS = 4096
"""Maximum number of tests in one request. A program that has more tests is sent in a request of its own."""
MAX_TESTS_AT_ONCE = 16 * MAX_TESTS
"""Maximum number of tests that one `judge` submits at once, so that many programs do not fill the server's queue."""

RawProgram = Mapping[str, Any]
"""A program as in `programs` of POST /v1/judge."""


class JudgeRoute:
    """`/v1/judge` with the `defaults` of one request."""

    path = "/v1/judge"
    content_type = "application/json"
    noun = "programs"
    max_weight: int | None = MAX_TESTS

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults

    def encode(self, items: Sequence[RawProgram], fields: Mapping[str, float]) -> bytes:
        body = {"programs": items, "defaults": self._defaults, **fields}
        return json.dumps(body, default=_as_json).encode()

    def decode(self, encoded: dict[str, Any]) -> JudgedProgram:
        return JudgedProgram.decode(encoded)

    def retryable_reason(self, encoded: dict[str, Any]) -> UnavailableReason | None:
        reasons = [unavailable_reason(test["reason"]) for test in encoded["tests"] if "reason" in test]
        if UnavailableReason.POISON in reasons:
            return None
        return next((reason for reason in reasons if reason is not None and reason.is_retryable), None)

    def unavailable(self, item_id: str, reason: UnavailableReason, message: str) -> JudgedProgram:
        return JudgedProgram(item_id, JudgeOutcome.UNAVAILABLE, message=f"{reason}: {message}")


def decode_all(programs: Sequence[RawProgram], defaults: Mapping[str, Any]) -> list[Submission[JudgedProgram]]:
    """Check programs, and return a submission for each. Raises `InvalidCall` with the index of a malformed program."""
    base, route = Program.decode_defaults(defaults), JudgeRoute(defaults)
    submissions = []
    for index, raw in enumerate(programs):
        program = Program.decode(raw, base, f"programs[{index}]")
        own_id = program.id
        submissions.append(Submission(route, raw, own_id, own_id or str(index), program.size, len(program.tests)))
    return submissions


def _as_json(value: Any) -> Any:
    if isinstance(value, Limits):
        return {name: getattr(value, name) for name in Limits.__slots__}
    raise TypeError(f"expected a value that JSON can represent, got {type(value).__name__}")
