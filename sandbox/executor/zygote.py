"""The executor's end of one zygote: a preloaded interpreter that forks once per call."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import trio

from sandbox import jail
from sandbox.executor import zygote_frames
from sandbox.executor.call_state import Attempt
from sandbox.executor.unix_stream import UnixStream
from sandbox.executor.zygote_frames import Header


class Zygote:
    """The executor's end of one zygote: its socket, its jail, and its running calls."""

    def __init__(self, profile: str, stream: UnixStream, jail_process: subprocess.Popen[bytes] | None) -> None:
        self.profile = profile
        self.stream = stream
        self.jail_process = jail_process
        self.running: dict[int, Attempt] = {}
        """Attempts whose end the zygote has not reported, by run id."""
        self.modules: frozenset[str] = frozenset()
        self.python = ""
        self.missing_modules: list[str] = []
        """Modules of its profile that its Python lacks."""
        self.was_ready = False
        self.jail_exited: trio.Event | None = None
        """Set when the last process in the jail has exited. It is None if there are cgroups, because they show when the
        processes of a call have exited. It is also None at level `none`, which has no init."""
        self._slots_with_cgroup_fds: set[int] = set()
        self._unpacker = zygote_frames.Unpacker()

    def start_call(self, attempt: Attempt, more: Mapping[str, Any] | None = None, fd: int | None = None) -> None:
        """Send the frame that starts a call, with `more` fields of its header and with the descriptor `fd`."""
        self.running[attempt.run_id] = attempt
        spec = attempt.call.spec
        self._unpacker.max_body_bytes = max(self._unpacker.max_body_bytes, spec.max_result_bytes)
        self.stream.write(spec.encode_start(attempt.run_id, attempt.slot, more or {}), fd)

    def kill_call(self, run_id: int) -> None:
        self.send({"op": "kill", "run_id": run_id})

    def send_cgroup_fds(self, slot: int, cgroups: jail.CgroupTree) -> None:
        """Send the zygote the cgroup descriptors of a slot, when the slot is used for the first time. The descriptors
        of all slots would cost each call time, since a call closes all descriptors that it inherits."""
        if slot not in self._slots_with_cgroup_fds:
            for op, fds in (
                ("cgroup_procs", cgroups.open_procs_files(slot)),
                ("cgroup_dir", cgroups.open_directories(slot)),
            ):
                for fd in fds:
                    self.stream.write(zygote_frames.pack({"op": op, "slot": slot}), fd)
                    os.close(fd)
            self._slots_with_cgroup_fds.add(slot)

    def send(self, header: Header) -> None:
        self.stream.write(zygote_frames.pack(header))

    async def receive(self) -> list[tuple[Header, list[bytes]]]:
        """Wait for complete frames and return them; return an empty list at the end of the stream. Raises
        `ProtocolError`."""
        while data := await self.stream.read():
            self._unpacker.feed(data)
            if frames := list(self._unpacker):
                return frames
        return []
