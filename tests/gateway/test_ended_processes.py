"""Calls that end at their deadline or are cancelled, on a real executor: no process is left, and their slot is free."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.jail import choose_level
from sandbox.settings.server import ServeConfig
from sandbox.types import Call, EncodedResult
from tests.executor.calling import OWN_PYTHON
from tests.jail.jails import tree_pids

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("needs_isolation")]

WAIT_S = 60
"""Seconds after which a test gives up waiting for a result or for the end of processes."""
ENDLESS = {
    "computes": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "has processes in sessions of their own": (
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\ntime.sleep(1000)"
    ),
}


@asynccontextmanager
async def one_slot() -> AsyncIterator[Dispatcher]:
    """Run a dispatcher with one real executor that has one slot."""
    level = choose_level("auto").level.value
    config = ServeConfig(
        isolation=level, profiles=("bare",), python=OWN_PYTHON, executors=1, zygote_pools=1, slots=1, long_slots=1
    )
    async with Dispatcher(config) as started:
        await started.started()
        yield started


async def run(dispatcher: Dispatcher, *calls: Call) -> list[EncodedResult]:
    batch, done = Batch(len(calls), 1000.0), asyncio.Event()
    for index, call in enumerate(calls):
        batch.add(index, call.encode(binary=True), call.id, {})
    batch.on_done = done.set
    dispatcher.submit(batch)
    async with asyncio.timeout(WAIT_S):
        await done.wait()
    return [batch.pop_result(index) for index in range(len(calls))]


def error_type(result: EncodedResult) -> str:
    assert result["error"] is not None
    return result["error"]["type"]


async def wait_for_processes(pids: set[int]) -> None:
    """Wait until this process has no descendants but `pids`."""
    async with asyncio.timeout(WAIT_S):
        while set(tree_pids(os.getpid())) - pids:  # noqa: ASYNC110  processes of jails are no children to wait for
            await asyncio.sleep(0.01)


async def test_calls_cancelled_by_their_id_leave_no_process() -> None:
    async with one_slot() as dispatcher:
        await run(dispatcher, Call("1"))
        pids = set(tree_pids(os.getpid()))
        running = asyncio.create_task(run(dispatcher, *[Call(ENDLESS["sleeps"], id="mine")] * 3))
        async with asyncio.timeout(WAIT_S):
            while set(tree_pids(os.getpid())) == pids:  # noqa: ASYNC110  until the process of a call has started
                await asyncio.sleep(0.01)
        assert await dispatcher.cancel_calls("mine", None) == 3
        assert list(map(error_type, await running)) == ["Cancelled"] * 3
        await wait_for_processes(pids)
        (after,) = await run(dispatcher, Call("6 * 7"))
        assert after["value"] == "42"


@pytest.mark.parametrize("code", ENDLESS.values(), ids=ENDLESS)
async def test_a_call_past_its_deadline_leaves_no_process_and_frees_its_slot(code: str) -> None:
    async with one_slot() as dispatcher:
        await run(dispatcher, Call("1"))
        pids = set(tree_pids(os.getpid()))
        # Two calls fill the window of the executor: one of them runs in the slot. The third call waits in the gateway.
        results = await run(dispatcher, *[Call(code, deadline_s=0.7)] * 3)
        assert list(map(error_type, results)) == ["Deadline"] * 3
        await wait_for_processes(pids)
        (after,) = await run(dispatcher, Call("6 * 7"))
        assert (after["status"], after["value"]) == ("ok", "42")
        assert dispatcher.executor_restarts == 0 and not dispatcher.call_table.outstanding.calls
