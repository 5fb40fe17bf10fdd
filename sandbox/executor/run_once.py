"""One call, without a gateway: the same executor, jail and zygotes, for as long as the call takes."""

from __future__ import annotations

from dataclasses import replace

import trio

from sandbox import machine
from sandbox.config import ExecutorConfig, within_memory
from sandbox.errors import SandboxError
from sandbox.executor import profile_choice
from sandbox.executor.executor import Executor
from sandbox.executor.result import WireResult
from sandbox.types import Call, Profile, Result


def run_once(call: Call, config: ExecutorConfig) -> Result:
    """Run one call and wait for it. Raises `SandboxError` when the machine cannot run any."""
    profile = (
        profile_choice.choose(profile_choice.imported(call.code)) if call.profile is Profile.AUTO else call.profile
    )
    alone = replace(config, profiles=(profile.value,), zygote_pools=1, slots=1)
    limits, clamped = call.limits.clamped(within_memory(call.limits, machine.memory_limit() >> 20))
    try:
        return replace(Result.decode(trio.run(_run, replace(call, limits=limits), alone)), clamped=clamped)
    except BaseExceptionGroup as errors:
        if errors.subgroup(KeyboardInterrupt):
            raise KeyboardInterrupt from None
        ours, rest = errors.split(SandboxError)
        if ours is None or rest is not None:
            raise
        raise _first(ours) from None


async def _run(call: Call, config: ExecutorConfig) -> WireResult:
    results: list[WireResult] = []
    answered = trio.Event()

    def answer(_seq: int, result: WireResult) -> None:
        results.append(result)
        answered.set()

    executor = Executor(config, answer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor.run)
        await executor.wait_ready()
        executor.submit(0, call.encode(binary=True))
        executor.pump()
        await answered.wait()
        nursery.cancel_scope.cancel()
    return results[0]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
