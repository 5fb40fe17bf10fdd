"""`serve`: from a configuration to a process that listens, and back to nothing.

The order of a stop: `/ready` says no and new calls are refused; admitted ones finish, for up to `drain_s`; the
listening socket and its connections close; the executors are told to go, then killed. A second signal kills at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop
from aiohttp import web

from sandbox.config import ServeConfig
from sandbox.errors import ConfigError
from sandbox.gateway.dispatch import Dispatcher
from sandbox.gateway.doors import Doors, grant_files
from sandbox.gateway.metrics import VERSION
from sandbox.gateway.node import ExecutorProcess, Launch
from sandbox.gateway.routes import build_app

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""What connections get to take their last bytes."""


def serve(config: ServeConfig, launch: Launch = ExecutorProcess.launch) -> int:
    """Serve until SIGINT or SIGTERM; the exit code."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, launch))
    except ConfigError as why:
        print(f"rstar-sandbox: {why}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("rstar-sandbox: stopped at once, calls in flight are lost", file=sys.stderr)
        return 1
    return 0


async def _serve(config: ServeConfig, launch: Launch) -> None:
    stop = _stop_on_signals()
    async with Dispatcher(config, launch) as dispatcher:
        runner = web.AppRunner(build_app(config, dispatcher), shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            doors, address = await _listen(runner, dispatcher)
            if await _started_unless(stop, dispatcher):
                print(_greeting(address, dispatcher), file=sys.stderr, flush=True)
                await stop.wait()
            await dispatcher.drain(config.drain_s)
            doors.close()
        except asyncio.CancelledError:
            dispatcher.kill()
            raise
        except ConfigError:
            await runner.cleanup()
            raise
        await runner.cleanup()


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; the second cancels the caller's task."""
    stop = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


async def _listen(runner: web.AppRunner, dispatcher: Dispatcher) -> tuple[Doors, str]:
    """Open the doors, and say where."""
    config = dispatcher.config
    assert runner.server is not None
    most = grant_files(config.connections)
    if most < config.connections:
        log.warning("%d connections instead of %d: that is what ulimit -n leaves room for", most, config.connections)
    doors = Doors(runner.server, most, config.stall_s, dispatcher.turned_away)
    return doors, await doors.open(config.host, config.port)


async def _started_unless(stop: asyncio.Event, dispatcher: Dispatcher) -> bool:
    """Wait for the executors, or for a signal; whether it was the former. Raises `ConfigError` if they cannot start."""
    async with asyncio.TaskGroup() as group:
        stopped = group.create_task(stop.wait())
        started = group.create_task(_reason_of(dispatcher))
        await asyncio.wait({stopped, started}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        started.cancel()
    if started.cancelled():
        return False
    if (why := started.result()) is not None:
        raise why
    return True


async def _reason_of(dispatcher: Dispatcher) -> ConfigError | None:
    """Why the executors did not start; as a value, since a task group would wrap it."""
    try:
        await dispatcher.started()
    except ConfigError as why:
        return why
    return None


def _greeting(address: str, dispatcher: Dispatcher) -> str:
    about = dispatcher.nodes[0].about
    slots = sum(node.about["slots"] for node in dispatcher.nodes)
    return (
        f"rstar-sandbox {VERSION} on {address}  isolation={about.get('isolation', '?')}  slots={slots}  "
        f"python={about.get('python', '?')}"
    )
