"""Runs one call without a gateway, in the same executor, jail and zygotes. They end when the call has ended."""

from __future__ import annotations

from dataclasses import replace

import trio

from sandbox import machine
from sandbox.config import ZYGOTE_PROFILES, ExecutorConfig, within_memory
from sandbox.errors import SandboxError, first_error
from sandbox.executor.executor import Executor
from sandbox.executor.profile_choice import ProfileTree, imported_modules
from sandbox.own_profiles import check_profile
from sandbox.types import Call, EncodedResult, Profile, Result


def run_once(call: Call, config: ExecutorConfig) -> Result:
    """Run one call and wait for its result. Raises `SandboxError` if the machine cannot run calls, and `InvalidCall`
    if there is no profile of the name."""
    check_profile(call.profile, config.own_profiles, "call")
    tree = ProfileTree(config.own_profiles)
    profile = tree.choose(call.profile, imported_modules(call.code))
    lineage = (profile, *tree.ancestors(profile))
    own_profiles = tuple(own for own in config.own_profiles if own.name in lineage)
    built_in = profile if profile in ZYGOTE_PROFILES else Profile.BARE.value
    config = replace(config, profiles=(built_in,), own_profiles=own_profiles, zygote_pools=1, slots=1)
    limits, clamped = call.limits.clamped(within_memory(call.limits, machine.memory_limit() >> 20))
    try:
        result = Result.decode(trio.run(_run, replace(call, limits=limits), config))
    except BaseExceptionGroup as errors:
        if errors.subgroup(KeyboardInterrupt):
            raise KeyboardInterrupt from None
        ours, rest = errors.split(SandboxError)
        if ours is None or rest is not None:
            raise
        raise first_error(ours) from None
    return replace(result, clamped=clamped)


async def _run(call: Call, config: ExecutorConfig) -> EncodedResult:
    results: list[EncodedResult] = []
    has_result = trio.Event()

    def on_result(_seq: int, result: EncodedResult) -> None:
        results.append(result)
        has_result.set()

    executor = Executor(config, on_result)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor.run)
        await executor.wait_ready()
        executor.submit(0, call.encode(binary=True))
        executor.start_queued_calls()
        await has_result.wait()
        nursery.cancel_scope.cancel()
    return results[0]
