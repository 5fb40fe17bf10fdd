"""Tests of `LoopThread`, a thread that runs an event loop. Synchronous code runs jobs in this thread, gets their
results and errors, and leaves no job running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import wait
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trainer.rollout.loop_thread import LoopThread


async def sleep_with_timeout() -> str:
    """Raises `CancelledError` if an earlier cancellation of the task is still pending, as `asyncio.timeout` does."""
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
    return "slept"


def test_a_job_runs_in_the_loop_thread_and_returns_its_result() -> None:
    async def thread_and_product(factor: int, *, other_factor: int) -> tuple[int, int]:
        return threading.get_ident(), factor * other_factor

    with LoopThread() as loop_thread:
        thread, product = loop_thread.run(thread_and_product, 3, other_factor=2)
    assert thread != threading.get_ident()
    assert product == 6


def test_an_error_is_raised_with_its_traceback_and_the_loop_continues() -> None:
    async def fail() -> None:
        raise LookupError("here")

    async def succeed() -> int:
        return 1

    with LoopThread() as loop_thread:
        with pytest.raises(LookupError, match="here") as caught:
            loop_thread.run(fail)
        assert caught.traceback[-1].name == "fail"
        assert loop_thread.run(succeed) == 1


def test_context_managers_are_left_in_their_task_in_reverse_order() -> None:
    exited: list[str] = []

    @asynccontextmanager
    async def manager(name: str) -> AsyncIterator[str]:
        task = asyncio.current_task()  # the task that enters a task group or a timeout must also leave it
        try:
            yield name
        finally:
            assert asyncio.current_task() is task
            exited.append(name)

    def enter_and_raise() -> None:
        with LoopThread() as loop_thread:
            assert loop_thread.enter(manager("outer")) == "outer"
            assert loop_thread.enter(manager("inner")) == "inner"
            raise LookupError("in the block")

    with pytest.raises(LookupError, match="in the block"):
        enter_and_raise()
    assert exited == ["inner", "outer"]


def test_ctrl_c_cancels_the_job_and_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    has_started = threading.Event()
    ended: list[str] = []

    async def run_until_cancelled() -> None:
        try:
            has_started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("job")

    num_waits = 0

    def interrupt_first_wait(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 1:
            has_started.wait()
            raise KeyboardInterrupt
        return wait(*args, **kwargs)

    with LoopThread() as loop_thread:
        with monkeypatch.context() as patch:
            patch.setattr("trainer.rollout.loop_thread.wait", interrupt_first_wait)
            with pytest.raises(KeyboardInterrupt):
                loop_thread.run(run_until_cancelled)
        assert ended == ["job"]
        assert loop_thread.run(sleep_with_timeout) == "slept"


def test_a_job_that_still_runs_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    has_started = threading.Event()
    ended: list[str] = []

    async def run_until_cancelled() -> None:
        try:
            has_started.set()
            await asyncio.Event().wait()
        finally:
            ended.append("job")

    def interrupt_every_wait(*args: Any, **kwargs: Any) -> Any:  # also the one after the job's cancellation
        has_started.wait()
        raise KeyboardInterrupt

    with LoopThread() as loop_thread, monkeypatch.context() as patch:
        patch.setattr("trainer.rollout.loop_thread.wait", interrupt_every_wait)
        with pytest.raises(KeyboardInterrupt):
            loop_thread.run(run_until_cancelled)
    assert ended == ["job"]


def test_an_error_of_a_context_manager_is_raised_at_the_end_of_the_block() -> None:
    @asynccontextmanager
    async def fail_at_exit() -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            yield
            group.create_task(fail())

    async def fail() -> None:
        raise LookupError("of the group's task")

    def enter_and_leave() -> None:
        with LoopThread() as loop_thread:
            loop_thread.enter(fail_at_exit())

    with pytest.raises(ExceptionGroup) as caught:
        enter_and_leave()
    assert caught.group_contains(LookupError, match="of the group's task")


def test_a_started_job_runs_beside_its_caller_and_before_later_jobs() -> None:
    order: list[str] = []

    async def work(name: str, released: threading.Event) -> str:
        await asyncio.to_thread(released.wait)
        order.append(name)
        return name

    first_may_end, now = threading.Event(), threading.Event()
    now.set()
    with LoopThread() as loop_thread:
        first, second = loop_thread.start(work, "first", first_may_end), loop_thread.start(work, "second", now)
        order.append("caller")
        first_may_end.set()
        assert (loop_thread.result(second), loop_thread.result(first)) == ("second", "first")
    assert order == ["caller", "first", "second"]


def test_the_error_of_a_started_job_is_raised_where_its_result_is_awaited() -> None:
    async def fail() -> None:
        raise LookupError("here")

    with LoopThread() as loop_thread:
        job = loop_thread.start(fail)
        with pytest.raises(LookupError, match="here"):
            loop_thread.result(job)


def test_leaving_the_block_cancels_the_running_job() -> None:
    ended: list[str] = []

    async def wait_for_ever(started: threading.Event) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    started = threading.Event()
    with LoopThread() as loop_thread:
        loop_thread.start(wait_for_ever, started)
        started.wait()
    assert ended == ["cancelled"]


def test_leaving_the_block_drops_jobs_that_have_not_begun() -> None:
    begun: list[str] = []
    first_began = threading.Event()

    async def work(name: str) -> None:
        begun.append(name)
        first_began.set()
        if name == "first":
            await asyncio.Event().wait()

    with LoopThread() as loop_thread:
        loop_thread.start(work, "first")
        first_began.wait()
        second = loop_thread.start(work, "second")
    assert begun == ["first"]
    assert second.cancelled()
