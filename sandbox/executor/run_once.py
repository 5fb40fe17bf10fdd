"""Runs one call without a gateway: starts an executor with one slot, runs the call in it, and ends the executor.

The call has as many attempts as a call of a server. They are counted here, since there is no call table (the gateway's
list of calls).
"""

from __future__ import annotations

from dataclasses import replace

import trio

from sandbox import machine
from sandbox.errors import SandboxError, first_error
from sandbox.executor.executor import Executor
from sandbox.executor.pool_plan import plan_pools
from sandbox.executor.profile_choice import ProfileTree, imported_modules
from sandbox.settings.profiles import check_profile
from sandbox.settings.server import ZYGOTE_PROFILES, ExecutorConfig, within_memory
from sandbox.types import Call, EncodedCall, EncodedResult, Profile, Result, clamp, used_up_result


def run_once(call: Call, config: ExecutorConfig) -> Result:
    """Run one call and wait for its result. Raises `SandboxError` if the machine cannot run calls. Raises `InvalidCall`
    if no profile has the name that the call requests."""
    check_profile(call.profile, config.own_profiles, "call")
    tree = ProfileTree(config.own_profiles)
    profile = tree.choose(call.profile, imported_modules(call.code))
    lineage = (profile, *tree.ancestors(profile))  # the executor keeps no zygotes for other profiles
    own_profiles = tuple(own for own in config.own_profiles if own.name in lineage)
    built_in = profile if profile in ZYGOTE_PROFILES else Profile.BARE.value  # every pool has a zygote for `bare`
    config = replace(config, profiles=(built_in,), own_profiles=own_profiles, zygote_pools=1, slots=1)
    max_limits = within_memory(call.limits, machine.memory_limit() >> 20)
    encoded, clamped = clamp(call.encode(binary=True), max_limits)
    try:
        result = Result.decode(trio.run(_run, encoded, config))
    except BaseExceptionGroup as errors:
        if errors.subgroup(KeyboardInterrupt):
            raise KeyboardInterrupt from None
        ours, rest = errors.split(SandboxError)
        if ours is None or rest is not None:
            raise
        raise first_error(ours) from None
    return replace(result, clamped=clamped)


async def _run(encoded: EncodedCall, config: ExecutorConfig) -> EncodedResult:
    results: list[EncodedResult] = []
    has_result = trio.Event()
    attempts, may_have_run = 0, False

    def start() -> None:
        nonlocal attempts
        attempts += 1
        executor.submit(0, encoded)
        executor.start_queued_calls()

    def on_results(ended: list[tuple[int, EncodedResult]]) -> None:
        results.extend({**result, "attempts": attempts} for _, result in ended)
        has_result.set()

    def on_lost(seq: int, reason: str, has_started: bool) -> None:
        nonlocal may_have_run
        may_have_run |= has_started
        if attempts < config.attempts:
            start()
        else:
            result = used_up_result(encoded.get("id", ""), attempts, reason, has_started=may_have_run)
            on_results([(seq, result.encode(binary=True))])

    executor = Executor(plan_pools(config), on_results, on_lost)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor.run)
        await executor.wait_ready()
        start()
        await has_result.wait()
        nursery.cancel_scope.cancel()
    return results[0]
