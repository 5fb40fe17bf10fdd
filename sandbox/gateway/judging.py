"""Runs judged programs as calls of the dispatcher: compile once, run the tests, compare or check their answers.

    program -> waves of tests -> calls -> results -+-> no answer -------------> outcome
                                                   +-> comparison (here) -----> outcome
                                                   +-> call of the checker ---> outcome

- A wave is the tests of a program that are submitted together.
- The code of a program or a checker is compiled in a call of its own if at least `MIN_CALLS_TO_COMPILE` calls of a wave
  use it. If this call fails, the other calls get no compiled code and compile the code themselves.
- Without `stop_at_first_failure` all tests are one wave, unless there are very many (`MAX_WAVE_CALLS`) or their calls
  are too large (`MAX_WAVE_BYTES`). With it the waves have 1, 2, 4, ... tests. Which tests are skipped depends only on
  the outcomes of the tests before them.
- A wave that does not fit into the queue waits for room. The waves of a tenant wait in the order of their arrival.
  After `queue_timeout_s` the tests of a waiting wave become `unavailable`, so that an accepted request gets an answer
  for each test.
- The results of a wave count as unread until their outcomes are known, so their memory is bounded.
- A run ends early if its program is cancelled by its id, or if a call of it is poisonous (`Poison`). Its unfinished
  calls are cancelled, and its tests without an outcome become `unavailable` for this reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

from sandbox.errors import Overloaded, RequestRefused
from sandbox.gateway.calls.batch import Batch, next_request_number, result_bytes
from sandbox.gateway.calls.call_table import Outstanding
from sandbox.gateway.calls.dispatcher import CANCELLED_MESSAGE, STOPPED_MESSAGE, Dispatcher
from sandbox.judging.comparison import Comparison, Steps, compare_json, compare_texts
from sandbox.judging.programs import (
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
    reason_of,
    unanswered_test,
)
from sandbox.settings.tenants import Tenant
from sandbox.types import EncodedCall, EncodedResult, UnavailableReason, call_size, clamp, unavailable_result

log = logging.getLogger(__name__)

MIN_CALLS_TO_COMPILE = 3
"""If at least this many calls have the same code, a call that only compiles saves more time than it costs."""
MAX_WAVE_BYTES = 32 << 20
"""A wave gets no further call once its calls have this many bytes together. The code counts again for each call."""
MAX_WAVE_CALLS = 2048
"""Maximum number of calls in one wave. They are built and admitted in one step of the event loop, 5 us each."""
MAX_PROGRAMS_AT_ONCE = 1024
"""Maximum number of programs of a request that are judged at the same time, each by a task."""
ADMISSION_RETRY_S = 0.05
"""Seconds between two attempts to admit a wave."""
PROGRAMS_PER_YIELD = 1024
"""Programs whose size is added up before the task yields to the event loop."""
RESULTS_PER_YIELD = 32
"""Results judged before the task yields to the event loop."""
MAX_UNEXPECTED_VALUES = 50_000
"""A returned value with more JSON values than this is not decoded if the expected value has far fewer. Values are
counted as `[`, `{` and `,`. Hostile code can return millions of values. Decoding them would block the event loop for a
second, even in a thread, since `json.loads` keeps Python's lock."""
MAX_UNKNOWN_VALUES = 1_000_000
"""For a test without an expected value, whose answer a checker judges: a returned value with more JSON values than this
is not decoded."""
CHECKER_DEPTH = 100
"""A returned value must be decodable when it is nested in this many lists. A checker may decode it at a point where its
stack has as many frames."""


_CANCELLED = unavailable_result("", UnavailableReason.CANCELLED, CANCELLED_MESSAGE).encode(binary=True)


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """What the programs of one request have in common."""

    queue_timeout_s: float
    owner: Tenant | None
    """The tenant of the request's token."""
    admit: Callable[[Batch], None]
    """Admits a batch of calls to the call table and records that the request has them. Raises `Overloaded` or
    `RequestRefused`."""
    number: int = field(default_factory=next_request_number)
    """Number of the request. Its calls take turns with the calls of other requests."""


class Judge:
    """Judges programs on one dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._admission_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One lock per tenant: only one task of a tenant retries the admission, and its other tasks wait in order."""
        self._unfinished: set[ProgramRun] = set()

    async def check_room(self, programs: Sequence[Program], owner: Tenant | None) -> None:
        """Check that the queue can take one call for each test now. Raises `Overloaded` or `RequestRefused`. `owner` is
        the tenant of the request's token."""
        self._dispatcher.check_accepting()
        wanted: defaultdict[str, Outstanding] = defaultdict(Outstanding)
        for number, program in enumerate(programs):
            if number % PROGRAMS_PER_YIELD == PROGRAMS_PER_YIELD - 1:
                await asyncio.sleep(0)
            wanted[program.tenant].add(len(program.tests), program.size)
        self._dispatcher.call_table.check_capacity(wanted, owner, monotonic())

    async def judge_all(
        self,
        programs: Sequence[tuple[int, Program]],
        request: JudgeRequest,
        on_judged: Callable[[int, JudgedProgram], None],
    ) -> None:
        """Judge programs, given with their indexes, and report each as it is judged."""
        runs = [(index, ProgramRun(self, program, request)) for index, program in programs]
        waiting = iter(runs)

        async def judge_next() -> None:
            for index, run in waiting:
                try:
                    judged = await run.judge()
                except Exception:  # of one program; the others are judged nevertheless
                    log.exception("judging a program failed")
                    message = "internal error of the server; its log has the details"
                    judged = JudgedProgram(run.program.id, JudgeOutcome.UNAVAILABLE, message=message)
                self._unfinished.discard(run)
                on_judged(index, judged)

        self._unfinished.update(run for _, run in runs)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(runs), MAX_PROGRAMS_AT_ONCE)):
                    tasks.create_task(judge_next())
        finally:
            self._unfinished.difference_update(run for _, run in runs)

    def cancel(self, program_id: str, owner: Tenant | None) -> int:
        """Cancel all unfinished programs with this id: those of the tenant `owner`, or of all tenants if it is None.
        Their tests that have no outcome become `unavailable` with `Cancelled`. Returns the number of these tests."""
        found = [run for run in self._unfinished if run.program.id == program_id]
        return sum(run.cancel() for run in found if owner is None or run.belongs_to(owner))

    @asynccontextmanager
    async def running(
        self, calls: Sequence[EncodedCall], request: JudgeRequest, *, reads_results: bool
    ) -> AsyncIterator[_Results]:
        """Run calls that `clamped` has returned. Calls that are unfinished at the end of the block are cancelled.
        `reads_results` is `Batch.reads_results` of these calls."""
        batch, owner = Batch(len(calls), request.queue_timeout_s, request_number=request.number), request.owner
        batch.tenant, batch.reads_results = owner, reads_results
        results = _Results(batch, self._dispatcher)
        for index, call in enumerate(calls):
            batch.add(index, call, "", {})
            if owner is not None:
                batch.calls[-1].set_tenant(owner)
        try:
            try:
                await self._admit(batch, request.admit)
            except (Overloaded, RequestRefused) as error:
                stopped = self._dispatcher.is_draining
                reason = UnavailableReason.STOPPED if stopped else UnavailableReason.QUEUE_TIMEOUT
                message = STOPPED_MESSAGE if stopped else str(error)
                for index in range(len(calls)):
                    batch.set_result(index, unavailable_result("", reason, message).encode(binary=True))
            yield results
        finally:
            self._dispatcher.cancel(batch)

    def clamped(self, call: EncodedCall, owner: Tenant | None) -> tuple[EncodedCall, dict[str, float]]:
        """Lower the limits of a call to the maxima of the server and of its tenant. Returns the call, and the lowered
        limits."""
        call, lowered = clamp(call, self._dispatcher.config.max_limits)
        if owner is not None:
            call, lowered_further = clamp(call, owner.max_limits)
            lowered |= lowered_further
        return call, lowered

    def max_output_kb(self, owner: Tenant | None) -> int:
        """Return the maximum of `output_kb` of the server and of its tenant."""
        maxima = [self._dispatcher.config.max_limits, *([owner.max_limits] if owner is not None else [])]
        return min(limits.output_kb for limits in maxima)

    async def _admit(self, batch: Batch, admit: Callable[[Batch], None]) -> None:
        """Admit a batch, and wait for room in the queue if necessary. Raises `Overloaded` after its `queue_timeout_s`
        or if the server stops, and `RequestRefused` if the queue is too small for it."""
        lock = self._admission_locks.setdefault(batch.calls[0].tenant, asyncio.Lock())
        give_up_at = monotonic() + batch.queue_timeout_s
        async with lock:
            while True:
                try:
                    return admit(batch)
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


class ProgramRun:
    """Runs one program. It keeps the compiled code, and the results of the tests."""

    def __init__(self, judge: Judge, program: Program, request: JudgeRequest) -> None:
        self.program = program
        self._judge = judge
        self._request = request
        self._compiled: dict[str, bytes] = {}
        """Compiled code of the program and of the checker, by source."""
        self._tests: list[JudgedTest | None] = [None] * len(program.tests)
        self._rest: JudgedTest | None = None
        """Set if the run ends early: the result of the tests that have no outcome at that time."""
        self._scope: asyncio.Timeout | None = None
        """Surrounds the run of all waves, so that `cancel` can end it."""

    def belongs_to(self, owner: Tenant) -> bool:
        return self._request.owner is not None and self._request.owner.name == owner.name

    def cancel(self) -> int:
        """End the run early, with its unfinished calls. Returns the number of tests without an outcome."""
        if self._rest is not None:
            return 0
        self._rest = JudgedTest.of(
            JudgeOutcome.UNAVAILABLE, _CANCELLED, f"Cancelled: {CANCELLED_MESSAGE}", reason_of(_CANCELLED)
        )
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
        return self._tests.count(None)

    async def judge(self) -> JudgedProgram:
        """Run and judge all tests."""
        call, clamped = self._judge.clamped(self.program.call, self._request.owner)
        self.program = replace(self.program, call=call)
        if problem := self._too_long_expected():
            return JudgedProgram(self.program.id, JudgeOutcome.INVALID, message=problem)
        try:
            if self._rest is None:
                async with asyncio.timeout(None) as self._scope:  # `cancel` lets it expire
                    await self._judge_waves()
        except TimeoutError:
            if self._rest is None:
                raise
        tests = tuple(test or self._rest for test in self._tests)
        return JudgedProgram.of(self.program.id, tuple(test for test in tests if test is not None), clamped)

    def _too_long_expected(self) -> str:
        """Return an error message if the expected output of a test is longer than any program may print, else ""."""
        max_kb = self._judge.max_output_kb(self._request.owner)
        for index, test in enumerate(() if self.program.checker else self.program.tests):
            if test.expected_bytes > max_kb << 10:
                return (
                    f"tests[{index}].expected has {test.expected_bytes} bytes, and the maximum of output_kb is "
                    f"{max_kb}; start the server with a larger --max-output-kb, or use a checker"
                )
        return ""

    async def _judge_waves(self) -> None:
        program, num_tests = self.program, len(self.program.tests)
        code_size = call_size(program.call)
        sizes = [code_size + test.size for test in program.tests]
        max_output_kb = self._judge.max_output_kb(self._request.owner)
        for start, end in _waves(sizes, doubling=program.stop_at_first_failure):
            await self._judge_wave(start, program.calls(start, end, max_output_kb=max_output_kb))
            if self._rest is not None:
                break
            failed = next((index for index, test in enumerate(self._tests) if test and test.outcome in FAILURES), None)
            if program.stop_at_first_failure and failed is not None:
                skipped = num_tests - failed - 1
                self._tests[failed + 1 :] = [JudgedTest(JudgeOutcome.SKIPPED)] * skipped
                break

    async def _judge_wave(self, first: int, calls: Sequence[EncodedCall]) -> None:
        """Run the calls of the tests from index `first` on, and set the results of these tests."""
        to_check: dict[int, EncodedResult] = {}
        calls = await self._with_compiled(calls)
        async with self._running(calls) as results:
            async for number, result in results:
                index = first + number
                test = self.program.tests[index]
                if (unanswered := unanswered_test(test, result)) is not None:
                    self._tests[index] = unanswered
                    if reason_of(result) == UnavailableReason.POISON:
                        self._rest = unanswered
                        return
                elif not self.program.checker:
                    is_right = await _is_right(test, result, self.program.comparison)
                    outcome = JudgeOutcome.PASSED if is_right else JudgeOutcome.WRONG_ANSWER
                    self._tests[index] = JudgedTest.of(outcome, result)
                elif _is_readable(test, result):
                    to_check[index] = result
                    continue
                else:
                    self._tests[index] = JudgedTest.of(JudgeOutcome.WRONG_ANSWER, result)
                results.release(result)
            if to_check:
                await self._run_checkers(to_check)

    async def _run_checkers(self, to_check: Mapping[int, EncodedResult]) -> None:
        """Run the checker on results of calls, and set the results of their tests. `to_check` has the result of a call
        by the index of its test."""
        indexes = list(to_check)
        checks = [self.program.checker_call(self.program.tests[index], result) for index, result in to_check.items()]
        clamped = [self._judge.clamped(check, self._request.owner)[0] for check in checks]
        calls = await self._with_compiled(clamped, reads_results=True)
        for start, end in _waves([call_size(call) for call in calls], doubling=False):
            async with self._running(calls[start:end], reads_results=True) as results:
                async for number, result in results:
                    index = indexes[start + number]
                    outcome, message = checker_outcome(result)
                    self._tests[index] = JudgedTest.of(outcome, to_check[index], message, reason_of(result))
                    if reason_of(result) == UnavailableReason.POISON:
                        self._rest = self._tests[index]
                        return
                    results.release(result)

    async def _with_compiled(
        self, calls: Sequence[EncodedCall], *, reads_results: bool = False
    ) -> Sequence[EncodedCall]:
        """Compile each source that enough of the calls share (`MIN_CALLS_TO_COMPILE`), and return the calls with their
        compiled code."""
        any_call = {call["code"]: call for call in calls}
        for code, count in Counter(call["code"] for call in calls).items():
            if count >= MIN_CALLS_TO_COMPILE and code not in self._compiled:
                self._compiled[code] = await self._compile(any_call[code], reads_results)
        return [
            {**call, "compiled": compiled} if (compiled := self._compiled.get(call["code"])) else call for call in calls
        ]

    async def _compile(self, call: EncodedCall, reads_results: bool) -> bytes:
        async with self._running([compile_call(call)], reads_results=reads_results) as results:
            async for _, result in results:
                return compiled_code(result)
        return b""

    def _running(
        self, calls: Sequence[EncodedCall], *, reads_results: bool = False
    ) -> AbstractAsyncContextManager[_Results]:
        return self._judge.running(calls, self._request, reads_results=reads_results)


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
    """Return whether a checker can read the answer. An answer that cannot be read is forged, and counts as wrong
    without the checker. If the checker read it and failed, the test would be unjudged and the program would have no
    score."""
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
    # The brackets are the levels of nesting that are left for the checker (`CHECKER_DEPTH`).
    value = json.loads("[" * CHECKER_DEPTH + text + "]" * CHECKER_DEPTH)
    for _ in range(CHECKER_DEPTH):
        (value,) = value  # raises ValueError if the text was no JSON by itself
    return value


def _has_too_many_values(text: str, expected: str | None) -> bool:
    """Return whether JSON text has far more values than the expected JSON text, so that the two cannot be equal.

    `count_values` counts the characters `[`, `{` and `,`. `json.dumps`, which made the expected text, escapes none of
    them. So another JSON text of an equal value has no more of them, unless it repeats a key of an object (1 and "1").
    The factor 2 leaves room for this case.
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
