"""A fake executor, which uses real frames on a real socket but runs no Python. The code of a call selects its answer:

    "hang"      no result, until the test calls `FakeExecutor.finish`
    "die"       the executor exits
    "garbage"   a malformed frame
    "nonsense"  a malformed result
    "forget"    a result for an unknown seq (the number of a call)
    "lose"      a report that the attempt is lost and its code has started
    "refuse"    a report that the attempt is lost and its code has not started
    "slow"      status `ok` with the code as stdout, after `SLOW_S`
    otherwise   status `ok` with the code as stdout

`FakeFleet.launch` replaces `ExecutorProcess.launch`. `python -m tests.fakes --fd N` runs a fake executor in its own
process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from typing import Any, cast

from sandbox import wire
from sandbox.types import Result, Status, Usage

SLOW_S = 0.3


def ok_result(call: dict[str, Any]) -> dict[str, Any]:
    """Return the encoded result of a call that succeeded."""
    usage = Usage(run_ms=1.0, cpu_ms=1.0, peak_memory_mb=10.0)
    files = {path: call.get("files", {}).get(path, b"") for path in call.get("return_files", ())}
    stdin = call.get("stdin")
    value = stdin.decode("utf-8", "replace") if isinstance(stdin, bytes) else stdin
    result = Result("", Status.OK, stdout=call["code"], value=value, exit_code=0, files=files, usage=usage)
    return result.encode(binary=True)


def pair_of_check(call: dict[str, Any]) -> tuple[str, str]:
    """Return the right answer (gold) and the answer to check of an encoded answer check."""
    options, _, texts = call["stdin"].partition(b"\n")
    gold_bytes = json.loads(options)["gold_bytes"]
    return texts[:gold_bytes].decode(), texts[gold_bytes:].decode()


class FakeExecutor(asyncio.Protocol):
    """One fake executor, from its "configure" frame to its exit. It is also the `LaunchedExecutor` of its handle."""

    def __init__(self, slots: int = 4, reaction: str = "ready", window: int | None = None) -> None:
        self.slots = slots
        self.window = window
        """The number of calls that the executor accepts at once. If it is None, no "window" frame is sent."""
        self.reaction = reaction
        """The reaction to the "configure" frame: "ready", "failed", "exit" or "silent"."""
        self.settings: dict[str, Any] = {}
        self.is_replacement = False
        self.calls: dict[int, dict[str, Any]] = {}
        """All calls received, by seq."""
        self.reserved: list[int] = []
        """The seqs of the calls that came in addition to the window (in reserved places)."""
        self.cancelled: list[int] = []
        self.received_kinds: list[str] = []
        """Kinds of the received frames, in order."""
        self.frame_sizes: list[int] = []
        """Number of calls in each "calls" frame."""
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._unpacker = wire.Unpacker()
        self._transport: asyncio.Transport | None = None
        self.socket: socket.socket

    async def connect(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        is_unix = sock.family == socket.AF_UNIX
        await (loop.create_unix_connection if is_unix else loop.create_connection)(lambda: self, sock=sock)

    def kill(self) -> None:
        self.exit(-9)

    async def wait(self) -> int:
        return await asyncio.shield(self.exit_code)

    def exit(self, exit_code: int = 0) -> None:
        if self._transport is not None:
            self._transport.abort()
        if not self.exit_code.done():
            self.exit_code.set_result(exit_code)

    def send(self, *message: Any) -> None:
        assert self._transport is not None
        self._transport.write(wire.pack(list(message)))

    def become_ready(self) -> None:
        long_slots = self.settings["long_slots"]
        self.send("ready", {"slots": self.slots, "long_slots": long_slots, "isolation": "none", "python": "3.11.0"})
        if self.window is not None:
            self.send("window", self.window)

    def finish(self, *seqs: int) -> None:
        """Send the results of calls that hang."""
        self.send("results", [[seq, ok_result(self.calls[seq])] for seq in seqs])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.exit()

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for kind, *parts in self._unpacker:
            self.received_kinds.append(kind)
            getattr(self, f"_{kind}")(*parts)

    def _configure(self, settings: dict[str, Any], is_replacement: bool) -> None:
        self.settings = settings
        self.is_replacement = is_replacement
        if self.reaction == "ready":
            self.become_ready()
        elif self.reaction == "failed":
            self.send("failed", "no isolation here")
        elif self.reaction == "exit":
            self.exit(3)

    def _calls(self, pairs: list[Any]) -> None:
        self.frame_sizes.append(len(pairs))
        results = []
        for seq, call in pairs:
            self.reserved += [seq] * call.pop("reserved", False)
            self.calls[seq] = call
            if call["code"] == "die":
                return self.exit(1)
            if call["code"] == "garbage":
                assert self._transport is not None
                return self._transport.write(b"\x05\0\0\0hello")  # the length is right, but the body is no array
            if call["code"] == "nonsense":
                results.append([seq, {"status": "splendid"}])
            elif call["code"] == "forget":
                results.append([seq + 1_000_000, ok_result(call)])  # no test sends so many calls
            elif call["code"] in ("lose", "refuse"):
                self.send("lost", [[seq, "its zygote exited", call["code"] == "lose"]])
            elif call["code"] == "slow":
                asyncio.get_running_loop().call_later(SLOW_S, self.finish, seq)
            elif call["code"] != "hang":
                results.append([seq, ok_result(call)])
        if results:
            self.send("results", results)
        return None

    def _cancel(self, seqs: list[int]) -> None:
        self.cancelled += seqs

    def _drain(self) -> None:
        self.exit()


class FakeFleet:
    """Launches fake executors. The first executors react to "configure" as `start_reactions` says, one item each. All
    later executors react with "ready"."""

    def __init__(self, slots: int = 4, start_reactions: tuple[str, ...] = (), window: int | None = None) -> None:
        self.slots = slots
        self.window = window
        self.start_reactions = list(start_reactions)
        self.executors: list[FakeExecutor] = []

    async def launch(self) -> FakeExecutor:
        local_end, remote_end = socket.socketpair()
        reaction = self.start_reactions.pop(0) if self.start_reactions else "ready"
        executor = FakeExecutor(self.slots, reaction, self.window)
        executor.socket = local_end
        await executor.connect(remote_end)
        self.executors.append(executor)
        return executor

    @property
    def last_executor(self) -> FakeExecutor:
        return self.executors[-1]


async def _main(fd: int, slots: int) -> None:
    executor = FakeExecutor(slots)
    await executor.connect(socket.socket(fileno=fd))
    await executor.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    asyncio.run(_main(options.fd, options.slots))
