"""A server whose executors run nothing: each call is answered at once, with its own code as output.

    python -m bench.servers.stub_executor PORT [--executors N] [--workers N]      such a server, until a signal
    python -m bench.servers.stub_executor --fd N                     one such executor, started by the gateway

Such a server has only the gateway's own work: HTTP, admission, frames (`sandbox.wire`), responses.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import sys
from contextlib import AbstractContextManager
from typing import Any

from sandbox import wire
from sandbox.types import Result, Status, Usage

SLOTS = 512
READ_BYTES = 1 << 18


def serving(workers: int = 1) -> AbstractContextManager[Any]:
    """A `bench.servers.service.Service` with one stub executor per worker. Raises `BenchFailed` if it fails."""
    from bench.servers import service

    return service.started(["-m", "bench.servers.stub_executor", "--workers", str(workers)])


def main() -> int:
    """Run the server or one executor."""
    parser = argparse.ArgumentParser(prog="python -m bench.servers.stub_executor")
    parser.add_argument("port", type=int, nargs="?", default=0)
    parser.add_argument("--executors", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--fd", type=int)
    parser.add_argument("--parent", type=int)
    args = parser.parse_args()
    if args.fd is not None:
        return answer_all(socket.socket(fileno=args.fd))
    from sandbox.commands.workers import serve_workers
    from sandbox.gateway import serve
    from sandbox.gateway.calls.executor_handle import ExecutorProcess
    from sandbox.settings.server import ServeConfig

    config = ServeConfig(port=args.port, executors=args.executors, workers=args.workers)
    launch = functools.partial(ExecutorProcess.launch, "bench.servers.stub_executor")
    return serve(config, launch) if args.workers == 1 else serve_workers(config, launch)


def answer_all(sock: socket.socket) -> int:
    """Answer the gateway's frames until it closes the socket or drains the executor."""
    unpacker = wire.Unpacker()
    while data := sock.recv(READ_BYTES):
        unpacker.feed(data)
        for kind, *parts in unpacker:
            if kind == "configure":
                ready = {"slots": SLOTS, "isolation": "none", "profiles": [], "pid": os.getpid(), "python": "stub"}
                sock.sendall(wire.pack(["ready", ready]))
            elif kind == "calls":
                sock.sendall(wire.pack(["results", [[seq, result_of(call)] for seq, call in parts[0]]]))
            elif kind == "drain":
                return 0
    return 0


# Numbers with digits, as real ones have, so that results have the usual size.
_USAGE = Usage(queue_ms=0.4, run_ms=1.9, cpu_ms=1.7, peak_memory_mb=11.3)
_RESULT = Result("", Status.OK, exit_code=0, usage=_USAGE).encode(binary=True)


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    """The result of a call: its own code as output."""
    return {**_RESULT, "stdout": call["code"]}


if __name__ == "__main__":
    sys.exit(main())
