"""Several gateways on one port: the process that starts them, starts them again, and stops with them.

Invariants:
- Each gateway listens on the port by a socket of its own (SO_REUSEPORT), and the kernel spreads connections over them.
  It has executors of its own, and its part of cores, slots, queue and connections (`ServeConfig.parts`), and none of
  another's. So clients are to use several connections, and a batch has to fit into one gateway's queue.
- This process has neither a loop nor a thread, so that it can fork; all that it waits for are signals, and each
  gateway's word that it is ready.
- A gateway that cannot start at first ends the start. One that is lost later is started again, with back-off; its calls
  are lost with it, as those of a single gateway are.
- The first signal stops all of them gently, the second at once. Gateways whose parent is gone stop by themselves, since
  the pipe is closed of which it alone had the other end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from sandbox.config import ServeConfig
from sandbox.gateway.http.listener import cannot_listen
from sandbox.gateway.siblings import Siblings

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Before a gateway is started again; doubled each time that it ends without having been ready."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
MAX_GREETING = 4096


@dataclass(frozen=True, slots=True)
class Post:
    """What a gateway among several has from its parent."""

    siblings: Siblings
    lifeline: int
    """A pipe that ends with the parent."""
    ready: int
    """A pipe for `report`."""

    def report(self, about: dict[str, Any]) -> None:
        """Tell the parent that this gateway is ready."""
        with contextlib.suppress(OSError):
            os.write(self.ready, json.dumps(about).encode()[:MAX_GREETING])
            os.close(self.ready)


Run = Callable[[ServeConfig, Post], int]


@dataclass(slots=True)
class _Gateway:
    """One of them, over all its lives."""

    number: int
    config: ServeConfig
    pid: int = 0
    """0 while it is down."""
    ready: int = -1
    """Our end of its pipe, until it has spoken."""
    was_ready: bool = False
    failures: int = 0
    due: float = 0.0
    """When it is to be started, while it is down."""


def serve(config: ServeConfig, run: Run, greet: Callable[[str, list[dict[str, Any]]], None]) -> int:
    """Have `config.gateways` processes do `run`, until a signal; an exit code. Raises `ConfigError`.

    `greet` gets the address and what each gateway reports, once all are ready.
    """
    with ExitStack() as stack:
        place = stack.enter_context(_reserved(config.host, config.port))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rstar-sandbox-"))
        port = place.getsockname()[1]
        address = f"http://[{config.host}]:{port}" if ":" in config.host else f"http://{config.host}:{port}"
        parts = [replace(part, port=port) for part in config.parts()]
        with _Parent(parts, folder, run) as parent:
            return parent.watch(lambda said: greet(address, said))


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound, so that the port is ours, and does not listen. Raises `ConfigError`."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(
            family, kind
        ) as alone:  # sharing works with any server of ours, of which there is to be none
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(where)
            alone.listen()
        with socket.socket(family, kind) as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind(where)
            yield shared
    except OSError as why:
        raise cannot_listen(host, port, why) from None


class _Parent:
    """Keeps the gateways. Signals arrive as bytes on a socket (`signal.set_wakeup_fd`), so that one select waits for
    all there is."""

    def __init__(self, parts: list[ServeConfig], folder: str, run: Run) -> None:
        self._gateways = [_Gateway(number, part) for number, part in enumerate(parts)]
        self._folder = folder
        self._run = run
        self._signals, self._wake = socket.socketpair()
        self._lifeline = os.pipe()
        self._before: dict[int, Any] = {}
        self._selector = selectors.PollSelector()  # without a state in the kernel, which forks would share
        self._said: dict[int, dict[str, Any]] = {}
        self._stops = 0
        self._code = 0

    def __enter__(self) -> _Parent:
        for end in (self._signals, self._wake):
            end.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        signal.set_wakeup_fd(self._wake.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever is still there is killed; where all went well, that is nobody."""
        for gateway in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(gateway.pid, signal.SIGKILL)
            os.waitpid(gateway.pid, 0)
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._close()

    def watch(self, greet: Callable[[list[dict[str, Any]]], None]) -> int:
        """Until all have ended after a signal; an exit code."""
        greeted = False
        while True:
            self._start_due()
            if not greeted and len(self._said) == len(self._gateways):
                greeted = True
                greet([self._said[gateway.number] for gateway in self._gateways])
            for key, _ in self._selector.select(self._pause_s()):
                if key.fileobj is self._signals:
                    self._obey(self._signals.recv(4096), greeted)
                else:
                    self._hear(key.data)
            if self._stops and not self._living():
                return self._code

    def _living(self) -> list[_Gateway]:
        return [gateway for gateway in self._gateways if gateway.pid]

    def _pause_s(self) -> float | None:
        due = [gateway.due for gateway in self._gateways if not gateway.pid and not self._stops]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _start_due(self) -> None:
        now = time.monotonic()
        for gateway in self._gateways:
            if not gateway.pid and not self._stops and gateway.due <= now:
                self._start(gateway)

    def _start(self, gateway: _Gateway) -> None:
        ours, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        gateway.was_ready = False
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a child has our handlers at first, which are not for it
        gateway.pid = os.fork()
        if not gateway.pid:
            os.close(ours)
            self._be(gateway, theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(theirs)
        gateway.ready = ours
        self._selector.register(ours, selectors.EVENT_READ, gateway)

    def _be(self, gateway: _Gateway, ready: int) -> NoReturn:
        """In the child, which never comes back from here."""
        code = 1
        try:
            os.setpgid(0, 0)  # a Ctrl-C is the parent's to pass on: twice would be too often
            signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            lifeline = os.dup(self._lifeline[0])
            self._close()
            siblings = Siblings(gateway.number, len(self._gateways), self._folder)
            code = self._run(gateway.config, Post(siblings, lifeline, ready))
        except BaseException:  # the boundary of a process: nothing of the parent's stack is to run in its child
            log.exception("gateway %d failed", gateway.number)
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _close(self) -> None:
        for gateway in self._gateways:
            self._deafen(gateway)
        self._selector.close()
        self._signals.close()
        self._wake.close()
        for end in self._lifeline:
            os.close(end)

    def _hear(self, gateway: _Gateway) -> None:
        """Its word that it is ready, or the end of its pipe."""
        if gateway.ready < 0:
            return
        said = os.read(gateway.ready, MAX_GREETING)
        self._deafen(gateway)
        if said:
            gateway.was_ready = True
            self._said[gateway.number] = json.loads(said)

    def _deafen(self, gateway: _Gateway) -> None:
        if gateway.ready >= 0:
            self._selector.unregister(gateway.ready)
            os.close(gateway.ready)
            gateway.ready = -1

    def _obey(self, numbers: bytes, greeted: bool) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                self._stop()
        for gateway in self._living():
            pid, status = os.waitpid(gateway.pid, os.WNOHANG)
            if pid:
                self._bury(gateway, os.waitstatus_to_exitcode(status), greeted)

    def _stop(self) -> None:
        self._stops += 1
        for gateway in self._living():
            os.kill(gateway.pid, signal.SIGTERM)

    def _bury(self, gateway: _Gateway, code: int, greeted: bool) -> None:
        gateway.pid = 0
        self._hear(gateway)
        if self._stops:
            self._code = self._code or (0 if code == -signal.SIGTERM else abs(code))
            return
        if not greeted:
            self._code = abs(code) or 1
            self._stop()
            return
        gateway.failures = 0 if gateway.was_ready else gateway.failures + 1
        gateway.due = time.monotonic() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**gateway.failures)
        log.warning("gateway %d ended with exit code %d, and is started again", gateway.number, code)
