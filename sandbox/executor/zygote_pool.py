"""A jail and the zygotes in it: one for each profile, each forked from the next leaner one, and the one that verifies,
which is forked from `symbolic` or what is leaner when it is first asked for.

Invariants:
- Each profile has one keeper task, which brings its zygote to life, serves it, and when it dies hands its calls back
  and starts anew. A zygote that dies takes no other along, but for the leanest: it holds the jail, so all go. They also
  all go where there are no control groups: then only the end of the jail's init says that the processes of the dead
  zygote's calls are gone.
- A zygote that sends anything but a valid frame is hostile ground, and so is all that it could reach: the jail goes.
- A slot (which is also a uid inside) belongs to at most one call at a time.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from typing import Any, Protocol

import trio

from sandbox import jail
from sandbox.errors import NodeError, ProtocolError
from sandbox.executor import zygote_frames
from sandbox.executor.call_state import Work
from sandbox.executor.profile_choice import ORDER
from sandbox.executor.slots import Slots
from sandbox.executor.unix_stream import Link
from sandbox.types import Profile

log = logging.getLogger(__name__)

START_S = 60.0
"""A zygote that has not warmed up by then will not. The richest takes two seconds on an idle core."""
START_TRIES = 3
MAX_SLOTS = 4096
"""Of one family: a zygote has so many places to mark what it has started (`guest/zygote.py`)."""
BACK_OFF_S = (0.0, 0.05, 0.2, 1.0, 5.0)


class Owner(Protocol):
    """What a family asks of the executor."""

    def on_ready(self) -> None: ...
    def on_done(self, zygote: Zygote, work: Work, header: dict[str, Any], blobs: list[bytes]) -> None: ...
    def on_failed(self, work: Work, why: str) -> None: ...
    def on_lasting(self, family: Family, work: Work, wall_s: float, pidfd: int) -> None: ...
    def on_lost(self, works: list[Work], why: str) -> None: ...
    def pump(self) -> None: ...


class Zygote:
    """One warm interpreter, from outside: its socket, its process, and the calls it is running by ticket."""

    def __init__(self, profile: Profile, link: Link, process: subprocess.Popen[bytes] | None) -> None:
        self.profile = profile
        self.link = link
        self.jail = process
        self.calls: dict[int, Work] = {}
        self.modules: frozenset[str] = frozenset()
        self.python = ""
        self.lacks: list[str] = []
        """Modules of its profile that its Python does not have."""
        self.was_warm = False
        self.jail_end: trio.Event | None = None
        """Set when no process is left in its jail; None where control groups count them, and at level `none`."""
        self._may_enter: set[int] = set()
        """Slots to whose groups it has the ways."""
        self._unpacker = zygote_frames.Unpacker()

    def start(self, work: Work, ticket: int, slot: int, now: float) -> None:
        self.calls[ticket] = work
        work.whereabouts = self, ticket
        self._unpacker.max_body_bytes = max(self._unpacker.max_body_bytes, work.most_bytes)
        self.link.write(work.order(ticket, slot, now))

    def let_in(self, slot: int, tree: jail.CgroupTree) -> None:
        """Hand it the ways into the groups of a slot, once. Not of all slots: a call closes each way that there is."""
        if slot not in self._may_enter:
            for op, fds in (("cgroup_procs", tree.open_procs_files(slot)), ("cgroup_dir", tree.open_directories(slot))):
                for fd in fds:
                    self.link.write(zygote_frames.pack({"op": op, "slot": slot}), fd)
                    os.close(fd)
            self._may_enter.add(slot)

    def send(self, header: dict[str, Any]) -> None:
        self.link.write(zygote_frames.pack(header))

    async def receive(self) -> list[tuple[dict[str, Any], list[bytes]]]:
        """Frames that are whole by now; an empty list at the end. Raises `ProtocolError`."""
        while data := await self.link.read():
            self._unpacker.feed(data)
            if whole := list(self._unpacker):
                return whole
        return []


class Family:
    """One jail's worth of zygotes and slots."""

    def __init__(
        self,
        spec: jail.JailSpec,
        profiles: tuple[Profile, ...],
        slots: Slots,
        owner: Owner,
        *,
        lasting_s: float,
        hurry: bool = False,
    ) -> None:
        self.slots = slots
        self._lasting_s = lasting_s
        self._tree: jail.CgroupTree | None = None
        self.inherited = 0
        """Bytes of its own that the largest zygote has had: what a call may come to copy by writing to it."""
        self.zygotes: dict[Profile, Zygote] = {}
        self.deaths = 0
        self.has_served = False
        """Whether all its zygotes have been warm at once; in a hurry, whether any has."""
        self._spec = spec
        self._plan = jail.confinement_plan(spec)
        self._profiles = tuple(p for p in ORDER if p in profiles or p is Profile.BARE)
        self._owner = owner
        self._changed = trio.Event()
        self._wants_verifier = trio.Event()
        self._has_no_verifier = False
        """It was wanted, and did not come to life."""
        self._hurry = hurry
        self._process: subprocess.Popen[bytes] | None = None
        self._nursery: trio.Nursery | None = None

    def equip(self, tree: jail.CgroupTree) -> None:
        """With a control group for each slot."""
        self._tree = tree
        self.slots.equip(tree)

    @property
    def is_complete(self) -> bool:
        return all(profile in self.zygotes for profile in self._profiles)

    def best_for(self, profile: Profile) -> Zygote | None:
        """The zygote of this profile; while it is down the next richer, else the next leaner. None can stand in for the
        one that verifies, while that may still come."""
        if profile in self.zygotes:
            return self.zygotes[profile]
        if self.must_wait(profile):
            return None
        place = ORDER.index(Profile.SYMBOLIC if profile is Profile.VERIFY else profile)
        for other in (*ORDER[place:], *reversed(ORDER[:place])):
            if other in self.zygotes:
                return self.zygotes[other]
        return None

    def must_wait(self, profile: Profile) -> bool:
        """Whether a call had better wait: for the zygote that verifies, which is started when it is first asked for."""
        if profile is not Profile.VERIFY or profile in self.zygotes or self._has_no_verifier:
            return False
        self._wants_verifier.set()
        return True

    async def run(self) -> None:
        """Keep every zygote alive until cancelled; then kill the jail."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for profile in self._profiles:
                    nursery.start_soon(self._keep, profile)
                await self._wants_verifier.wait()
                await self._keep(Profile.VERIFY)
        finally:
            self._end_jail(self._process)

    def kill(self) -> None:
        """End the jail at once; the keepers start another."""
        if self._process is not None:
            self._process.kill()

    async def _keep(self, profile: Profile) -> None:
        failures = 0
        while True:
            await trio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
            zygote, why = await self._life(profile)
            failures = 0 if zygote is not None and zygote.was_warm else failures + 1
            if profile is Profile.VERIFY:
                self._has_no_verifier = failures >= START_TRIES
            if zygote is not None:
                self._bury(zygote, why)
            else:
                log.warning("zygote %s: %s; it is tried again", profile, why)
                self._owner.on_lost([], why)
            if failures >= START_TRIES and not self.has_served:
                raise NodeError(f"the {profile} zygote does not start: {why}")

    async def _life(self, profile: Profile) -> tuple[Zygote | None, str]:
        """One zygote, and what has ended it; None if the machine lacked what it takes to begin with one."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as why:
            return None, f"no sockets: {why}"
        link = Link(ours)
        try:
            with theirs:
                zygote = await self._birth(profile, link, theirs)
            return zygote, await self._live(zygote)
        except NodeError as why:
            return None, str(why)
        finally:
            link.close()

    async def _live(self, zygote: Zygote) -> str:
        """Warm it, serve it, and say what ended it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(zygote.link.flush_forever)
            try:
                with trio.fail_after(START_S):
                    await self._warm(zygote)
                self.zygotes[zygote.profile] = zygote
                zygote.was_warm = True
                self.has_served = self.has_served or self._hurry or self.is_complete
                self._notify()
                self._owner.on_ready()
                while whole := await zygote.receive():
                    for header, blobs in whole:
                        self._handle(zygote, header, blobs)
                return "it ended"
            except trio.TooSlowError:
                return f"not warm after {START_S:g} s"
            except NodeError as why:
                return str(why)
            except ProtocolError as why:
                self._end_jail(zygote.jail)
                return str(why)
            finally:
                nursery.cancel_scope.cancel()

    async def _warm(self, zygote: Zygote) -> None:
        whole = await zygote.receive()
        if not whole:
            raise NodeError("it ended before it was warm")
        header = whole[0][0]
        if header["op"] != "ready" or len(whole) > 1:
            raise ProtocolError(f"expected ready, got {zygote_frames.text(header, 'op')!r} and {len(whole) - 1} more")
        zygote.modules = frozenset(zygote_frames.texts(header, "modules"))
        zygote.python = zygote_frames.text(header, "python")
        zygote.lacks = zygote_frames.texts(header, "missing")
        if zygote.lacks and zygote.profile is Profile.VERIFY:  # it starts later, when all else has been said
            lacks = ", ".join(zygote.lacks)
            log.warning("the Python that runs the calls lacks %s, so answers get no verdict; install them there", lacks)
        for line in zygote_frames.texts(header, "problems")[:20]:
            log.info("zygote %s: %s", zygote.profile, line)
        mapped, private = _memory_of(zygote.link.peer_pid)
        self.inherited = max(self.inherited, private)
        if zygote.profile is Profile.BARE:
            if self._tree is not None:
                self._tree.allow_clone_into(zygote.link.peer_pid, zygote.link.peer_uid)
            elif self._spec.level is not jail.Level.NONE:
                zygote.jail_end = self._watch_init(zygote.link.peer_pid)
        zygote.send({"op": "start", "address_space_bytes": mapped, "report_after_s": self._lasting_s})

    def _handle(self, zygote: Zygote, header: dict[str, Any], blobs: list[bytes]) -> None:
        ticket: Any = header.get("run_id")
        work = zygote.calls.get(ticket) if type(ticket) is int else None
        if work is None:
            raise ProtocolError(f"{zygote_frames.text(header, 'op')!r} about a call that it does not have")
        if sum(map(len, blobs)) > work.most_bytes:
            raise ProtocolError("more came than the call may have written")
        match header["op"]:
            case "ended":
                self._release(zygote, ticket, work)
                self._owner.on_done(zygote, work, header, blobs)
            case "start_failed":
                why = zygote_frames.text(header, "reason")
                self._release(zygote, ticket, work)
                self._owner.on_failed(work, why)
            case "still_running":
                wall_s = zygote_frames.number(header, "wall_ms") / 1e3
                work.zygote_pid, work.inner_pid = zygote.link.peer_pid, int(zygote_frames.number(header, "pid"))
                if not zygote.link.fds or work.watch is not None:
                    raise ProtocolError("still_running without a pidfd, or for the second time")
                self._owner.on_lasting(self, work, wall_s, zygote.link.fds.pop(0))
            case _:
                raise ProtocolError(f"unexpected {zygote_frames.text(header, 'op')!r}")

    def _release(self, zygote: Zygote, ticket: int, work: Work) -> None:
        del zygote.calls[ticket]
        work.whereabouts = None
        work.spent = self.slots.end(work.slot)
        self.give_back(work.slot)

    def _watch_init(self, zygote_pid: int) -> trio.Event:
        """The event of the end of a zygote's parent, the jail's init, which ends after all others in the jail."""
        assert self._nursery is not None
        try:
            pidfd = os.pidfd_open(_parent_of(zygote_pid))
        except OSError as why:
            raise ProtocolError(f"the parent of its process {zygote_pid} cannot be watched: {why}") from None
        ended = trio.Event()
        self._nursery.start_soon(_await_end, pidfd, ended)
        return ended

    def take(self, slot: int, work: Work, zygote: Zygote) -> None:
        """Make a slot ready for a call. Raises `OSError`; then it is not to be used now."""
        work.inherited_bytes, work.memory_bytes = self.inherited, work.most_memory(self.inherited)
        self.slots.begin(slot, work.memory_bytes, work.most_processes)
        if self._tree is not None:
            zygote.let_in(slot, self._tree)

    def give_back(self, slot: int) -> None:
        """A call has left its slot; it is free at once, or as soon as the kernel agrees."""
        if not self.slots.give_back(slot):
            self.park(slot)

    def park(self, slot: int, jail_end: trio.Event | None = None) -> None:
        """Not to be used just now; nor before a jail has ended, if one is given."""
        assert self._nursery is not None
        self._nursery.start_soon(self._settle, slot, jail_end)

    async def _settle(self, slot: int, jail_end: trio.Event | None) -> None:
        if jail_end is not None:
            await jail_end.wait()
        await self.slots.settle(slot)
        self._owner.pump()

    def _bury(self, zygote: Zygote, why: str) -> None:
        self.deaths += 1
        log.warning("zygote %s: %s; %d calls go back, and it is started anew", zygote.profile, why, len(zygote.calls))
        if self.zygotes.get(zygote.profile) is zygote:
            del self.zygotes[zygote.profile]
        lost = list(zygote.calls.values())
        zygote.calls.clear()
        for work in lost:
            work.whereabouts = None
            self.slots.end(work.slot)
            if zygote.jail_end is None:
                self.give_back(work.slot)
            else:
                self.park(work.slot, zygote.jail_end)
        if zygote.profile is Profile.BARE or zygote.jail_end is not None:
            self._end_jail(zygote.jail)
        self._notify()
        self._owner.on_lost(lost, why)

    async def _birth(self, profile: Profile, link: Link, theirs: socket.socket) -> Zygote:
        link.want_credentials()
        leaner = self._profiles[: self._place_of(profile)]
        if leaner:
            parent = await self._living(leaner[-1])
            parent.link.write(zygote_frames.pack({"op": "spawn", "profile": profile.value}), theirs.fileno())
            zygote = Zygote(profile, link, parent.jail)
            zygote.jail_end = parent.jail_end
            return zygote
        self._process = self._start_jail(theirs)
        link.write(zygote_frames.pack({"op": "configure", "plan": self._plan, "profile": profile.value}))
        return Zygote(profile, link, self._process)

    def _place_of(self, profile: Profile) -> int:
        """Where it stands among the profiles that are kept, or would stand."""
        after = ORDER.index(Profile.SYMBOLIC) + 1 if profile is Profile.VERIFY else ORDER.index(profile)
        return sum(ORDER.index(kept) < after for kept in self._profiles)

    async def _living(self, profile: Profile) -> Zygote:
        while profile not in self.zygotes:
            await self._changed.wait()
        return self.zygotes[profile]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _start_jail(self, sock: socket.socket) -> subprocess.Popen[bytes]:
        argv = jail.launch_argv(self._spec, sock.fileno())
        try:
            return subprocess.Popen(argv, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as why:
            raise NodeError(f"cannot start the jail: {why}") from None

    def _end_jail(self, process: subprocess.Popen[bytes] | None) -> None:
        """Idempotent. All in the jail dies with the launcher, which is killed, so the wait is one of milliseconds."""
        if process is not None:
            process.kill()
            process.wait()
            self.zygotes = {name: zygote for name, zygote in self.zygotes.items() if zygote.jail is not process}


async def _await_end(pidfd: int, ended: trio.Event) -> None:
    try:
        await trio.lowlevel.wait_readable(pidfd)
        ended.set()
    finally:
        os.close(pidfd)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def _memory_of(pid: int) -> tuple[int, int]:
    """Bytes that a process maps, and those in memory that are no file's (/proc/PID/statm counts pages)."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            mapped, resident, shared = map(int, statm.read().split()[:3])
            return mapped * 4096, (resident - shared) * 4096
    except OSError as why:
        raise ProtocolError(f"its process {pid} cannot be read: {why}") from None
