"""A checked call matches its own result and no other."""

from __future__ import annotations

import itertools
from typing import Any

from bench.workloads.checked_calls import KIND_WEIGHTS, CheckedCall, checked_calls, numbered_calls

MANY = list(checked_calls(300, seed=1))
USAGE = {"queue_ms": 1.0, "run_ms": 1.0, "cpu_ms": 1.0}


def result_of(call: CheckedCall) -> dict[str, Any]:
    """The result that the service must give to a checked call."""
    (status,), fields = call.expected.statuses, call.expected.fields
    error = None if status == "ok" else {"type": "Any", "message": fields["message"], "traceback": "", "line": None}
    plain = {name: fields[name] for name in ("stdout", "value", "files")}
    return {"id": call.call["id"], "status": status, "error": error, "attempts": 1, "usage": USAGE, **plain}


def test_no_two_calls_have_the_same_expected_result() -> None:
    expected = [call.expected for call in MANY]
    assert all(expected.count(result) == 1 for result in expected)
    assert len({call.call["id"] for call in MANY}) == len(MANY)
    assert {call.group for call in MANY} == set(KIND_WEIGHTS)


def test_only_a_calls_own_result_matches() -> None:
    for call, other in itertools.pairwise(MANY):
        own = result_of(call)
        assert call.matches(own)
        assert not call.matches(result_of(other))
        assert not call.matches({**result_of(other), "id": call.call["id"]})
        assert not call.matches({**own, "id": other.call["id"]})
        assert not call.matches({**own, "status": "unavailable"})


def test_a_timeout_may_come_before_the_first_line() -> None:
    call = next(call for call in MANY if call.group == "timeout")
    assert call.matches({**result_of(call), "stdout": ""})
    assert not call.matches({**result_of(call), "stdout": "1\n"})


def test_the_same_seed_gives_the_same_calls() -> None:
    assert list(checked_calls(300, seed=1)) == MANY
    assert list(checked_calls(300, seed=2)) != MANY


def test_numbered_calls_differ_in_their_first_line_and_the_status_is_checked_too() -> None:
    call, other = numbered_calls("mix", 2, 3)
    first_line = call.expected.fields["first_line"]
    assert first_line != other.expected.fields["first_line"]
    (status,) = call.expected.statuses
    right = {"id": call.call["id"], "status": status, "stdout": f"{first_line}\nmore\n"}
    assert call.matches(right)
    wrong_line = f"{other.expected.fields['first_line']}\n"
    for change in ({"id": other.call["id"]}, {"status": "unavailable"}, {"stdout": wrong_line}, {"stdout": ""}):
        assert not call.matches({**right, **change})


def test_a_share_of_numbered_calls_is_endless_and_must_time_out() -> None:
    calls = list(numbered_calls("print", 1000, 3, loop_share=0.01, loop_timeout_s=0.5))
    endless = [call for call in calls if call.group == "loop"]
    assert len(endless) == 10 and all(call.call["limits"] == {"timeout_s": 0.5} for call in endless)
    result = {"id": endless[0].call["id"], "stdout": f"{endless[0].expected.fields['first_line']}\n"}
    assert not endless[0].matches({**result, "status": "ok"})
    assert endless[0].matches({**result, "status": "timeout"})
