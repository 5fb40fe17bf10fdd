"""Tests of calls with known results on a real server while its processes are killed. Each call gets exactly one result:
its own, or `unavailable`.

Kills are triggered by numbers of answers and not by time, so a slow machine sees the same sequence.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from bench.harness.load import CallTally
from bench.probes.fault_injector import FaultInjector
from bench.servers.server_under_test import CheckedLoad, ServerUnderTest
from bench.workloads.checked_calls import STDLIB_WEIGHTS, checked_calls
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.executor.calling import OWN_PYTHON

pytestmark = pytest.mark.timeout(400)
FLAGS = ("--profiles", "bare", "--executors", "2", "--zygote-pools", "1", "--slots", "4")


@pytest.fixture
def server() -> Iterator[ServerUnderTest]:
    """A server whose calls have no libraries. Asserts at the end that it leaves no process."""
    try:
        choose_level("auto")
    except IsolationError as error:
        pytest.skip(str(error))
    with ServerUnderTest(OWN_PYTHON, FLAGS) as server:
        yield server
    assert not [line for line in server.leftovers if line.startswith("process: ")], server.leftovers


def run_calls(
    server: ServerUnderTest, count: int, on_answer: Callable[[int], None] = lambda _: None, in_flight: int = 64
) -> CallTally:
    """Run calls and assert that each has its own result once. `on_answer` is called with the number of each answer."""
    tally, answers = CallTally(count), itertools.count(1)
    calls = checked_calls(count, seed=7, weights=STDLIB_WEIGHTS)
    load = CheckedLoad(server, calls, tally, random.Random(7), lambda: on_answer(next(answers)))
    asyncio.run(asyncio.wait_for(load.run(in_flight), 300))
    assert (tally.lost, tally.doubled, tally.mismatched) == (0, 0, 0), tally.examples[:3]
    return tally


def test_every_call_gets_one_result_while_its_processes_are_killed(server: ServerUnderTest) -> None:
    injector = FaultInjector(random.Random(3))

    def kill(answers: int) -> None:
        if answers % 30 == 0:
            injector.kill_one(server.pid)

    tally = run_calls(server, 300, kill)
    assert injector.kills.total() >= 5, "the test needs some kills"
    assert tally.statuses["ok"] > 100, "at least a third of the calls must get their result in spite of the kills"


def test_a_killed_gateway_leaves_no_processes_and_its_calls_are_sent_again(server: ServerUnderTest) -> None:
    injector = FaultInjector(random.Random(4))

    def kill(answers: int) -> None:
        if answers in (50, 100):
            server.kill_gateway()
        elif answers % 40 == 0:
            injector.kill_one(server.pid)

    # With up to 256 of 400 calls in flight and at most 100 answers, some requests are unanswered at both kills.
    tally = run_calls(server, 400, kill, in_flight=256)
    assert tally.resent >= 2
    assert not server.leftovers


def test_no_call_is_unavailable_after_the_kills(server: ServerUnderTest) -> None:
    injector = FaultInjector(random.Random(5))

    def kill(answers: int) -> None:
        if answers % 20 == 0:
            injector.kill_one(server.pid)

    run_calls(server, 40, kill)
    tally = run_calls(server, 60)
    assert "unavailable" not in tally.statuses
