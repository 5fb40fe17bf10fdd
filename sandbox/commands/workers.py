"""`serve --workers N`: starts N complete servers behind one port, and starts each again that ends by itself.

- The kernel gives each new connection to one of the workers (SO_REUSEPORT). They share no state.
- If a worker cannot start, the whole server ends. Once it has been started again, it is tried until it starts.
- A signal to this process goes to all workers. If this process is killed, the kernel kills the workers.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from sandbox import machine
from sandbox.errors import ConfigError
from sandbox.gateway import serve
from sandbox.gateway.calls.executor_handle import ExecutorProcess, Launch
from sandbox.gateway.http.listener import cannot_listen
from sandbox.jail import kernel
from sandbox.settings.server import ServeConfig, Worker

log = logging.getLogger(__name__)

RESTART_DELAY_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_workers(config: ServeConfig, launch: Launch = ExecutorProcess.launch) -> int:
    """Serve with `config.workers` workers until SIGINT or SIGTERM, and return the exit code."""
    shares = config.per_worker(machine.granted_cores())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rstar-workers-") as directory,
            _reserved_port(config.host, config.port) as port,
        ):
            configs = [replace(share, port=port, worker=Worker(n, directory)) for n, share in enumerate(shares)]
            return _Supervisor(configs, launch).run()
    except ConfigError as error:  # the port: exit code 1, as without workers
        print(f"rstar-sandbox: {error}", file=sys.stderr)
        return 1


@contextmanager
def _reserved_port(host: str, port: int) -> Iterator[int]:
    """Reserve a port, also for times at which no worker runs. Raises `ConfigError` if another server has it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            # The first socket finds out whether the port is free: with SO_REUSEPORT it could be shared with a server.
            reserved = socket.socket(family, kind)
            reserved.setsockopt(socket.SOL_SOCKET, option, 1)
            reserved.bind(address)
            address = reserved.getsockname()
            if option == socket.SO_REUSEADDR:
                reserved.close()
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    with reserved:  # it does not listen, so it gets no connections
        yield int(address[1])


class _Supervisor:
    def __init__(self, configs: list[ServeConfig], launch: Launch) -> None:
        self._configs = configs
        self._launch = launch
        self._workers: dict[int, int] = {}
        """The running workers by process id."""
        self._restarted: set[int] = set()
        self._is_stopping = False
        self._pid = os.getpid()

    def run(self) -> int:
        for number in _SIGNALS:
            signal.signal(number, lambda received, _: self._stop(received))
        for worker in range(len(self._configs)):
            self._start(worker)
        exit_code = 0
        while self._workers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            worker = self._workers.pop(ended.si_pid)  # before its id is free for another process
            code = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
            if self._is_stopping:
                exit_code = exit_code or abs(code)
            elif code > 0 and worker not in self._restarted:  # it has printed why it cannot start
                exit_code = code
                self._stop(signal.SIGTERM)
            else:
                log.error("worker %d has ended (exit code %d) and is started again; its calls are lost", worker, code)
                self._restarted.add(worker)
                time.sleep(RESTART_DELAY_S)
                self._start(worker)
        return exit_code

    def _start(self, worker: int) -> None:
        # No signal may come between the fork and the entry in `_workers`.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if not self._is_stopping:
            pid = os.fork()
            if pid == 0:
                os._exit(self._run_worker(worker))
            self._workers[pid] = worker
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _run_worker(self, worker: int) -> int:
        """Run in the child process. Ctrl-C in a terminal is for the supervisor alone, which sends it on."""
        try:
            kernel.set_parent_death_signal()
            if os.getppid() != self._pid:  # the supervisor has died before this process asked for the signal
                return 1
            os.setpgid(0, 0)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return serve(self._configs[worker], self._launch)
        except Exception:
            log.exception("worker %d has failed", worker)
            return 1

    def _stop(self, received: int) -> None:
        self._is_stopping = True
        for pid in self._workers:
            os.kill(pid, received)
