"""A zygote pool: one jail, its zygotes, and the slots that they share.

A zygote is a preloaded interpreter that forks once per call. A profile is the set of modules that a zygote has
imported. Each profile but `bare` extends another profile (`profile_choice.ProfileTree`). There is one zygote per
profile. The zygote of `bare` is started with the jail; every other zygote is forked from the zygote of the nearest
profile that its profile extends. The `verify` zygote is forked only on the first request for it.

    task per profile:  _supervise -> _run_zygote -> _spawn, _serve (_handshake, then _handle_frame per frame)
                           ^                                   |
                           +------- back-off <----- _reap -----+    its calls are lost, its slots released

Invariants:
- The exit of a zygote ends only its own calls. In two cases it ends the whole jail. In the first case, the zygote is
  that of `bare`, for which the launcher waits. In the second case, there are no cgroups: then only the exit of the
  jail's init shows that the processes of the calls are gone.
- A zygote that sends an invalid frame counts as compromised. Its whole jail is killed.
- A slot (which is also a uid in the jail) is used by at most one call at a time.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import trio

from sandbox import jail
from sandbox.backoff import backoff_s
from sandbox.errors import ConfigError, NodeError, ProtocolError
from sandbox.executor import zygote_frames
from sandbox.executor.call_state import HANG_GRACE_S, Attempt, StillRunning, SubmittedCall, wall_cap_s
from sandbox.executor.profile_choice import ProfileTree
from sandbox.executor.session import Session
from sandbox.executor.slots import Slots
from sandbox.executor.unix_stream import UnixStream
from sandbox.executor.zygote import Zygote
from sandbox.executor.zygote_frames import Header
from sandbox.types import Profile

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Maximum seconds until a zygote is ready. On an idle core the largest profile needs two seconds."""
START_TRIES = 3
"""Number of failed starts in a row after which the executor gives up if its zygotes have never been ready."""
MIN_RESTART_DELAY_S = 0.05
"""Seconds until a zygote is spawned again after its first failed start. Each further failure doubles the delay."""
MAX_RESTART_DELAY_S = 5.0
"""Maximum delay, in seconds, until a zygote is spawned again."""
KILL_TIMEOUT_S = 2.0
"""Maximum seconds from the kill of a jail to the start of the next one."""
END_POLL_INTERVAL_S = 0.005
"""Seconds between two checks whether a killed jail has ended. It usually ends within milliseconds."""


AnyZygote = TypeVar("AnyZygote", bound=Zygote)


class PoolOwner(Protocol):
    """The part of the executor that a pool uses."""

    profile_tree: ProfileTree

    def on_zygote_ready(self) -> None: ...
    def on_call_ended(self, zygote: Zygote, attempt: Attempt, ended: Header, blobs: list[bytes]) -> None: ...
    def on_start_failed(self, call: SubmittedCall, reason: str) -> None: ...
    def on_still_running(self, pool: ZygotePool, attempt: Attempt, running: StillRunning) -> None: ...
    def on_frames_handled(self) -> None: ...
    def on_calls_lost(self, attempts: list[Attempt], reason: str) -> None: ...
    def on_session_ready(self, session: Session) -> None: ...
    def on_session_ended(self, session: Session, reason: str) -> None: ...
    def start_queued_calls(self) -> None: ...


class ZygotePool:
    """One jail, its zygotes, and the slots that they share."""

    def __init__(
        self,
        spec: jail.JailSpec,
        profiles: tuple[str, ...],
        slots: Slots,
        owner: PoolOwner,
        *,
        report_after_s: float,
        is_replacement: bool = False,
    ) -> None:
        self.slots = slots
        self.zygotes: dict[str, Zygote] = {}
        """The zygotes that are ready, by profile."""
        self.sessions: dict[str, Session] = {}
        """The sessions that are ready, by id."""
        self.restarts = 0
        self.has_been_ready = False
        """Whether all zygotes have been ready at the same time; with `is_replacement`, whether one has been ready."""
        self.max_zygote_bytes = 0
        """Private memory in bytes of the largest zygote so far. It is added to the memory limit of each call, because a
        call that writes to inherited memory copies up to this many bytes."""
        self._spec = spec
        self._confinement_plan = jail.confinement_plan(spec)
        self._tree = owner.profile_tree
        self._profiles = tuple(name for name in self._tree.names if name in profiles or name == Profile.BARE)
        self._owner = owner
        self._report_after_s = report_after_s
        self._is_replacement = is_replacement
        self._jail_process: subprocess.Popen[bytes] | None = None
        self._zygotes_changed = trio.Event()
        self._verifier_requested = trio.Event()
        self._verifier_failed = False
        """Whether the last `START_TRIES` starts of the `verify` zygote have failed."""
        self._nursery: trio.Nursery | None = None

    @property
    def is_waiting_for_verifier(self) -> bool:
        """Whether the `verify` zygote is not ready but may become ready."""
        return Profile.VERIFY not in self.zygotes and not self._verifier_failed

    def request_verifier(self) -> None:
        """Start the `verify` zygote. Idempotent."""
        self._verifier_requested.set()

    def best_zygote(self, profile: str) -> Zygote | None:
        """Return the zygote of a profile. While this zygote is not ready, return the best substitute that is ready, or
        None. The `verify` zygote has a substitute only if it has failed to start."""
        if profile in self.zygotes:
            return self.zygotes[profile]
        if profile == Profile.VERIFY and not self._verifier_failed:
            return None
        return next((self.zygotes[name] for name in self._tree.substitutes(profile) if name in self.zygotes), None)

    async def run(self) -> None:
        """Supervise all zygotes until cancelled, then kill the jail. Raises `NodeError` if the zygotes fail to start
        and have never been ready. Raises `ConfigError` if a zygote cannot load a profile that the operator has
        defined."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for profile in self._profiles:
                    nursery.start_soon(self._supervise, profile)
                await self._verifier_requested.wait()
                await self._supervise(Profile.VERIFY)
        finally:
            await self._end_jail(self._jail_process)

    def kill_jail(self) -> None:
        """Kill the jail at once. The supervising tasks start a new jail."""
        if self._jail_process is not None:
            self._jail_process.kill()

    def start_call(
        self, call: SubmittedCall, zygote: Zygote, run_id: int, now: float, *, reserved: bool = False
    ) -> None:
        """Start a call in a free slot, a reserved slot if `reserved`, else a short slot. Raises `OSError` if the slot's
        cgroup cannot be used. In this case the call has not started, and the slot is parked."""
        spec, slot = call.spec, self.slots.acquire(reserved=reserved)
        zygote_bytes = self.max_zygote_bytes
        memory_bytes = spec.cgroup_memory_bytes(zygote_bytes)
        try:
            self.slots.set_limits(slot, memory_bytes, spec.max_tasks)
            if self.slots.cgroups is not None:
                zygote.send_cgroup_fds(slot, self.slots.cgroups)
        except OSError:
            self._park_slot(slot)
            raise
        kill = partial(zygote.kill_call, run_id)
        hang_deadline = now + wall_cap_s(spec.timeout_s) + HANG_GRACE_S
        call.attempt = Attempt(call, run_id, slot, slot, now, kill, hang_deadline, memory_bytes, zygote_bytes)
        zygote.start_call(call.attempt)

    def start_cell(self, call: SubmittedCall, session: Session, run_id: int, now: float, *, reserved: bool) -> None:
        """Start a cell of a session. It counts in a short slot, or a reserved one, and uses the slot of the session.
        Raises `OSError` as `start_call` does."""
        keeper, slot = session.keeper, self.slots.acquire(reserved=reserved)
        try:
            self.slots.set_limits(keeper.slot, keeper.memory_bytes, session.max_tasks)
        except OSError:
            self._park_slot(slot)
            raise
        call.attempt = replace(
            keeper,
            call=call,
            run_id=run_id,
            is_keeper=False,
            slot=slot,
            sent_at=now,
            kill=partial(session.kill_call, run_id),
            hang_deadline=now + wall_cap_s(call.spec.timeout_s) + HANG_GRACE_S,
        )
        session.start_cell(call.attempt)

    def open_session(self, call: SubmittedCall, zygote: Zygote, run_id: int, now: float) -> None:
        """Start the keeper of a session in a free slot of sessions. Raises `OSError` as `start_call` does."""
        assert self._nursery is not None
        our_sock, keeper_sock = socket.socketpair()
        slot = self.slots.free_of_sessions.pop()
        with keeper_sock:
            stream = UnixStream(our_sock)
            kill = partial(zygote.kill_call, run_id)
            keeper = Attempt(call, run_id, slot, slot, now, kill, math.inf, 0, self.max_zygote_bytes, is_keeper=True)
            session = Session(stream, zygote, keeper)
            try:
                self.slots.set_limits(slot, keeper.memory_bytes, session.max_tasks)
                if self.slots.cgroups is not None:
                    self.slots.cgroups.cgroup(slot).allow_single_kills()
                    zygote.send_cgroup_fds(slot, self.slots.cgroups)
            except OSError:
                stream.close()
                self._park_slot(slot)
                raise
            call.attempt = keeper
            zygote.start_call(keeper, session.header, keeper_sock.fileno())
        self._nursery.start_soon(self._run_session, session)

    async def _run_session(self, session: Session) -> None:
        """Serve a session until its end."""
        reason = await self._serve(session, self._receive_ready)
        session.end()
        session.stream.close()
        self.sessions.pop(session.id, None)
        lost = list(session.running.values())
        session.running.clear()
        for attempt in lost:
            attempt.call.attempt = None
            self._release_slot(attempt.slot)
        self._owner.on_calls_lost(lost, f"the session has ended: {reason}")
        self._owner.on_session_ended(session, reason)

    async def _receive_ready(self, session: Session) -> None:
        await _receive_one(session, "ready")
        self.sessions[session.id] = session
        self._owner.on_session_ready(session)

    async def _supervise(self, profile: str) -> None:
        """Run the zygote of a profile, and restart it whenever it has ended."""
        failures = 0
        while True:
            await trio.sleep(backoff_s(failures, MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S))
            zygote, reason = await self._run_zygote(profile)
            failures = 0 if zygote is not None and zygote.was_ready else failures + 1
            if profile == Profile.VERIFY:
                self._verifier_failed = failures >= START_TRIES
            if zygote is not None:
                await self._reap(zygote, reason)
            else:
                log.warning("%s zygote failed to start: %s; retrying", profile, reason)
                self._owner.on_calls_lost([], reason)
            if failures >= START_TRIES and not self.has_been_ready:
                raise NodeError(f"the {profile} zygote failed to start {failures} times, last: {reason}")

    async def _run_zygote(self, profile: str) -> tuple[Zygote | None, str]:
        """Spawn a zygote and serve it until its end. Return the zygote and the reason of its end. If the zygote was not
        spawned, return None and the reason."""
        try:
            our_sock, zygote_sock = socket.socketpair()
        except OSError as error:
            return None, f"no socket pair: {error}"
        stream = UnixStream(our_sock)
        try:
            with zygote_sock:
                zygote = await self._spawn(profile, stream, zygote_sock)
            return zygote, await self._serve(zygote, self._handshake)
        except NodeError as error:
            return None, str(error)
        finally:
            stream.close()

    async def _spawn(self, profile: str, stream: UnixStream, zygote_sock: socket.socket) -> Zygote:
        """Spawn the zygote of a profile. For `bare`, start the jail. For any other profile, make the zygote of the
        nearest ancestor profile fork the new zygote."""
        stream.enable_credentials()
        ancestors = [name for name in self._tree.ancestors(profile) if name in self._profiles]
        if ancestors:
            parent = await self._wait_for_zygote(ancestors[0])
            frame = zygote_frames.pack({"op": "spawn", **self._tree.frame_fields(profile)})
            parent.stream.write(frame, zygote_sock.fileno())
            zygote = Zygote(profile, stream, parent.jail_process)
            zygote.jail_exited = parent.jail_exited
            return zygote
        self._jail_process = self._start_jail(zygote_sock)
        stream.write(zygote_frames.pack({"op": "configure", "plan": self._confinement_plan, "profile": str(profile)}))
        return Zygote(profile, stream, self._jail_process)

    async def _serve(self, zygote: AnyZygote, handshake: Callable[[AnyZygote], Awaitable[None]]) -> str:
        """Exchange frames with a zygote, or with the keeper of a session, until it ends; return the reason. A
        `ProtocolError` of a zygote kills its jail."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(zygote.stream.flush_forever)
            try:
                with trio.fail_after(START_TIMEOUT_S):
                    await handshake(zygote)
                zygote.was_ready = True
                while frames := await zygote.receive():
                    for header, blobs in frames:
                        self._handle_frame(zygote, header, blobs)
                    self._owner.on_frames_handled()
                return "it closed its socket"
            except trio.TooSlowError:
                return f"not ready within {START_TIMEOUT_S:g} s"
            except NodeError as error:
                return str(error)
            except ProtocolError as error:
                if not isinstance(zygote, Session):  # a session ends alone
                    await self._end_jail(zygote.jail_process)
                return str(error)
            finally:
                nursery.cancel_scope.cancel()

    async def _handshake(self, zygote: Zygote) -> None:
        """Wait for the frame `loaded`, read the memory of the zygote from /proc, answer with `start`, and wait for the
        frame `ready`. From then on the zygote gets calls."""
        header = await _receive_one(zygote, "loaded")
        zygote.modules = frozenset(zygote_frames.get_texts(header, "modules"))
        zygote.python = zygote_frames.get_text(header, "python")
        zygote.missing_modules = zygote_frames.get_texts(header, "missing")
        # When the executor is ready, the server logs the missing modules of all zygotes. The `verify` zygote starts
        # later, so its missing modules are logged here.
        if zygote.missing_modules and zygote.profile == Profile.VERIFY:
            missing = ", ".join(zygote.missing_modules)
            log.warning("the Python that runs the calls lacks %s, so answers cannot be checked; install them", missing)
        for problem in zygote_frames.get_texts(header, "problems")[:20]:  # the zygote is untrusted
            log.info("%s zygote: %s", zygote.profile, problem)
        if "refused" in header:
            reason = f"profile {zygote.profile}: {zygote_frames.get_text(header, 'refused')}"
            raise NodeError(reason) if self.has_been_ready else ConfigError(reason)
        pid = zygote.stream.peer_pid
        mapped_bytes, private_bytes = _mapped_and_private_bytes(pid)
        self.max_zygote_bytes = max(self.max_zygote_bytes, private_bytes)
        if zygote.profile == Profile.BARE:
            if self.slots.cgroups is not None:
                self.slots.cgroups.allow_clone_into(pid, zygote.stream.peer_uid)
            elif self._spec.level is not jail.Level.NONE:
                zygote.jail_exited = self._watch_jail_init(pid)
        zygote.send({"op": "start", "address_space_bytes": mapped_bytes, "report_after_s": self._report_after_s})
        await _receive_one(zygote, "ready")
        self.zygotes[zygote.profile] = zygote
        if self._is_replacement or all(profile in self.zygotes for profile in self._profiles):
            self.has_been_ready = True
        self._notify_change()
        self._owner.on_zygote_ready()

    def _handle_frame(self, zygote: Zygote, header: Header, blobs: list[bytes]) -> None:
        run_id: object = header.get("run_id")
        attempt = zygote.running.get(run_id) if type(run_id) is int else None
        op = zygote_frames.get_text(header, "op")
        if attempt is None:
            raise ProtocolError(f"{op!r} for a call that the zygote is not running")
        if sum(map(len, blobs)) > attempt.call.spec.max_result_bytes:
            raise ProtocolError(f"{op!r} is larger than the call's limits allow")
        match op:
            case "ended":
                self._finish_attempt(zygote, attempt)
                self._owner.on_call_ended(zygote, attempt, header, blobs)
            case "start_failed":
                reason = zygote_frames.get_text(header, "reason")
                self._finish_attempt(zygote, attempt)
                self._owner.on_start_failed(attempt.call, reason)
            case "still_running":
                wall_s = zygote_frames.get_number(header, "wall_ms") / 1e3
                if not zygote.stream.received_fds or attempt.is_monitored:
                    raise ProtocolError("still_running without a pidfd, or for the second time")
                attempt.is_monitored = True
                self._owner.on_still_running(self, attempt, StillRunning(wall_s, zygote.stream.received_fds.pop(0)))
            case _:
                raise ProtocolError(f"unexpected {op!r}")

    def _finish_attempt(self, zygote: Zygote, attempt: Attempt) -> None:
        del zygote.running[attempt.run_id]
        attempt.call.attempt = None
        attempt.usage = self.slots.read_usage(attempt.resource_slot)
        self._release_slot(attempt.slot)

    def _release_slot(self, slot: int) -> None:
        """Free a slot, or park it if its cgroup is not empty yet."""
        if not self.slots.release(slot):
            self._park_slot(slot)

    def _park_slot(self, slot: int, jail_exited: trio.Event | None = None) -> None:
        """Free a slot once its cgroup is empty and, if given, once the jail has exited."""
        assert self._nursery is not None
        self._nursery.start_soon(self._release_parked, slot, jail_exited)

    async def _release_parked(self, slot: int, jail_exited: trio.Event | None) -> None:
        if jail_exited is not None:
            await jail_exited.wait()
        await self.slots.release_when_empty(slot)
        self._owner.start_queued_calls()

    async def _reap(self, zygote: Zygote, reason: str) -> None:
        """Release the slots of a zygote that has ended, and report its calls to the owner as lost."""
        self.restarts += 1
        lost = list(zygote.running.values())
        log.warning("%s zygote exited: %s; %d calls are lost; restarting it", zygote.profile, reason, len(lost))
        if self.zygotes.get(zygote.profile) is zygote:
            del self.zygotes[zygote.profile]
        zygote.running.clear()
        for attempt in lost:
            attempt.call.attempt = None
            self.slots.read_usage(attempt.slot)  # so that this usage is not charged to the next call in the slot
            if zygote.jail_exited is None:
                self._release_slot(attempt.slot)
            else:
                self._park_slot(attempt.slot, zygote.jail_exited)
        if zygote.profile == Profile.BARE or zygote.jail_exited is not None:
            await self._end_jail(zygote.jail_process)
        self._notify_change()
        self._owner.on_calls_lost(lost, reason)

    async def _wait_for_zygote(self, profile: str) -> Zygote:
        while profile not in self.zygotes:
            await self._zygotes_changed.wait()
        return self.zygotes[profile]

    def _notify_change(self) -> None:
        self._zygotes_changed.set()
        self._zygotes_changed = trio.Event()

    def _start_jail(self, sock: socket.socket) -> subprocess.Popen[bytes]:
        argv = jail.launch_argv(self._spec, sock.fileno())
        try:
            return subprocess.Popen(argv, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:
            raise NodeError(f"cannot start the jail: {error}") from None

    async def _end_jail(self, jail_process: subprocess.Popen[bytes] | None) -> None:
        """Forget the zygotes of a jail, kill the jail, and wait for its end, even in a cancelled task. Idempotent.
        SIGKILL ends the launcher, and all processes in the jail die with the launcher."""
        if jail_process is None:
            return
        self.zygotes = {p: zygote for p, zygote in self.zygotes.items() if zygote.jail_process is not jail_process}
        jail_process.kill()
        with trio.move_on_after(KILL_TIMEOUT_S, shield=True):
            while jail_process.poll() is None:  # noqa: ASYNC110  no event shows the end of a process
                await trio.sleep(END_POLL_INTERVAL_S)
            return
        # The kernel may block the process, for example in a read of a broken disk.
        log.error("jail process %d has not ended %g s after SIGKILL", jail_process.pid, KILL_TIMEOUT_S)

    def _watch_jail_init(self, zygote_pid: int) -> trio.Event:
        """Return an event that is set when the parent of a zygote exits. The parent is the jail's init, which exits
        after all other processes in the jail. Raises `ProtocolError`."""
        assert self._nursery is not None
        try:
            pidfd = os.pidfd_open(_parent_pid(zygote_pid))
        except OSError as error:
            raise ProtocolError(f"the parent of zygote process {zygote_pid} cannot be watched: {error}") from None
        exited = trio.Event()
        self._nursery.start_soon(_wait_for_exit, pidfd, exited)
        return exited


async def _receive_one(zygote: Zygote, expected_op: str) -> Header:
    """Return the header of the next frame of a zygote that has not been ready yet. Raises `NodeError` if the zygote
    ends, and `ProtocolError` if it sends anything else."""
    frames = await zygote.receive()
    if not frames:
        raise NodeError("it closed its socket before it was ready")
    header = frames[0][0]
    if header["op"] != expected_op or len(frames) > 1:
        op = zygote_frames.get_text(header, "op")
        raise ProtocolError(f"expected one frame, {expected_op}; got {op!r} and {len(frames) - 1} more")
    return header


async def _wait_for_exit(pidfd: int, exited: trio.Event) -> None:
    try:
        await trio.lowlevel.wait_readable(pidfd)
        exited.set()
    finally:
        os.close(pidfd)


def _parent_pid(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def _mapped_and_private_bytes(pid: int) -> tuple[int, int]:
    """Return the bytes of a process's address space, and of its resident memory that belongs to no file. Raises
    `ProtocolError`."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            mapped, resident, shared = map(int, statm.read().split()[:3])  # in pages
            return mapped * resource.getpagesize(), (resident - shared) * resource.getpagesize()
    except OSError as error:
        raise ProtocolError(f"zygote process {pid} cannot be read: {error}") from None
