"""Level `landlock`: what stands in for namespaces. A folder for each call, rules that hold it there, and its end.

- A slot has a place, `SCRATCH/N`, which stays and which the slot's ruleset gives; in it each call finds its own new
  folder, removed after it. So rulesets are made once for each slot.
- Where we may change uids, a slot is three of them: the call's, and two that tell its zygote and its cleaner apart from
  it. One kill(2) of everything that the call's uid has is atomic: neither a daemon nor a fork bomb gets away.
- Where we may not, the filter keeps a call to one process, whose end is the call's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
from collections.abc import Iterator

import descriptors
import scratch_cleanup

_libc = ctypes.PyDLL(None)
_libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
_syscall, _prctl = _libc.syscall, _libc.prctl
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGKILL = 9
_AT_ONCE = 500
"""Steps of emptying that a zygote takes itself, about 5 ms; for more it has a child."""
_CLEANING_S = 60


class Ground:
    """The places of one jail's slots. Made in the first zygote, inherited by the others."""

    def __init__(self, plan: dict) -> None:
        self._uid_base: int | None = plan["uid_base"]
        self._slots: int = plan["slots"]
        self._scratch: str = plan["folder"]
        self._flags: int = plan["flags"]
        self._attributes = struct.pack("<QQQ", *plan["handled"])
        self._access: int = plan["scratch"]
        self._rules = [(os.open(path, os.O_PATH | os.O_CLOEXEC), access) for path, access in plan["paths"]]
        self._rulesets: dict[int, tuple[tuple[int, int], int]] = {}  # by slot: the place's identity, the ruleset
        self._zygote = 0
        self._abandoned = 0

    def settle(self) -> None:
        """Once in each zygote: orphans of its calls become its children, so that it hears of their end."""
        self._zygote = os.getpid()
        _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(CHILD_SUBREAPER)")
        self._die_with_parent()

    def prepare(self, slot: int) -> None:
        """Make an empty folder for a call, and the slot's rules. Raises OSError while something is left of an earlier
        call, whose zygote died."""
        if not self._is_over(slot):
            raise OSError(errno.EBUSY, "processes of an earlier call are still ending")
        place = self._place(slot)
        folder = f"{place}/tmp"
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            self.end(slot)
            self._place(slot)
            os.mkdir(folder, 0o700)
        if self._uid_base is not None:
            uid = self._uid_base + slot
            os.chown(folder, uid, uid)

    def restrict(self, slot: int) -> None:
        """In the call: from here on, its folder is all that it can write."""
        _check(_syscall(_RESTRICT_SELF, self._rulesets[slot][1], self._flags), "landlock_restrict_self")

    def enter(self, slot: int) -> None:
        """In the call, once it has its uid: go home."""
        home = f"{self._scratch}/{slot}/tmp"
        os.chdir(home)
        os.environ["HOME"] = os.environ["TMPDIR"] = home

    def leave(self) -> None:
        """In the call, once it has its uid: out of the zygote's session, into which no signal of its own then goes. By
        then the end of the zygote ends it, or its uid does."""
        if os.getppid() != self._zygote:
            os._exit(1)
        os.setsid()

    def end(self, slot: int) -> bool:
        """Kill what is left of a call whose first process has died, and remove its folder. False while something of it
        is still dying: ask again when a child has died."""
        if not self._is_over(slot):
            return False
        place = f"{self._scratch}/{slot}"
        try:
            is_removed = self._uid_base is not None and scratch_cleanup.is_removed(f"{place}/tmp")
            is_removed = is_removed or self._remove(slot, place)
        except OSError:
            is_removed = False
        if not is_removed:
            self._abandon(slot)
        return True

    def _remove(self, slot: int, place: str) -> bool:
        """Empty the folder and remove it, unless that takes long. With one uid for all, calls write beside it too."""
        with self._as_owner(slot):
            if not scratch_cleanup.empty(place if self._uid_base is None else f"{place}/tmp", _AT_ONCE):
                return False
        return self._uid_base is None or scratch_cleanup.is_removed(f"{place}/tmp")

    def _place(self, slot: int) -> str:
        place = f"{self._scratch}/{slot}"
        try:
            about = os.stat(place)
        except FileNotFoundError:
            os.mkdir(place, 0o711)
            about = os.stat(place)
        identity = about.st_dev, about.st_ino
        known, ruleset = self._rulesets.get(slot, (None, -1))
        if known != identity:
            if ruleset >= 0:
                os.close(ruleset)
            self._rulesets[slot] = identity, self._make_ruleset(place)
        return place

    def _make_ruleset(self, place: str) -> int:
        ruleset = _syscall(_CREATE_RULESET, self._attributes, ctypes.c_size_t(len(self._attributes)), 0)
        _check(ruleset, "landlock_create_ruleset")
        beneath = os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            for fd, access in (*self._rules, (beneath, self._access)):
                rule = struct.pack("<Qi", access, fd)
                _check(_syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), "landlock_add_rule")
        finally:
            os.close(beneath)
        return int(ruleset)

    def _is_over(self, slot: int) -> bool:
        """Whether the call's uid has no process; those that it has are killed."""
        if self._uid_base is None:
            return True
        try:
            os.getpriority(os.PRIO_USER, self._uid_base + slot)
        except ProcessLookupError:
            return True
        with self._as_owner(slot):
            os.kill(-1, _SIGKILL)
        return False

    @contextlib.contextmanager
    def _as_owner(self, slot: int) -> Iterator[None]:
        """With the call's uid as effective one, by which kill(2) and files go. The real one is the slot's second, since
        a process of the call may signal whatever has its uid as real or saved; the saved one is the way back."""
        if self._uid_base is None:
            yield
            return
        os.setresuid(self._uid_base + self._slots + slot, self._uid_base + slot, -1)
        try:
            yield
        finally:
            os.setresuid(0, 0, -1)
            self._die_with_parent()

    def _die_with_parent(self) -> None:
        """Every change of the effective uid undoes it (prctl(2))."""
        _check(_prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl(PDEATHSIG)")

    def _abandon(self, slot: int) -> None:
        """Too much for now: the place goes aside as it is, the slot gets another, and a child empties the old one."""
        self._abandoned += 1
        aside = f"{self._scratch}/{slot}.{os.getpid()}.{self._abandoned}"
        os.rename(f"{self._scratch}/{slot}", aside)
        if os.fork() == 0:
            self._clean(slot, aside)

    def _clean(self, slot: int, place: str) -> None:
        """As a child: empty a place that nobody uses any more, in bounded time, and end."""
        try:
            signal.alarm(_CLEANING_S)
            descriptors.close_from(3)
            if self._uid_base is not None:
                cleaner = self._uid_base + 2 * self._slots + slot
                os.setresuid(cleaner, self._uid_base + slot, 0)
                self._die_with_parent()
                scratch_cleanup.empty(f"{place}/tmp")
                os.setresuid(0, 0, 0)
                os.rmdir(f"{place}/tmp")
            else:
                scratch_cleanup.empty(place)
            os.rmdir(place)
        finally:
            os._exit(0)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = _libc.__errno_location()[0]
        raise OSError(number, f"{what}: {os.strerror(number)}")
