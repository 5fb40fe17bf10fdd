"""A private server: `rstar-sandbox serve` as a child process.

    async with local_service() as url, AsyncClient(url) as client:
        result = await client.execute("print(1)")

The server listens on a free port of the loopback interface. It ends with its parent, even if the parent is killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import BinaryIO

from sandbox.errors import ServiceError

START_S = 1800.0
"""Seconds until the server must be ready. The first start builds the guest runtime, which takes minutes over a slow
link. The server itself limits the time of its later steps."""
STOP_S = 30.0
"""Seconds from SIGTERM to SIGKILL."""
POLL_INTERVAL_S = 0.05
MAX_LOG_BYTES = 8192
"""Bytes kept from the end of the server's log, for the ready line and for error messages."""

_CHILD_CODE = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop(1)):  # the parent has died before prctl
    sys.exit("the parent process has ended")
runpy.run_module("sandbox", run_name="__main__", alter_sys=True)
"""
_READY_LINE = re.compile(rb"^rstar-sandbox \S+ on (http://\S+).*\n", re.MULTILINE)


@asynccontextmanager
async def local_service(arguments: Sequence[str] = ()) -> AsyncIterator[str]:
    """Start a server, yield its URL once it is ready, and stop it at the end.

    `arguments` are further arguments of `rstar-sandbox serve`. The server also ends when the calling thread ends.
    Raises `ServiceError` with the end of the server's log if it does not start.
    """
    command = [sys.executable, "-c", _CHILD_CODE, str(os.getpid()), "serve", "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile() as output:  # a pipe without a reader would block the server once it is full
        process = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process, which then stops the server
        )
        try:
            yield await _wait_for_address(process, output)
        finally:
            await _stop(process)


async def _wait_for_address(process: asyncio.subprocess.Process, output: BinaryIO) -> str:
    deadline = time.monotonic() + START_S
    position, log = 0, b""
    while True:
        has_ended = process.returncode is not None  # read before the log, so that the log is complete
        is_late = time.monotonic() > deadline
        while data := os.pread(output.fileno(), 1 << 16, position):
            position += len(data)
            log += data
            if match := _READY_LINE.search(log):
                return match[1].decode()
            log = log[-MAX_LOG_BYTES:]
        if has_ended or is_late:
            reason = f"ended ({process.returncode})" if has_ended else f"was not ready after {START_S:g} s"
            tail = log.decode("utf-8", "replace").strip()[-2000:]
            raise ServiceError(f"`rstar-sandbox serve` {reason}; the end of its log:\n{tail}")
        await asyncio.sleep(POLL_INTERVAL_S)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
