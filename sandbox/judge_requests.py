"""The client's requests to `/v1/judge`. Programs are sent in groups, each group as one request.

- A program gets a `JudgedProgram` of the server, or a `ServiceError` is raised.
- A failed request is sent again with the programs that have no result yet. A request that is refused as too large (HTTP
  413) is split in two.
- A program with a test that is `unavailable` for a reason in `RETRYABLE_ERRORS` is sent again too. After `retries`
  failures of its group in a row, the program gets this result.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from sandbox.errors import RequestRefused, ServiceError, TooLarge, Unreachable
from sandbox.judge import JudgedProgram, JudgeOutcome, Program
from sandbox.transport import CLOSED, MAX_BATCH_BYTES, Transport
from sandbox.types import RETRYABLE_ERRORS, Limits

MAX_TESTS = 4096
"""Tests in one request, except for a program that has more. `MAX_BATCH_BYTES` bounds a request as well."""
MAX_REQUESTS = 16
"""Requests at the same time."""

RawProgram = Mapping[str, Any]
"""A program as in `programs` of POST /v1/judge."""
_JudgedQueue = asyncio.Queue[tuple[int, JudgedProgram] | Exception]


async def judge_programs(
    transport: Transport, programs: Sequence[RawProgram], sizes: Sequence[tuple[int, int]], defaults: Mapping[str, Any]
) -> AsyncGenerator[tuple[int, JudgedProgram], None]:
    """Have programs judged, and yield the index and result of each. `sizes` is the result of `decode_all`. Raises
    `ServiceError`."""
    judged: _JudgedQueue = asyncio.Queue()

    def on_end(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            judged.put_nowait(ServiceError(CLOSED))

    judge_groups = partial(_judge_groups, transport, deque(_groups(programs, sizes)), defaults, judged)
    tasks = [transport.start(judge_groups) for _ in range(min(MAX_REQUESTS, len(programs)))]
    for task in tasks:
        task.add_done_callback(on_end)
    try:
        for _ in programs:
            item = await judged.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _judge_groups(
    transport: Transport, groups: deque[dict[int, RawProgram]], defaults: Mapping[str, Any], judged: _JudgedQueue
) -> None:
    """Have groups of programs judged one after another, and put the results into a queue."""
    try:
        while groups:
            waiting = groups.popleft()
            try:
                async for item in _judge_group(transport, waiting, defaults):
                    judged.put_nowait(item)
            except TooLarge:
                if len(waiting) == 1:
                    raise
                programs, half = list(waiting.items()), len(waiting) // 2
                groups.extendleft([dict(programs[half:]), dict(programs[:half])])
    except Exception as error:  # raised by the task that reads the queue
        judged.put_nowait(error)


async def _judge_group(
    transport: Transport, waiting: dict[int, RawProgram], defaults: Mapping[str, Any]
) -> AsyncGenerator[tuple[int, JudgedProgram], None]:
    """Have some programs, given by index, judged by one request at a time. Removes each from `waiting` when it has its
    result."""
    failures = 0
    while waiting:
        indexes = list(waiting)
        error: ServiceError | None = None
        endpoint, sent_at = transport.endpoints.next(), asyncio.get_running_loop().time()
        body = {"programs": list(waiting.values()), "defaults": defaults, **transport.batch_fields}
        try:
            encoded = json.dumps(body, default=_as_json).encode()
            async with aclosing(transport.stream_lines(endpoint, "/v1/judge", encoded)) as lines:
                async for line in lines:
                    judged, index = _decode_line(line, indexes)
                    if _is_retryable(judged) and failures < transport.retries:
                        continue
                    if "id" not in waiting.pop(index):
                        judged = judged.with_id(str(index))
                    yield index, judged
                    failures = endpoint.failures = 0
        except RequestRefused:
            raise
        except ServiceError as raised:
            error = raised
        if waiting:
            failures += 1
            retry_after_s = error.retry_after_s if error is not None else None
            transport.endpoints.count_failure(endpoint, sent_at, retry_after_s)
            if failures > transport.retries:
                raise error or Unreachable(f"the server ended its response with {len(waiting)} results missing")
            reason = str(error or f"{endpoint.url} returned unavailable tests")
            await asyncio.sleep(transport.retry_in_s(failures, f"{len(waiting)} programs", reason, retry_after_s))


def _groups(programs: Sequence[RawProgram], sizes: Sequence[tuple[int, int]]) -> list[dict[int, RawProgram]]:
    """Return the programs by index, in groups that are sent together. `sizes` is the result of `decode_all`."""
    groups: list[dict[int, RawProgram]] = []
    group_tests = group_bytes = 0
    for index, (tests, size_bytes) in enumerate(sizes):
        group_tests, group_bytes = group_tests + tests, group_bytes + size_bytes
        if not groups or group_tests > MAX_TESTS or group_bytes > MAX_BATCH_BYTES:
            groups.append({})
            group_tests, group_bytes = tests, size_bytes
        groups[-1][index] = programs[index]
    return groups


def decode_all(programs: Sequence[RawProgram], defaults: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Check programs before they are sent, and return the number of tests and the bytes of each. Raises `InvalidCall`
    with the index of a malformed one."""
    base = Program.decode_defaults(defaults)
    decoded = (Program.decode(program, base, f"programs[{index}]") for index, program in enumerate(programs))
    return [(len(program.tests), program.size) for program in decoded]


def _decode_line(line: Any, indexes: Sequence[int]) -> tuple[JudgedProgram, int]:
    try:
        return JudgedProgram.decode(line), indexes[line["index"]]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise Unreachable(f"the server sent something that is no result: {error!r:.200}") from None


def _is_retryable(judged: JudgedProgram) -> bool:
    return any(
        test.outcome is JudgeOutcome.UNAVAILABLE and test.message.partition(":")[0] in RETRYABLE_ERRORS
        for test in judged.tests
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, Limits):
        return {name: getattr(value, name) for name in Limits.__slots__}
    raise TypeError(f"expected a value that JSON can represent, got {type(value).__name__}")
