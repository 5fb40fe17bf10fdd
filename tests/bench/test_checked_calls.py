"""A riddle's answer is its own."""

from __future__ import annotations

import itertools
from dataclasses import replace

from bench.workloads import checked_calls
from sandbox.types import CallError, Result, Status

MANY = list(checked_calls.make(300, seed=1))


def result_of(riddle: checked_calls.Riddle) -> Result:
    answer = riddle.answer
    error = CallError("Any", answer.message) if answer.status is not Status.OK else None
    return Result(answer.id, answer.status, answer.stdout, "", answer.value, error, files=answer.files)


def test_no_two_have_an_answer_in_common() -> None:
    said = [replace(riddle.answer, id="") for riddle in MANY]
    assert all(said.count(answer) == 1 for answer in said)
    assert len({riddle.call.id for riddle in MANY}) == len(MANY)
    assert {riddle.kind for riddle in MANY} == set(checked_calls.KINDS)


def test_only_its_own_answer_solves_it() -> None:
    for riddle, other in itertools.pairwise(MANY):
        own = result_of(riddle)
        assert riddle.is_solved_by(own)
        assert not riddle.is_solved_by(result_of(other))
        assert not riddle.is_solved_by(replace(result_of(other), id=riddle.call.id))
        assert not riddle.is_solved_by(replace(own, id=other.call.id))
        assert not riddle.is_solved_by(replace(own, status=Status.UNAVAILABLE))


def test_a_timeout_may_come_before_the_first_line() -> None:
    riddle = next(riddle for riddle in MANY if riddle.kind == "timeout")
    assert riddle.is_solved_by(replace(result_of(riddle), stdout=""))
    assert not riddle.is_solved_by(replace(result_of(riddle), stdout="1\n"))


def test_the_same_seed_asks_the_same() -> None:
    assert list(checked_calls.make(300, seed=1)) == MANY
    assert list(checked_calls.make(300, seed=2)) != MANY
