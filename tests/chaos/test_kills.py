"""Riddles, asked of a real server while its processes are killed: each has its own answer, once, or no verdict.

Kills go by answers, not by time: the same happens on a slow machine, later.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bench.chaos import Load, Tally, Target
from bench.probes.fault_injector import Monkey
from bench.probes.leftovers import still_there
from bench.servers import service
from bench.workloads import checked_calls
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.executor.calling import OWN_PYTHON

pytestmark = pytest.mark.timeout(400)
FLAGS = ("--profiles", "bare", "--executors", "2", "--zygote-pools", "1", "--slots", "4")


@pytest.fixture
def target() -> Iterator[Target]:
    """A lean server that may be killed."""
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))
    with ExitStack() as life:
        target = Target(life, lambda: service.running(OWN_PYTHON, FLAGS))
        yield target
        pids = target.processes()
    assert not still_there(pids)


def ask(target: Target, calls: int, on_result: Callable[[int], None]) -> Tally:
    """Ask so many riddles; `on_result` gets the number of each answer."""
    tally, answers = Tally(calls), itertools.count(1)
    asked = checked_calls.make(calls, seed=7, kinds=checked_calls.LEAN)
    load = Load(target, asked, tally, random.Random(7), lambda: on_result(next(answers)))
    asyncio.run(asyncio.wait_for(load.run(in_flight=64), 300))
    assert (tally.lost, tally.doubled, tally.mixed_up) == (0, 0, 0), tally.examples[:3]
    return tally


def test_every_call_has_its_one_answer_while_what_runs_it_is_killed(target: Target) -> None:
    monkey = Monkey(random.Random(3))

    def strike(answers: int) -> None:
        if answers % 30 == 0:
            monkey.strike(target.pid)

    tally = ask(target, 300, strike)
    assert monkey.kills.total() >= 5, "or this has shown little"
    assert tally.statuses["ok"] > 100


def test_a_killed_gateway_leaves_nothing_and_its_calls_are_asked_again(target: Target) -> None:
    monkey = Monkey(random.Random(4))

    def strike(answers: int) -> None:
        if answers in (50, 100):
            target.kill_gateway()
        elif answers % 40 == 0:
            monkey.strike(target.pid)

    tally = ask(target, 150, strike)
    assert tally.resent >= 2
    assert not target.left_behind


def test_the_server_is_as_good_as_new_afterwards(target: Target) -> None:
    monkey = Monkey(random.Random(5))
    struck: list[int] = []
    ask(target, 40, lambda answers: struck.append(answers) if answers % 20 else monkey.strike(target.pid))
    tally = ask(target, 60, lambda _: None)
    assert "unavailable" not in tally.statuses
