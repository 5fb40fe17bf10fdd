"""A server under load whose processes may be killed, and the load that checks every result.

`ServerUnderTest` starts the server with a TMPDIR of its own, restarts it after its gateway was killed, and lists what
it leaves behind. `CheckedLoad` sends checked calls in every form of request and response.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing
from pathlib import Path
from types import TracebackType

import aiohttp

from bench.harness.command import BenchFailed
from bench.harness.load import STREAMED, WHOLE, CallTally, OnAnswer, Refused, ask, http_session
from bench.probes import processes
from bench.probes.fault_injector import processes_by_kind
from bench.probes.leftovers import Leftovers, surviving
from bench.probes.resources import ResourceSnapshot, wait_until_settled
from bench.servers import service
from bench.workloads.checked_calls import CheckedCall

BATCH_SIZES = (1, 1, 7, 64)
"""Calls in one request of `CheckedLoad`."""
ABANDONED_SHARE = 0.1
"""Share of requests whose client closes the connection after the first answer and sends the unanswered calls again."""
RETRY_DELAY_S = 0.2
"""Delay after a refusal or a broken connection."""
READY_TIMEOUT_S = 60.0


class ServerUnderTest:
    """A context manager: a running server with a temporary directory of its own, removed at the end.

    After the end, `leftovers` has everything that the server left behind.
    """

    def __init__(
        self, python: str | None = None, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self.leftovers: list[str] = []
        self._python, self._flags, self._environ = python, flags, environ or {}
        self._server_stack = ExitStack()

    def __enter__(self) -> ServerUnderTest:
        with ExitStack() as stack:
            temporary_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            os.chmod(temporary_dir, 0o711)  # calls may have to reach it as users of their own
            self._environ = {"TMPDIR": temporary_dir, **self._environ}
            self._leftover_probe = Leftovers(Path(temporary_dir))
            self._server = self._server_stack.enter_context(self._start())
            self._directory_stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pids = self.processes()
        with self._directory_stack:
            self._server_stack.close()
            self.leftovers += self._leftover_probe.list_all(pids)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        """Process id of the gateway."""
        return self._server.pid

    def processes(self) -> list[int]:
        return self._server.processes()

    def check_is_alive(self) -> None:
        """Raises `BenchFailed` if the gateway has ended, since nothing but `kill_gateway` may end it."""
        if processes.state(self.pid) in ("", "Z"):
            raise BenchFailed("the gateway has ended by itself")

    def snapshot_at_rest(self, calls: int) -> ResourceSnapshot:
        """The server's resources once its processes no longer change."""
        wait_until_settled(self.processes)
        return ResourceSnapshot.take(self.pid, calls, self._leftover_probe.files())

    def wait_until_ready(self, executors: int) -> None:
        """Wait until all executors are back: a new executor removes what a killed one left behind."""
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up_at:
            states = [processes.state(pid) for pid in processes_by_kind(self.pid)["executor"]]
            if "Z" not in states and f"\nrstar_sandbox_executors_ready {executors}.0\n" in self._server.metrics():
                return
            time.sleep(0.1)
        raise BenchFailed(f"not all {executors} executors are ready again within {READY_TIMEOUT_S:g} s")

    def kill_gateway(self) -> None:
        """Kill the gateway with SIGKILL, record processes that survive it, and start another server.

        The gateway is stopped first, so that it answers nothing while its processes are listed.
        """
        os.kill(self.pid, signal.SIGSTOP)
        pids = self.processes()
        os.kill(self.pid, signal.SIGKILL)
        self._server_stack.close()
        self.leftovers += [f"process: {processes.command(pid)}" for pid in surviving(pids)]
        self._server = self._server_stack.enter_context(self._start())

    def _start(self) -> AbstractContextManager[service.Service]:
        return service.running(self._python, self._flags, self._environ)


class CheckedLoad:
    """Sends checked calls in every form of request and response, some requests abandoned half-way.

    Calls whose connection breaks are sent again. `url` and `check_is_alive` are read from the server before each
    request, since the server may have been replaced.
    """

    def __init__(
        self,
        server: ServerUnderTest,
        calls: Iterator[CheckedCall],
        tally: CallTally,
        rng: random.Random,
        on_answer: OnAnswer = lambda: None,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        accepts: Sequence[str] = (*WHOLE, *STREAMED),
        abandoned_share: float = ABANDONED_SHARE,
    ) -> None:
        self._server, self._calls, self._tally, self._rng, self._on_answer = server, calls, tally, rng, on_answer
        self._batch_sizes, self._accepts, self._abandoned_share = batch_sizes, accepts, abandoned_share

    async def run(self, in_flight: int) -> None:
        """Run until every call is answered, with about `in_flight` calls at a time."""
        workers = max(1, in_flight * len(self._batch_sizes) // sum(self._batch_sizes))
        async with http_session(connect_timeout_s=10) as http, asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(http))

    async def _work(self, http: aiohttp.ClientSession) -> None:
        while batch := list(itertools.islice(self._calls, self._rng.choice(self._batch_sizes))):
            start = time.monotonic()
            unanswered = dict(enumerate(batch))
            while unanswered:
                try:
                    await self._send(http, unanswered, start)
                except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError):
                    self._server.check_is_alive()
                    self._tally.resent += 1
                    await asyncio.sleep(RETRY_DELAY_S)
                except Refused as refusal:
                    if refusal.status not in (429, 503):
                        raise
                    await asyncio.sleep(RETRY_DELAY_S)

    async def _send(self, http: aiohttp.ClientSession, unanswered: dict[int, CheckedCall], start: float) -> None:
        """Send the calls in `unanswered`, and remove a call from it when the call is answered."""
        sent = list(unanswered.items())
        answered: set[int] = set()
        single = len(sent) == 1 and self._rng.random() < 0.5
        accept = self._rng.choice([accept for accept in self._accepts if not (single and accept in STREAMED)])
        is_abandoned = not single and self._rng.random() < self._abandoned_share
        calls = [call.call for _, call in sent]
        async with aclosing(ask(http, self._server.url, calls, accept, single=single)) as answers:
            async for index, result in answers:
                number, call = sent[index]
                if index in answered:
                    self._tally.doubled += 1
                    self._tally.examples.append(f"{call} answered again with {result}")
                    continue
                answered.add(index)
                del unanswered[number]
                self._tally.record(call, result, time.monotonic() - start, allow_unavailable=True)
                self._on_answer()
                if is_abandoned and unanswered:
                    return
        if len(answered) < len(sent):
            raise BenchFailed(f"{len(sent)} calls sent, {len(answered)} answered, and the response is complete")
