"""Waiting for asynchronous work from synchronous code, and not leaving it behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import wait
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trainer.rollout.loop_thread import LoopThread


async def sleep_bounded() -> str:
    async with asyncio.timeout(60):  # which counts the cancellations of its task
        await asyncio.sleep(0)
    return "slept"


def test_a_job_runs_in_the_loop_thread_and_returns_its_result() -> None:
    async def where(offset: int, *, times: int) -> int:
        return threading.get_ident() + offset * times

    with LoopThread() as loop_thread:
        assert loop_thread.run(where, 0, times=2) != threading.get_ident()
        assert loop_thread.run(where, 3, times=2) - loop_thread.run(where, 0, times=2) == 6


def test_an_error_is_raised_with_its_traceback_and_the_loop_continues() -> None:
    async def fail() -> None:
        raise LookupError("here")

    async def fine() -> int:
        return 1

    with LoopThread() as loop_thread:
        with pytest.raises(LookupError, match="here") as caught:
            loop_thread.run(fail)
        assert caught.traceback[-1].name == "fail"
        assert loop_thread.run(fine) == 1


def test_context_managers_are_left_in_their_task_in_reverse_order() -> None:
    left: list[str] = []

    @asynccontextmanager
    async def room(name: str) -> AsyncIterator[str]:
        task = asyncio.current_task()  # task groups and time-outs must be left by the task that entered them
        try:
            yield name
        finally:
            assert asyncio.current_task() is task
            left.append(name)

    def leave_badly() -> None:
        with LoopThread() as loop_thread:
            assert loop_thread.enter(room("outer")) == "outer"
            assert loop_thread.enter(room("inner")) == "inner"
            raise LookupError("in between")

    with pytest.raises(LookupError, match="in between"):
        leave_badly()
    assert left == ["inner", "outer"]


def test_ctrl_c_cancels_the_job_and_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = threading.Event()
    ended: list[str] = []

    async def work() -> None:
        try:
            has_begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    waits: list[Any] = []

    def interrupted_once(*args: Any, **more: Any) -> Any:
        waits.append(args)
        if len(waits) == 1:
            has_begun.wait()
            raise KeyboardInterrupt
        return wait(*args, **more)

    with LoopThread() as loop_thread:
        with monkeypatch.context() as patch:
            patch.setattr("trainer.rollout.loop_thread.wait", interrupted_once)
            with pytest.raises(KeyboardInterrupt):
                loop_thread.run(work)
        assert ended == ["work"]
        assert loop_thread.run(sleep_bounded) == "slept"


def test_a_job_that_still_runs_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = threading.Event()
    ended: list[str] = []

    async def work() -> None:
        try:
            has_begun.set()
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    def aborted(*args: Any, **more: Any) -> Any:  # also while it waits for the end
        has_begun.wait()
        raise KeyboardInterrupt

    with LoopThread() as loop_thread, monkeypatch.context() as patch:
        patch.setattr("trainer.rollout.loop_thread.wait", aborted)
        with pytest.raises(KeyboardInterrupt):
            loop_thread.run(work)
    assert ended == ["work"]


def test_a_job_for_an_ended_loop_is_an_error_at_once() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            yield
            group.create_task(fail())

    async def fail() -> None:
        raise LookupError("its own")

    def use() -> None:
        with LoopThread() as loop_thread:
            loop_thread.enter(broken())

    with pytest.raises(ExceptionGroup) as caught:
        use()
    assert caught.group_contains(LookupError, match="its own")
