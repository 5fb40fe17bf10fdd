"""The executor: calls in, results out, each answered exactly once unless cancelled.

Invariants:
- A call is in the queue, or with one zygote, or waiting for one or to be retried, or answered.
- There is no task per call. One task looks at all that last (`lasting`).
- Calls start in the order they came, on the family with most free short places, from the leanest zygote that has what
  they import.
- Nothing that is done for a call takes longer the more calls wait or run.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import shutil
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import cached_property
from typing import Any

import trio

from sandbox import jail, machine, runtime
from sandbox.config import ExecutorConfig, resolve_capacity
from sandbox.errors import IsolationError, ProtocolError
from sandbox.executor import monitor, virtual_clock, zygote_frames
from sandbox.executor import result as verdict
from sandbox.executor.call_state import GRACE_S, Work
from sandbox.executor.process_tree import Eagerness
from sandbox.executor.result import WireResult
from sandbox.executor.slots import Slots
from sandbox.executor.zygote_pool import MAX_SLOTS, Family, Zygote
from sandbox.types import Profile

log = logging.getLogger(__name__)

GUEST_ENV = {
    "PATH": "/python/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "MPLBACKEND": "Agg",
    "LD_BIND_NOW": "1",  # see guest/zygote.py
    "PYTHONHASHSEED": "0",  # the same code gets the same answer in every zygote
    "MALLOC_ARENA_MAX": "1",  # each arena reserves 64 MiB of the address space that memory_mb bounds
    # One thread each: calls share the cores, and a zygote that has threads cannot fork.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
MEMORY_KEPT = 1 / 8
"""Of the machine's memory: with less than that available, no call more is taken beside those in short places."""
MEMORY_LOOK_S = 0.25
STALL_S = 0.08
"""Seconds without the end of a call, while calls wait for a short slot, after which calls are demoted earlier. It is
below the default of `demote_after_ms`, so that calls which hold all short slots are demoted when first sampled."""
RETRY_S, LONGEST_RETRY_S = 0.05, 5.0
FREE_REFUSALS = 8
"""So often a call may fail to start, over a quarter of a minute, before that counts as one of its attempts."""

Answer = Callable[[int, WireResult], None]


class Executor:
    """`submit` and `cancel` from one task; results come through `answer(seq, result)`."""

    def __init__(self, config: ExecutorConfig, answer: Answer, *, hurry: bool = False) -> None:
        self.all_cores = machine.granted_cores()
        shared = resolve_capacity(config, self.all_cores)
        self.level = jail.choose_level(config.isolation).level
        self.wanted_files = jail.fds_for_slots(shared["slots"] + shared["long_slots"])
        """With fewer descriptors there are fewer slots than asked for."""
        self.slots = max(1, min(shared["slots"], jail.max_slots_for_fds()))
        self.long_slots = max(0, min(shared["long_slots"], jail.max_slots_for_fds() - self.slots))
        self._demote_after_s = config.demote_after_ms / 1e3
        self._progress_at = -math.inf
        """When a call last ended, or the first of those that wait for a short slot came."""
        self.eagerness = Eagerness()
        self.on_window: Callable[[int], None] = lambda _window: None
        """Told whenever `window` has changed."""
        self._cores = shared["cores"]
        self._memory_kept = int(MEMORY_KEPT * machine.memory_limit())
        self._memory_looked_at = -math.inf
        self._has_memory = True
        self.python = jail.Interpreter.find(config.python or str(runtime.default_python()))
        self._attempts = config.attempts
        self._answer = answer
        self._hurry = hurry
        self._queue: deque[Work] = deque()
        self._waiting: list[Work] = []
        """Calls for which no zygote can stand in until theirs has come (`Family.must_wait`)."""
        self._works: dict[int, Work] = {}
        self._tickets = itertools.count(1)
        self._watches = monitor.Watches(self)
        self._nursery: trio.Nursery | None = None
        self._ready = trio.Event()
        self.counts: Counter[str] = Counter()
        self.missed_imports: Counter[str] = Counter()
        families = max(min(shared["zygote_pools"], self.slots), -(-(self.slots + self.long_slots) // MAX_SLOTS))
        profiles = tuple(Profile(name) for name in config.profiles)
        self._scratch_parent = ""
        if self.level is jail.Level.LANDLOCK:
            has_uids = jail.host_uids(0, 1, self.level)[0] is not None
            parent = self._scratch_parent = jail.scratch_parent_dir(has_uids=has_uids)
            room = shutil.disk_usage(parent).total >> 20
            usual = tempfile.gettempdir()
            instead = f" (not to {usual}, where only some users may enter)" if parent != usual else ""
            log.info("calls write to %s%s, %d MiB that all share: disk_mb bounds each file", parent, instead, room)
        shares = -(-self.slots // families), -(-self.long_slots // families)
        self.families = [self._family(n, Slots(*shares), profiles) for n in range(families)]
        self._window = self.window

    def _family(self, number: int, slots: Slots, profiles: tuple[Profile, ...]) -> Family:
        base, count = jail.host_uids(number, slots.count, self.level, self.python)
        shares_uid = base is None and self.level in (jail.Level.NSJAIL, jail.Level.NAMESPACES)
        scratch = f"{self._scratch_parent}/rstar-sandbox-{secrets.token_hex(8)}"
        spec = jail.JailSpec(
            self.level,
            self.python,
            str(jail.GUEST_SOURCE_DIR),
            env=GUEST_ENV,
            uid_base=base,
            uid_count=count,
            user_namespace_per_call=shares_uid and self._may_count_processes,
            scratch_root=scratch if self.level is jail.Level.LANDLOCK else None,
        )
        return Family(spec, profiles, slots, self, lasting_s=self._demote_after_s, hurry=self._hurry)

    @cached_property
    def _may_count_processes(self) -> bool:
        """Whether each call can have a limit of processes though all share one uid."""
        counts = jail.probe_process_limits()
        if not counts.ok:
            log.warning("no limit of processes for each call but by control groups: %s", counts.found)
        return counts.ok

    async def run(self) -> None:
        """Until cancelled. Raises `NodeError` if the zygotes cannot be started at all."""
        with ExitStack() as stack:
            self._plant(stack)
            await self._run()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for family in self.families:
                nursery.start_soon(family.run)
            nursery.start_soon(self._end_wedged)
            nursery.start_soon(self._watches.run)

    def _plant(self, stack: ExitStack) -> None:
        """Control groups for all slots, if the machine grants any, and their end put on the stack."""
        if self.level is jail.Level.NONE:
            return
        try:
            jail.raise_fd_limit_for(sum(family.slots.count for family in self.families))
            trees = [stack.enter_context(closing(jail.CgroupTree())) for _ in self.families]
        except IsolationError as why:
            stack.close()
            log.warning("no control groups, so the memory of a call's processes is summed by looking at them: %s", why)
            return
        log.info("control groups: %s", "; ".join(map(str, trees)))
        for family, tree in zip(self.families, trees, strict=True):
            family.equip(tree)

    async def wait_ready(self) -> None:
        """Until every family has been complete once; in a hurry, until the first zygote is warm."""
        await self._ready.wait()

    def submit(self, seq: int, call: dict[str, Any]) -> None:
        """Take over a validated call (`Call.encode(binary=True)`)."""
        work = Work.decode(seq, call)
        self._works[seq] = work
        if not self._queue:
            self._progress_at = time.monotonic()
        self._queue.append(work)

    def cancel(self, seq: int) -> None:
        """Nobody waits for this call any more. Unknown numbers are fine: it may just have been answered."""
        work = self._works.pop(seq, None)
        if work is None:
            return
        work.drop()
        if work.whereabouts is not None:
            zygote, ticket = work.whereabouts
            work.give_up_at = min(work.give_up_at, time.monotonic() + GRACE_S)
            zygote.send({"op": "kill", "run_id": ticket})

    def pump(self) -> None:
        """Start what can be started. Call after `submit`."""
        while self._queue:
            if self._queue[0].cancelled:
                self._queue.popleft()
                continue
            if all([family.must_wait(self._queue[0].profile) for family in self.families]):
                self._waiting.append(self._queue.popleft())
                continue
            place = self._place(self._queue[0].profile)
            if place is None:
                break
            self._start(self._queue.popleft(), *place)
        if self.window != self._window:
            self._window = self.window
            self.on_window(self._window)

    def stats(self) -> dict[str, Any]:
        """What an operator wants to see, as plain data."""
        return {
            "queued": len(self._queue) + len(self._waiting),
            "running": self.running,
            "running_short": self.running - self.running_long,
            "running_long": self.running_long,
            "slots": self.slots,
            "long_slots": self.long_slots,
            "zygotes": Counter(zygote.profile.value for zygote in self._zygotes()),
            "zygote_restarts_total": sum(family.deaths for family in self.families),
            "retried_total": self.counts["retried"],
            "demoted_total": self.counts["demoted"],
            "promoted_total": self.counts["promoted"],
            "missed_imports": dict(self.missed_imports.most_common(20)),
        }

    @property
    def is_idle(self) -> bool:
        return not self._works

    @property
    def running(self) -> int:
        """Calls in places, short and long, those that have just ended included."""
        return sum(family.slots.taken for family in self.families)

    @property
    def running_long(self) -> int:
        return sum(len(family.slots.long) for family in self.families)

    @property
    def window(self) -> int:
        """How many calls this executor wants to have at once: those in long places, and two for each short one."""
        return 2 * self.slots + self.running_long

    @property
    def demote_after_s(self) -> float:
        """Virtual time after which a running call becomes a long call: `demote_after_ms`, divided by the calls in short
        slots per core, since each of them has that part of a core and a new short call competes with all of them.

        It is not divided while calls wait and others end: calls that become long then would let more calls start, which
        takes memory, and no call that waits would end sooner. When all short slots are held by calls that do not end,
        nothing ends for `STALL_S`, and it is divided.
        """
        if self._queue and time.monotonic() - self._progress_at < STALL_S:
            return self._demote_after_s
        return self._demote_after_s / max(1.0, (self.running - self.running_long) / self._cores)

    @property
    def calls_per_core(self) -> float:
        return self.running / self._cores

    def _zygotes(self) -> list[Zygote]:
        return [zygote for family in self.families for zygote in family.zygotes.values()]

    def _place(self, profile: Profile) -> tuple[Family, Zygote] | None:
        for family in sorted(self.families, key=lambda family: family.slots.room, reverse=True):
            if not family.slots.room or not family.slots.free:
                return None
            if (zygote := family.best_for(profile)) is not None:
                return family, zygote
        return None

    def _start(self, work: Work, family: Family, zygote: Zygote) -> None:
        slot = family.slots.free.pop()
        try:
            family.take(slot, work, zygote)
        except OSError as why:
            family.park(slot)
            self._refused(work, f"its control group cannot be used: {why}")
            return
        zygote.start(work, next(self._tickets), slot, time.monotonic())
        if not work.modules <= zygote.modules:
            self._count_missed(work.modules - zygote.modules)

    def _count_missed(self, names: set[str]) -> None:
        for name in names:
            if name in self.missed_imports or len(self.missed_imports) < 1000:
                self.missed_imports[name[:60]] += 1

    def on_ready(self) -> None:
        served = (family.has_served for family in self.families)
        if any(served) if self._hurry else all(served):
            self._ready.set()
        self._look_again()

    def on_done(self, zygote: Zygote, work: Work, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._stop_watch(work)
        self._progress_at = time.monotonic()
        was_killed = header.get("signal") == signal.SIGKILL
        if was_killed and work.spent is not None and work.spent.hit_outer_limit and not work.out_of_time:
            self.on_lost([work], "the machine, or whoever runs the server, ran out of memory")
            return
        try:
            has_lasted = (
                zygote_frames.number(header, "wall_ms") >= 1e3 * work.timeout_s
            )  # its own time is no more than that
            is_spent = has_lasted and verdict.cpu_ms(header, work.spent) >= 1e3 * work.most_cpu_s
            result = verdict.judge(
                header,
                blobs,
                call_id=work.call.get("id", ""),
                attempts=work.attempts,
                asked_files=work.call.get("return_files", []),
                timeout_s=work.timeout_s,
                late=is_spent or (work.out_of_time and was_killed),
                spent=jail.CgroupUsage(None, None, hit_own_limit=True) if work.out_of_memory else work.spent,
            )
        except ProtocolError as why:
            self._retry(work, str(why))
            raise
        if work.starved and was_killed:
            cap_s = virtual_clock.hard_cap_s(work.timeout_s)
            result = work.no_verdict("Starved", f"not {work.timeout_s:g} s of a core in {cap_s:g} s")
        self._settle(work, result)
        self.pump()

    def on_failed(self, work: Work, why: str) -> None:
        log.warning("a call did not start: %s", why)
        self._stop_watch(work)
        self._refused(work, why)
        self.pump()

    def _refused(self, work: Work, why: str) -> None:
        """Nothing ran, so trying again costs nothing; what lacks now (processes, descriptors) may be there soon."""
        work.refusals += 1
        assert self._nursery is not None
        self._nursery.start_soon(self._retry_later, work, why, work.refusals <= FREE_REFUSALS)

    def on_lost(self, works: list[Work], why: str) -> None:
        """Others of that jail may be dead too and not yet known to be, so the next attempt waits a moment."""
        assert self._nursery is not None
        for work in works:
            self._stop_watch(work)
            self._nursery.start_soon(self._retry_later, work, why)
        self._look_again()

    def _look_again(self) -> None:
        """A zygote has come or gone."""
        self._queue.extendleft(reversed(self._waiting))
        self._waiting.clear()
        self.pump()

    def on_lasting(self, family: Family, work: Work, wall_s: float, pidfd: int) -> None:
        wall_s = max(0.0, min(wall_s, time.monotonic() - work.ordered_at))
        work.watch = self._watches.begin(work, family.slots, pidfd, wall_s)

    def lengthen(self, slots: Slots, work: Work) -> bool:
        now = time.monotonic()
        if not 0 <= now - self._memory_looked_at < MEMORY_LOOK_S:
            self._memory_looked_at = now
            self._has_memory = machine.memory_available() >= self._memory_kept
        if not self._has_memory or not slots.lengthen(work.slot):
            return False
        self.count("demoted")
        self.pump()
        return True

    def allow(self, work: Work, wall_s: float) -> None:
        if not work.cancelled:
            work.give_up_at = time.monotonic() + wall_s + GRACE_S

    def count(self, what: str) -> None:
        self.counts[what] += 1

    async def _retry_later(self, work: Work, why: str, is_free: bool = False) -> None:
        await trio.sleep(min(LONGEST_RETRY_S, RETRY_S * 2 ** (work.attempts + work.refusals)))
        self._retry(work, why, is_free)
        self.pump()

    def _retry(self, work: Work, why: str, is_free: bool = False) -> None:
        if work.cancelled:
            return
        if work.attempts >= self._attempts and not is_free:
            self._settle(work, work.no_verdict("NodeError", f"tried {work.attempts} times; last: {why}"))
            return
        self.counts["retried"] += 1
        work.attempts += not is_free
        work.out_of_time = work.out_of_memory = work.starved = False
        work.is_long = work.has_long_place = work.has_share = False
        work.most_cpu_s = math.inf
        self._queue.appendleft(work)

    def _settle(self, work: Work, result: WireResult) -> None:
        if not work.cancelled:
            del self._works[work.seq]
            self._answer(work.seq, result)

    @staticmethod
    def _stop_watch(work: Work) -> None:
        if work.watch is not None:
            work.watch.end()
            work.watch = None

    async def _end_wedged(self) -> None:
        """The last resort: a zygote that does not even report its dead loses its jail."""
        while True:
            await trio.sleep(1)
            now = time.monotonic()
            for family in self.families:
                if any(w.give_up_at < now for z in family.zygotes.values() for w in z.calls.values()):
                    log.error("a zygote has not answered in time; its jail is ended")
                    family.kill()
