"""A service of one's own, for as long as it is needed: `rstar-sandbox serve` as a child process.

    async with local_service() as url, AsyncClient(url) as client:
        result = await client.execute("print(1)")

It listens on a free port of loopback, and ends with its maker whatever happens, even if that is killed.
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
"""The first start of all makes the Python that runs the calls, which takes minutes over a slow link. The server itself
gives up much sooner on all that comes after."""
STOP_S = 30.0
TURN_S = 0.05

_CHILD = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("its maker has ended")
runpy.run_module("sandbox", run_name="__main__", alter_sys=True)
"""
_GREETING = re.compile(rb"^rstar-sandbox \S+ on (http://\S+).*\n", re.MULTILINE)
WORDS_BYTES = 8192
"""Of its log, the end that is kept: longer than a greeting, and its last words."""


@asynccontextmanager
async def local_service(arguments: Sequence[str] = ()) -> AsyncIterator[str]:
    """Its address, once it is ready. `arguments` are further ones of `rstar-sandbox serve`. The thread that enters this
    is to live as long as the service. Raises `ServiceError`, with what the service said, if it does not start."""
    command = [sys.executable, "-c", _CHILD, str(os.getpid()), "serve", "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile() as said:  # a pipe that nobody reads would stop the service when it is full
        child = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=said,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for us; the service ends when nothing needs it any more
        )
        try:
            yield await _address(child, said)
        finally:
            await _end(child)


async def _address(child: asyncio.subprocess.Process, said: BinaryIO) -> str:
    give_up_at = time.monotonic() + START_S
    position, words = 0, b""
    while True:
        has_ended, is_late = child.returncode is not None, time.monotonic() > give_up_at
        while more := os.pread(said.fileno(), 1 << 16, position):
            position += len(more)
            words += more
            if found := _GREETING.search(words):
                return found[1].decode()
            words = words[-WORDS_BYTES:]
        if has_ended or is_late:
            why = f"ended ({child.returncode})" if has_ended else f"was not ready after {START_S:g} s"
            last = words.decode("utf-8", "replace").strip()[-2000:]
            raise ServiceError(f"`rstar-sandbox serve` {why}; its last words:\n{last}")
        await asyncio.sleep(TURN_S)


async def _end(child: asyncio.subprocess.Process) -> None:
    """Gracefully, then not."""
    if child.returncode is None:
        child.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
