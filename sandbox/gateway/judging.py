"""Runs judged programs as calls of the dispatcher: compile once, run the tests, compare or check their answers.

    program -> waves of tests -> calls -> results -+-> no answer -------------> outcome
                                                   +-> comparison (here) -----> outcome
                                                   +-> call of the checker ---> outcome

- The code of a program or a checker is compiled in a call of its own if at least `MIN_CALLS_TO_COMPILE` calls of a wave
  use it. If this call fails, the others bring no compiled code and compile for themselves.
- Without `stop_at_first_failure` all tests are one wave, unless there are very many (`MAX_WAVE_CALLS`) or their calls
  are too large (`MAX_WAVE_BYTES`). With it the waves have 1, 2, 4, ... tests. Which tests are skipped depends only on
  the outcomes of the tests before them.
- A wave that does not fit into the queue waits for room. The waves of a tenant wait in the order of their arrival.
  After `queue_timeout_s` the tests of a waiting wave become `unavailable`, so that an accepted request gets an answer
  for each test.
- The results of a wave count as unread until their outcomes are known, so their memory is bounded.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

from sandbox.comparison import Comparison, Steps, compare_json, compare_texts
from sandbox.errors import Overloaded, RequestRefused
from sandbox.gateway.calls.batch import Batch, result_bytes
from sandbox.gateway.calls.call_table import Outstanding
from sandbox.gateway.calls.dispatcher import STOPPED_MESSAGE, Dispatcher
from sandbox.judge import (
    FAILURES,
    JudgedProgram,
    JudgedTest,
    JudgeOutcome,
    Program,
    ProgramTest,
    checker_outcome,
    compile_call,
    compiled_code,
    count_values,
    unanswered_test,
    with_compiled,
)
from sandbox.tenants import Tenant
from sandbox.types import Call, EncodedResult, unavailable_result

log = logging.getLogger(__name__)

MIN_CALLS_TO_COMPILE = 3
"""Calls with the same code for which a call that only compiles is worth its own cost."""
MAX_WAVE_BYTES = 32 << 20
"""A wave ends with the call with which its calls have this many bytes. The code counts for each call."""
MAX_WAVE_CALLS = 2048
"""Calls of one wave, which are built and admitted in one step of the event loop, 5 us each."""
MAX_PROGRAMS_AT_ONCE = 1024
"""Programs of a request that are judged at the same time, each by a task."""
ADMISSION_RETRY_S = 0.05
"""Seconds between two attempts to admit a wave."""
PROGRAMS_PER_YIELD = 1024
"""Programs whose size is added up before the task yields to the event loop."""
RESULTS_PER_YIELD = 32
"""Results judged before the task yields to the event loop."""
MAX_UNEXPECTED_VALUES = 50_000
"""JSON values, counted as `[`, `{` and `,`, above which a returned value is not decoded if the expected value has far
fewer. Hostile code can return millions, and decoding them would block the event loop for a second, even in a thread,
since `json.loads` keeps Python's lock."""
MAX_UNKNOWN_VALUES = 1_000_000
"""The same for a test without an expected value, whose answer a checker judges."""
CHECKER_DEPTH = 100
"""A returned value must be readable inside this many more lists, since a checker that decodes it may have so many more
frames on its stack."""


class Judge:
    """Judges programs on one dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._admission_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One lock per tenant, so that only one task of a tenant retries the admission and the others wait in order."""

    async def check_room(self, programs: Sequence[Program], owner: Tenant | None) -> None:
        """Check that the queue can take one call for each test now. Raises `Overloaded` or `RequestRefused`. `owner` is
        the tenant of the request's token."""
        self._dispatcher.check_accepting()
        wanted: defaultdict[str, Outstanding] = defaultdict(Outstanding)
        for number, program in enumerate(programs):
            if number % PROGRAMS_PER_YIELD == PROGRAMS_PER_YIELD - 1:
                await asyncio.sleep(0)
            wanted[program.call.tenant].add(len(program.tests), program.size)
        self._dispatcher.call_table.check_capacity(wanted, owner, monotonic())

    async def judge_all(
        self,
        programs: Sequence[tuple[int, Program]],
        queue_timeout_s: float,
        owner: Tenant | None,
        on_judged: Callable[[int, JudgedProgram], None],
    ) -> None:
        """Judge programs, given with their indexes, and report each as it is judged."""
        waiting = iter(programs)

        async def judge_next() -> None:
            for index, program in waiting:
                try:
                    judged = await self.judge(program, queue_timeout_s, owner)
                except Exception:  # of one program; the others are judged nevertheless
                    log.exception("judging a program failed")
                    message = "internal error of the server; its log has the details"
                    judged = JudgedProgram(program.call.id, JudgeOutcome.UNAVAILABLE, message=message)
                on_judged(index, judged)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(len(programs), MAX_PROGRAMS_AT_ONCE)):
                tasks.create_task(judge_next())

    async def judge(self, program: Program, queue_timeout_s: float, owner: Tenant | None = None) -> JudgedProgram:
        """Judge one program for the tenant of the request's token."""
        call, clamped = self.clamped(program.call, owner)
        program = replace(program, call=call)
        run = _ProgramRun(self, program, queue_timeout_s, owner)
        tests: list[JudgedTest] = []
        sizes = [call.size + test.size for test in program.tests]
        for start, end in _waves(sizes, doubling=program.stop_at_first_failure):
            tests += await run.judge_wave(program.tests[start:end], program.calls(start, end))
            failed = next((index for index, test in enumerate(tests) if test.outcome in FAILURES), None)
            if program.stop_at_first_failure and failed is not None:
                skipped = len(program.tests) - failed - 1
                tests[failed + 1 :] = [JudgedTest(JudgeOutcome.SKIPPED)] * skipped
                break
        return JudgedProgram.of(program.call.id, tuple(tests), clamped)

    @asynccontextmanager
    async def running(
        self, calls: Sequence[Call], queue_timeout_s: float, owner: Tenant | None, *, reads_results: bool
    ) -> AsyncIterator[_Results]:
        """Run calls that `clamped` has returned. Calls that are unfinished at the end of the block are cancelled.
        `reads_results`: whether they check results that are unread (`Batch.reads_results`)."""
        batch = Batch(len(calls), queue_timeout_s)
        batch.tenant, batch.reads_results = owner, reads_results
        results = _Results(batch, self._dispatcher)
        for index, call in enumerate(calls):
            batch.add(index, call, "", {})
            if owner is not None:
                batch.calls[-1].set_tenant(owner)
        try:
            try:
                await self._admit(batch, batch.calls[0].tenant)
            except (Overloaded, RequestRefused) as error:
                stopped = self._dispatcher.is_draining
                reason = ("Stopped", STOPPED_MESSAGE) if stopped else ("QueueTimeout", str(error))
                for index in range(len(calls)):
                    batch.set_result(index, unavailable_result("", *reason).encode(binary=True))
            yield results
        finally:
            self._dispatcher.cancel(batch)

    def clamped(self, call: Call, owner: Tenant | None) -> tuple[Call, dict[str, float]]:
        """Lower the limits of a call to the maxima of the server and of its tenant. Returns the call, and the lowered
        limits."""
        limits, lowered = call.limits.clamped(self._dispatcher.config.max_limits)
        if owner is not None:
            limits, lowered_further = limits.clamped(owner.max_limits)
            lowered |= lowered_further
        return (call.with_limits(limits) if lowered else call), lowered

    async def _admit(self, batch: Batch, tenant: str) -> None:
        """Admit a batch, and wait for room in the queue if necessary. Raises `Overloaded` after its `queue_timeout_s`
        or if the server stops, and `RequestRefused` if the queue is too small for it."""
        lock = self._admission_locks.setdefault(tenant, asyncio.Lock())
        give_up_at = monotonic() + batch.queue_timeout_s
        async with lock:
            while True:
                try:
                    return self._dispatcher.submit(batch)
                except Overloaded:
                    if self._dispatcher.is_draining or monotonic() + ADMISSION_RETRY_S > give_up_at:
                        raise
                await asyncio.sleep(ADMISSION_RETRY_S)
                batch.queue_timeout_s = give_up_at - monotonic()


class _Results:
    """The results of running calls, in the order in which they arrive."""

    def __init__(self, batch: Batch, dispatcher: Dispatcher) -> None:
        self._batch = batch
        self._dispatcher = dispatcher
        self._finished: asyncio.Queue[int] = asyncio.Queue()
        self._count = len(batch.results)
        batch.on_result = self._finished.put_nowait

    async def __aiter__(self) -> AsyncIterator[tuple[int, EncodedResult]]:
        """Yield the index and result of each call."""
        for number in range(self._count):
            if number % RESULTS_PER_YIELD == RESULTS_PER_YIELD - 1:
                await asyncio.sleep(0)
            index = await self._finished.get()
            yield index, self._batch.pop_result(index)

    def release(self, result: EncodedResult) -> None:
        """Count a result as read."""
        if self._batch.unread_bytes:
            self._dispatcher.call_table.results_read(self._batch, result_bytes(result))


class _ProgramRun:
    """The run of one program: its compiled code, and the outcomes of its waves."""

    def __init__(self, judge: Judge, program: Program, queue_timeout_s: float, owner: Tenant | None) -> None:
        self._judge = judge
        self._program = program
        self._queue_timeout_s = queue_timeout_s
        self._owner = owner
        self._compiled: dict[str, bytes] = {}
        """Compiled code of the program and of the checker, by source."""

    async def judge_wave(self, tests: Sequence[ProgramTest], calls: Sequence[Call]) -> list[JudgedTest]:
        """Run the calls of some tests, and return the results of the tests."""
        judged: dict[int, JudgedTest] = {}
        to_check: dict[int, EncodedResult] = {}
        calls = await self._with_compiled(calls)
        async with self._running(calls) as results:
            async for index, result in results:
                if (unanswered := unanswered_test(tests[index], result)) is not None:
                    judged[index] = unanswered
                elif not self._program.checker:
                    is_right = await _is_right(tests[index], result, self._program.comparison)
                    outcome = JudgeOutcome.PASSED if is_right else JudgeOutcome.WRONG_ANSWER
                    judged[index] = JudgedTest.of(outcome, result)
                elif _is_readable(tests[index], result):
                    to_check[index] = result
                    continue
                else:
                    judged[index] = JudgedTest.of(JudgeOutcome.WRONG_ANSWER, result)
                results.release(result)
            if to_check:
                checks = {index: self._program.checker_call(tests[index], result) for index, result in to_check.items()}
                for index, (outcome, message) in (await self._run_checkers(checks)).items():
                    judged[index] = JudgedTest.of(outcome, to_check[index], message)
        return [judged[index] for index in range(len(calls))]

    async def _run_checkers(self, checks: dict[int, Call]) -> dict[int, tuple[JudgeOutcome, str]]:
        """Run the calls of checkers, given by the index of the test. Return outcomes and messages by this index."""
        indexes = list(checks)
        clamped = [self._judge.clamped(check, self._owner)[0] for check in checks.values()]
        calls = await self._with_compiled(clamped, reads_results=True)
        outcomes = {}
        for start, end in _waves([call.size for call in calls], doubling=False):
            async with self._running(calls[start:end], reads_results=True) as results:
                async for number, result in results:
                    outcomes[indexes[start + number]] = checker_outcome(result)
                    results.release(result)
        return outcomes

    async def _with_compiled(self, calls: Sequence[Call], *, reads_results: bool = False) -> Sequence[Call]:
        """Compile each code that many of the calls share, and return the calls with their compiled code."""
        any_call = {call.code: call for call in calls}
        for code, count in Counter(call.code for call in calls).items():
            if count >= MIN_CALLS_TO_COMPILE and code not in self._compiled:
                self._compiled[code] = await self._compile(any_call[code], reads_results)
        return [with_compiled(call, self._compiled.get(call.code, b"")) for call in calls]

    async def _compile(self, call: Call, reads_results: bool) -> bytes:
        async with self._running([compile_call(call)], reads_results=reads_results) as results:
            async for _, result in results:
                return compiled_code(result)
        return b""

    def _running(self, calls: Sequence[Call], *, reads_results: bool = False) -> AbstractAsyncContextManager[_Results]:
        return self._judge.running(calls, self._queue_timeout_s, self._owner, reads_results=reads_results)


def _waves(sizes: Sequence[int], *, doubling: bool) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each wave of calls with these sizes in bytes."""
    start, max_calls = 0, 1 if doubling else MAX_WAVE_CALLS
    while start < len(sizes):
        end, size_bytes = start, 0
        while end < len(sizes) and end - start < max_calls and size_bytes < MAX_WAVE_BYTES:
            size_bytes += sizes[end]
            end += 1
        yield start, end
        start, max_calls = end, min(2 * max_calls, MAX_WAVE_CALLS)


async def _is_right(test: ProgramTest, result: EncodedResult, comparison: Comparison) -> bool:
    """Return whether the answer of a program equals the expected one."""
    if not test.function_call:
        return await _finish(compare_texts(test.expected or "", result["stdout"], comparison))
    try:
        value = _returned_value(test, result)
    except (ValueError, RecursionError):  # the program has forged its report
        return False
    return await _finish(compare_json(json.loads(test.expected or ""), value, comparison))


def _is_readable(test: ProgramTest, result: EncodedResult) -> bool:
    """Return whether a checker can read the answer. A forged one is wrong, since the checker could fail because of it:
    the test would be unjudged, and the program would have no score."""
    if test.function_call:
        try:
            _returned_value(test, result)
        except (ValueError, RecursionError):
            return False
    return True


def _returned_value(test: ProgramTest, result: EncodedResult) -> Any:
    """Return what a function has returned. Raises ValueError or RecursionError if the program has forged its report."""
    text = result["value"] or ""
    if _has_too_many_values(text, test.expected):
        raise ValueError("far more values than expected")
    # The brackets leave a checker some levels of nesting, since it has more frames on its stack.
    value = json.loads("[" * CHECKER_DEPTH + text + "]" * CHECKER_DEPTH)
    for _ in range(CHECKER_DEPTH):
        (value,) = value  # raises ValueError if the text was no JSON by itself
    return value


def _has_too_many_values(text: str, expected: str | None) -> bool:
    """Return whether JSON text has far more values than the expected JSON text, so that it cannot equal it.

    No JSON text of a value has more of the counted characters than that of `json.dumps`, which escapes none of them.
    Only text that repeats keys of an object (1 and "1") may have more; the factor 2 leaves room for it.
    """
    values = count_values(text)
    if expected is None:
        return values > MAX_UNKNOWN_VALUES
    return values > MAX_UNEXPECTED_VALUES and values > 2 * count_values(expected)


async def _finish(steps: Steps) -> bool:
    """Run a comparison to its end. Yields to the event loop after each step."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)
        await asyncio.sleep(0)
