"""`serve`: runs the gateway process from its configuration to its exit.

A stop has these steps:

1. `/ready` answers 503, new calls are rejected, and calls that wait for a slot get `unavailable` with `Stopped`, so
   that their clients send them to another server.
2. Calls that an executor has already received may finish, for up to `drain_s`.
3. The listening socket and its connections are closed.
4. The executors get a "drain" frame, and are killed if they do not exit.

A second signal skips all of this and kills the executors.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

import uvloop
from aiohttp import web

from sandbox.errors import ClusterError, ConfigError
from sandbox.gateway import heap
from sandbox.gateway.calls.dispatcher import Dispatcher, Membership
from sandbox.gateway.calls.executor_handle import ExecutorProcess, Launch
from sandbox.gateway.http.listener import RESERVED_FDS, Listener, raise_connection_limit
from sandbox.gateway.http.siblings import SIBLINGS
from sandbox.gateway.metrics import VERSION
from sandbox.gateway.observe.traces import Traces
from sandbox.gateway.routes import build_app
from sandbox.settings.server import ServeConfig

log = logging.getLogger(__name__)

GC_THRESHOLDS = 20_000, 20, 20
"""Thresholds of the garbage collector. Queued calls are hundreds of thousands of objects without cycles. With Python's
own thresholds, the collector scans them so often that a large batch takes twice as long to admit."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that connections have to read their last bytes when the server stops."""


def serve(config: ServeConfig, launch: Launch = ExecutorProcess.launch, membership: Membership | None = None) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. Calls run on this machine, in executors that `launch`
    starts, or on the nodes of a `membership`."""
    try:
        heap.use_one_arena()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, launch, membership))
    except ConfigError as error:
        print(f"rstar-sandbox: {error}", file=sys.stderr)
        return 2 if isinstance(error, ClusterError) else 1
    except asyncio.CancelledError:
        print("rstar-sandbox: stopped by a second signal; unfinished calls are lost", file=sys.stderr)
        return 1
    return 0


async def _serve(config: ServeConfig, launch: Launch, membership: Membership | None) -> None:
    stop = _stop_on_signals()
    traces = Traces.from_environment(os.environ)
    async with Dispatcher(config, launch, membership) as dispatcher:
        if config.tenants is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, dispatcher.reload_tenants)
        runner = web.AppRunner(build_app(dispatcher, traces), shutdown_timeout=CLOSE_TIMEOUT_S)
        await runner.setup()
        try:
            listener, address = await _listen(runner, dispatcher)
            if await _wait_started_or_stopped(stop, dispatcher):
                _announce(dispatcher, address)
                _log_machine_limits(dispatcher, listener.max_connections)
                await stop.wait()
            await dispatcher.drain(config.drain_s)
            listener.close()
        except asyncio.CancelledError:
            dispatcher.kill()
            raise
        except ConfigError:
            await runner.cleanup()
            raise
        await runner.cleanup()
    if traces is not None:
        await asyncio.to_thread(traces.stop)


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets. A second signal cancels the caller's task."""
    stop = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, on_signal)
    return stop


async def _listen(runner: web.AppRunner, dispatcher: Dispatcher) -> tuple[Listener, str]:
    """Open the listening socket, and return it with its URL."""
    config = dispatcher.config
    assert runner.server is not None
    max_connections = raise_connection_limit(config.connections)
    listener = Listener(
        runner.server,
        max_connections,
        config.stall_s,
        dispatcher.connection_rejected,
        dispatcher.connection_stalled,
        shares_port=config.workers > 1,
    )
    if (siblings := runner.app.get(SIBLINGS)) is not None:
        await siblings.listen(runner.server)
    return listener, await listener.open(config.host, config.port)


async def _wait_started_or_stopped(stop: asyncio.Event, dispatcher: Dispatcher) -> bool:
    """Wait for the executors to be ready (True) or for a signal (False). Raises `ConfigError` if they cannot start."""
    async with asyncio.TaskGroup() as tasks:
        stopped = tasks.create_task(stop.wait())
        started = tasks.create_task(_start_failure(dispatcher))
        await asyncio.wait({stopped, started}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        started.cancel()
    if started.cancelled():
        return False
    if (error := started.result()) is not None:
        raise error
    return True


async def _start_failure(dispatcher: Dispatcher) -> ConfigError | None:
    """Return the reason why the executors did not start, or None. The error is returned and not raised, because the
    caller's task group would wrap it."""
    try:
        await dispatcher.started()
    except ConfigError as error:
        return error
    return None


def _log_machine_limits(dispatcher: Dispatcher, connections: int) -> None:
    """Log the cgroups of the calls, the settings that had to be lowered, the modules that calls cannot import, and what
    else the machines lack."""
    config = dispatcher.config
    reports = [executor.ready_report for executor in dispatcher.executors if executor.ready_report]
    lowered = []
    if connections < config.connections:
        lowered.append(f"connection limit lowered from {config.connections} to {connections}")
    for name, wanted, granted in (
        ("slots", config.slots, sum(report.slots for report in reports)),
        ("long_slots", config.long_slots, sum(report.long_slots for report in reports)),
    ):
        if granted < wanted:
            lowered.append(f"{name} lowered from {wanted} to {granted}")
    if lowered:
        enough = max(config.connections + RESERVED_FDS, *(report.wanted_fds for report in reports))
        log.warning("%s: not enough file descriptors (`ulimit -Hn %d` is enough)", ", ".join(lowered), enough)
    if cgroups := [report.cgroups for report in reports if report.cgroups]:
        log.info("cgroups: %s", "; ".join(cgroups))
    for warning in sorted({warning for report in reports for warning in report.warnings}):
        log.warning("%s", warning)
    missing = sorted({name for report in reports for name in report.missing_modules})
    if missing:
        log.warning(
            "calls cannot import %s: not installed for %s; install them there, or omit --python to use the runtime "
            "that `rstar-sandbox runtime` builds",
            ", ".join(missing),
            config.python or "the guest runtime of a node",
        )


def _announce(dispatcher: Dispatcher, address: str) -> None:
    """Print on stderr that the server is ready."""
    reports = [executor.ready_report for executor in dispatcher.executors if executor.ready_report]
    reason = dispatcher.config.isolation_reason
    isolation = next((report.isolation for report in reports if report.isolation), "?")
    python = next((report.python for report in reports if report.python), "?")
    worker = dispatcher.config.worker
    print(
        f"rstar-sandbox {VERSION} on {address}  isolation={isolation}  "
        f"slots={sum(report.slots for report in reports)}  python={python}"
        + (f"  isolation_reason={reason!r}" if reason else "")
        + (f"  worker={worker.number}" if worker else "")
        + "\n",
        end="",  # a line break of its own would be a second write, between which another worker can write
        file=sys.stderr,
        flush=True,
    )
