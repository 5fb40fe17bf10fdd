"""The other gateways of this server, and what one hears from them: so that whoever is asked can answer for all.

The kernel gives a connection to any of the gateways. A scrape that showed the counters of one of them would show others
the next time, so each has a socket in a folder that only they can enter, says there what it knows to whoever connects,
and asks all others when it is itself asked. One that does not answer within `ASK_S` is left out, and counted as down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

ASK_S = 2.0
MAX_BYTES = 64 << 20

State = dict[str, Any]
"""What a gateway says of itself; see `routes`."""


@dataclass
class Siblings:
    """Which of how many gateways this is. One alone has nobody to ask, and needs no folder."""

    number: int = 0
    count: int = 1
    folder: str = ""
    _server: asyncio.Server | None = field(default=None, repr=False)

    async def open(self, own: Callable[[], State]) -> None:
        """Say `own()` to whoever asks."""
        if self.count == 1:
            return

        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                writer.write(msgpack.packb(own()))
                await writer.drain()

        path = self._path(self.number)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of one that was killed, which we replace
        self._server = await asyncio.start_unix_server(say, path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def ask(self) -> dict[int, State]:
        """What the others say, by their number; those that say nothing are left out."""
        others = [number for number in range(self.count) if number != self.number]
        said = await asyncio.gather(*(self._ask(number) for number in others))
        return {number: state for number, state in zip(others, said, strict=True) if state is not None}

    async def _ask(self, number: int) -> State | None:
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
                with contextlib.closing(writer):
                    said = bytearray()
                    while chunk := await reader.read(MAX_BYTES - len(said)):
                        said += chunk
                    state: State = msgpack.unpackb(said)
                    return state
        except (OSError, TimeoutError, ValueError, msgpack.UnpackException):
            return None

    def _path(self, number: int) -> str:
        return f"{self.folder}/{number}"
