"""`serve`: from a configuration to a process that listens, and back to nothing.

The order of a stop: `/ready` says no, new calls are refused, and those that wait for a slot are answered `Stopped`, to
be sent elsewhere; those that an executor has finish, for up to `drain_s`; the listening socket and its connections
close; the executors are told to go, then killed. A second signal kills at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from functools import partial
from typing import Any

import uvloop
from aiohttp import web

from sandbox import machine
from sandbox.config import ServeConfig
from sandbox.errors import ConfigError
from sandbox.gateway import gateways, heap
from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.calls.executor_handle import ExecutorProcess, Launch
from sandbox.gateway.gateways import Post
from sandbox.gateway.http.listener import SPARE_FILES, Doors, grant_files
from sandbox.gateway.http.routes import build_app, state_of
from sandbox.gateway.metrics import VERSION
from sandbox.gateway.siblings import Siblings

log = logging.getLogger(__name__)

GARBAGE = 20_000, 20, 20
"""Thresholds of the garbage collector. Calls in the queue are hundreds of thousands of objects and no cycles; to look
through them as often as Python does by itself takes half of the admission of a large batch."""
CLOSE_S = 5.0
"""What connections get to take their last bytes."""


def serve(config: ServeConfig, launch: Launch = ExecutorProcess.launch) -> int:
    """Serve until SIGINT or SIGTERM; the exit code."""
    try:
        config = config.resolved(machine.granted_cores(), machine.memory_limit() >> 20)
        if config.gateways == 1:
            return _run(config, launch)
        return gateways.serve(config, lambda part, post: _run(part, launch, post), partial(_greet, config))
    except ConfigError as why:
        print(f"rstar-sandbox: {why}", file=sys.stderr)
        return 1


def _run(config: ServeConfig, launch: Launch, post: Post | None = None) -> int:
    """One gateway, alone or at its post among several."""
    heap.use_one_arena()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, launch, post))
    except ConfigError as why:
        print(f"rstar-sandbox: {why}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("rstar-sandbox: stopped at once, calls in flight are lost", file=sys.stderr)
        return 1
    return 0


async def _serve(config: ServeConfig, launch: Launch, post: Post | None) -> None:
    stop = _stop_on_signals()
    siblings = post.siblings if post else Siblings()
    if post:
        _stop_on_end_of(post.lifeline, stop)
    async with Dispatcher(config, launch) as dispatcher:
        app = build_app(config, dispatcher, siblings)
        runner = web.AppRunner(app, shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            await siblings.open(lambda: state_of(app))
            doors, address = await _listen(runner, dispatcher, is_shared=post is not None)
            if await _started_unless(stop, dispatcher):
                _warn_of_less(dispatcher, doors.most)
                if post:
                    post.report(_about(dispatcher))
                else:
                    _greet(config, address, [_about(dispatcher)])
                await stop.wait()
            await dispatcher.drain(config.drain_s)
            doors.close()
        except asyncio.CancelledError:
            dispatcher.kill()
            raise
        except ConfigError:
            await runner.cleanup()
            raise
        finally:
            siblings.close()
        await runner.cleanup()


def _stop_on_end_of(pipe: int, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_end() -> None:
        loop.remove_reader(pipe)
        stop.set()

    loop.add_reader(pipe, on_end)


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


async def _listen(runner: web.AppRunner, dispatcher: Dispatcher, *, is_shared: bool = False) -> tuple[Doors, str]:
    """Open the doors, and say where."""
    config = dispatcher.config
    assert runner.server is not None
    doors = Doors(runner.server, grant_files(config.connections), config.stall_s, dispatcher.turned_away)
    return doors, await doors.open(config.host, config.port, is_shared=is_shared)


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


def _warn_of_less(dispatcher: Dispatcher, connections: int) -> None:
    """Say once what this server has less of than was asked for, and which modules its calls cannot import."""
    config, abouts = dispatcher.config, [node.about for node in dispatcher.nodes]
    less = [f"{connections} connections instead of {config.connections}"] if connections < config.connections else []
    for name, asked in (("slots", config.slots), ("long_slots", config.long_slots)):
        granted = sum(about.get(name, asked) for about in abouts)
        if granted < asked:
            less.append(f"{granted} {name} instead of {asked}")
    if less:
        enough = max(config.connections + SPARE_FILES, *(about.get("wanted_files", 0) for about in abouts))
        log.warning("%s, for want of open files: ulimit -Hn %d is enough for all", ", ".join(less), enough)
    lacks = sorted({str(name)[:40] for about in abouts for name in about.get("lacks", ())})
    if lacks:
        log.warning(
            "calls cannot import %s, which %s lacks: install them there, or leave out --python, for the Python that "
            "`rstar-sandbox runtime` makes",
            ", ".join(lacks),
            config.python,
        )


def _about(dispatcher: Dispatcher) -> dict[str, Any]:
    """What a greeting says of one gateway."""
    about = dispatcher.nodes[0].about
    return {
        "slots": sum(node.about["slots"] for node in dispatcher.nodes),
        "isolation": str(about.get("isolation", "?"))[:40],
        "python": str(about.get("python", "?"))[:40],
    }


def _greet(config: ServeConfig, address: str, gateways: list[dict[str, Any]]) -> None:
    """Say on stderr that the server is ready."""
    first, several = gateways[0], f"  gateways={len(gateways)}" if len(gateways) > 1 else ""
    reason = f"  isolation_reason={config.isolation_reason!r}" if config.isolation_reason else ""
    print(
        f"rstar-sandbox {VERSION} on {address}  isolation={first['isolation']}  "
        f"slots={sum(gateway['slots'] for gateway in gateways)}  python={first['python']}{several}{reason}",
        file=sys.stderr,
        flush=True,
    )
