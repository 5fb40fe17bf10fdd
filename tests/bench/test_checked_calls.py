"""Tests of checked calls, whose expected results are known. A checked call matches its own result and no other."""

from __future__ import annotations

import itertools
from typing import Any

from bench.workloads.checked_calls import KIND_WEIGHTS, CheckedCall, checked_calls, numbered_calls

CALLS = list(checked_calls(300, seed=1))
USAGE = {"queue_ms": 1.0, "run_ms": 1.0, "cpu_ms": 1.0}


def result_of(call: CheckedCall) -> dict[str, Any]:
    """The result that the service must give to a checked call."""
    (status,), fields = call.expected.statuses, call.expected.fields
    error = None if status == "ok" else {"type": "Any", "message": fields["message"], "traceback": "", "line": None}
    outputs = {name: fields[name] for name in ("stdout", "value", "files")}
    return {"id": call.call["id"], "status": status, "error": error, "attempts": 1, "usage": USAGE, **outputs}


def test_no_two_calls_have_the_same_expected_result() -> None:
    expected = [call.expected for call in CALLS]
    assert all(expected.count(result) == 1 for result in expected)
    assert len({call.call["id"] for call in CALLS}) == len(CALLS)
    assert {call.group for call in CALLS} == set(KIND_WEIGHTS)


def test_a_call_matches_its_own_result_alone() -> None:
    for call, other in itertools.pairwise(CALLS):
        own_result = result_of(call)
        assert call.matches(own_result)
        assert not call.matches(result_of(other))
        assert not call.matches({**result_of(other), "id": call.call["id"]})
        assert not call.matches({**own_result, "id": other.call["id"]})
        assert not call.matches({**own_result, "status": "unavailable"})


def test_a_call_may_time_out_before_it_prints_its_first_line() -> None:
    call = next(call for call in CALLS if call.group == "timeout")
    assert call.matches({**result_of(call), "stdout": ""})
    assert not call.matches({**result_of(call), "stdout": "1\n"})


def test_the_same_seed_gives_the_same_calls() -> None:
    assert list(checked_calls(300, seed=1)) == CALLS
    assert list(checked_calls(300, seed=2)) != CALLS


def test_a_numbered_call_matches_by_its_first_line_and_its_status() -> None:
    call, other = numbered_calls("mix", 2, 3)
    first_line = call.expected.fields["first_line"]
    assert first_line != other.expected.fields["first_line"]
    (status,) = call.expected.statuses
    own_result = {"id": call.call["id"], "status": status, "stdout": f"{first_line}\nmore\n"}
    assert call.matches(own_result)
    other_line = f"{other.expected.fields['first_line']}\n"
    for change in ({"id": other.call["id"]}, {"status": "unavailable"}, {"stdout": other_line}, {"stdout": ""}):
        assert not call.matches({**own_result, **change})


def test_a_share_of_numbered_calls_is_endless_and_must_time_out() -> None:
    calls = list(numbered_calls("print", 1000, 3, loop_share=0.01, loop_timeout_s=0.5))
    endless = [call for call in calls if call.group == "loop"]
    assert len(endless) == 10 and all(call.call["limits"] == {"timeout_s": 0.5} for call in endless)
    result = {"id": endless[0].call["id"], "stdout": f"{endless[0].expected.fields['first_line']}\n"}
    assert not endless[0].matches({**result, "status": "ok"})
    assert endless[0].matches({**result, "status": "timeout"})
