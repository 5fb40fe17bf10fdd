"""Level `landlock`: a scratch directory per call, the rules that confine it there, and its clean-up.

A slot is a numbered set of resources that one call uses at a time.

- Each slot has a directory `SCRATCH/SLOT` and a ruleset for it, which stay. Each call gets a new directory `tmp` in it,
  which is removed after the call.
- If the zygote may change uids, a slot has three uids. The first is for the call, the second for the zygote while it
  cleans up after the call, and the third for a child process that removes many files. One kill(2) kills all processes
  with the call's uid at the same time, so neither a daemon nor a fork bomb escapes.
- If the zygote may not change uids, the seccomp filter limits a call to one process. The call ends with this process.
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
import system_calls
from system_calls import check

_PATH_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH
_MAX_INLINE_S = 0.005
"""Seconds that a zygote spends at most on the removal of one call's files. A child process removes the rest."""
_CLEANER_TIMEOUT_S = 60
"""Seconds after which this child process is killed. The end of the jail then removes what is left."""


class LandlockSlots:
    """The scratch directories and rulesets of one jail's slots. Child zygotes inherit this object."""

    def __init__(self, plan: dict) -> None:
        self._uid_base: int | None = plan["uid_base"]
        self._slots: int = plan["slots"]
        self._scratch: str = plan["slots_dir"]
        self._flags: int = plan["flags"]
        self._attributes = struct.pack("<QQQ", *plan["handled"])
        self._access: int = plan["scratch_rights"]
        self._rules = [(os.open(path, os.O_PATH | os.O_CLOEXEC), access) for path, access in plan["paths"]]
        self._rulesets: dict[int, tuple[tuple[int, int], int]] = {}  # slot -> (device, inode) of its directory, ruleset
        self._zygote_pid = 0
        self._moved_aside = 0
        self._to_clean: list[tuple[int, str]] = []  # slots and directories that wait for a child that empties them

    def become_subreaper(self) -> None:
        """Become the parent of all orphans of this zygote's calls, to be notified when they die. Called once in each
        zygote."""
        self._zygote_pid = os.getpid()
        check(system_calls.prctl(system_calls.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(CHILD_SUBREAPER)")
        self._set_parent_death_signal()

    def make_dir(self, slot: int) -> None:
        """Make an empty directory for a call, and the slot's ruleset.

        Raises OSError while a process is left of an earlier call whose zygote has died.
        """
        if not self._kill_remaining(slot):
            raise OSError(errno.EBUSY, "processes of an earlier call are still ending")
        self._slot_dir(slot)
        directory = self.home(slot)
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            self.clean_up(slot)
            self._slot_dir(slot)
            os.mkdir(directory, 0o700)
        if self._uid_base is not None:
            uid = self._uid_base + slot
            os.chown(directory, uid, uid)

    def ruleset(self, slot: int) -> tuple[int, int]:
        """Return the arguments of landlock_restrict_self(2): the descriptor of the slot's ruleset, and flags."""
        return self._rulesets[slot][1], self._flags

    def home(self, slot: int) -> str:
        """Return the working directory of a slot's call."""
        return f"{self._scratch}/{slot}/tmp"

    def exit_if_orphaned(self) -> None:
        """In the call: exit if the zygote died before the call set its parent-death signal."""
        if os.getppid() != self._zygote_pid:
            os._exit(1)

    def clean_up(self, slot: int) -> bool:
        """Kill what is left of a call whose first process has died, and remove its directory.

        Return False while a process of the call is still dying. The caller then calls again when a child has died.
        """
        if not self._kill_remaining(slot):
            return False
        try:
            is_removed = self._uid_base is not None and scratch_cleanup.try_rmdir(self.home(slot))
            is_removed = is_removed or self._remove(slot)
        except OSError:
            is_removed = False
        if not is_removed:
            self._move_aside(slot)
        self._start_cleaners()
        return True

    def _remove(self, slot: int) -> bool:
        """Empty and remove a call's directory. Return False if this takes longer than `_MAX_INLINE_S`.

        If all calls have one uid, a call can also write beside its directory, so the whole directory of the slot is
        emptied.
        """
        directory = self.home(slot) if self._uid_base is not None else os.path.dirname(self.home(slot))
        with self._as_owner(slot):
            if not scratch_cleanup.empty(directory, _MAX_INLINE_S):
                return False
        return self._uid_base is None or scratch_cleanup.try_rmdir(directory)

    def _slot_dir(self, slot: int) -> str:
        """Return the slot's directory, made with its ruleset if it is new."""
        slot_dir = f"{self._scratch}/{slot}"
        try:
            status = os.stat(slot_dir)
        except FileNotFoundError:
            os.mkdir(slot_dir, 0o711)  # calls may enter it, but not list it
            status = os.stat(slot_dir)
        identity = status.st_dev, status.st_ino
        known_identity, ruleset = self._rulesets.get(slot, (None, -1))
        if known_identity != identity:
            if ruleset >= 0:
                os.close(ruleset)
            self._rulesets[slot] = identity, self._make_ruleset(slot_dir)
        return slot_dir

    def _make_ruleset(self, slot_dir: str) -> int:
        size = ctypes.c_size_t(len(self._attributes))
        ruleset = system_calls.syscall(system_calls.LANDLOCK_CREATE_RULESET, self._attributes, size, 0)
        check(ruleset, "landlock_create_ruleset")
        slot_dir_fd = os.open(slot_dir, os.O_PATH | os.O_CLOEXEC)
        try:
            for fd, access in (*self._rules, (slot_dir_fd, self._access)):
                rule = struct.pack("<Qi", access, fd)
                added = system_calls.syscall(system_calls.LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
                check(added, "landlock_add_rule")
        finally:
            os.close(slot_dir_fd)
        return int(ruleset)

    def _kill_remaining(self, slot: int) -> bool:
        """Kill all processes of the slot's uid. Return whether there were none."""
        if self._uid_base is None:
            return True
        try:
            os.getpriority(os.PRIO_USER, self._uid_base + slot)  # fails if no process has this uid
        except ProcessLookupError:
            return True
        with self._as_owner(slot):
            os.kill(-1, signal.SIGKILL)
        return False

    @contextlib.contextmanager
    def _as_owner(self, slot: int) -> Iterator[None]:
        """Set the effective uid to the uid of the call. The effective uid decides about kill(2) and files.

        The real uid becomes the slot's second uid, because a process of the call may signal each process whose real or
        saved uid is that of the call. The saved uid stays 0, so that this process can become uid 0 again.
        """
        if self._uid_base is None:
            yield
            return
        os.setresuid(self._uid_base + self._slots + slot, self._uid_base + slot, -1)
        try:
            yield
        finally:
            os.setresuid(0, 0, -1)
            self._set_parent_death_signal()

    def _set_parent_death_signal(self) -> None:
        """Set the parent-death signal again, because every change of the effective uid clears it (prctl(2))."""
        check(system_calls.prctl(system_calls.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PDEATHSIG)")

    def _move_aside(self, slot: int) -> None:
        """Rename a slot directory that takes long to empty. A child process empties it, and the slot gets a new
        directory."""
        self._moved_aside += 1
        aside = f"{self._scratch}/{slot}.{os.getpid()}.{self._moved_aside}"
        with contextlib.suppress(OSError):  # for example a full disk: the slot's next call tries again
            os.rename(f"{self._scratch}/{slot}", aside)
            self._to_clean.append((slot, aside))

    def _start_cleaners(self) -> None:
        while self._to_clean:
            try:
                is_cleaner = os.fork() == 0
            except OSError:  # out of processes or memory: the end of a later call tries again
                return
            slot, slot_dir = self._to_clean.pop()
            if is_cleaner:
                self._run_cleaner(slot, slot_dir)

    def _run_cleaner(self, slot: int, slot_dir: str) -> None:
        """In a child: empty a directory that no call uses any more, within a time limit, and exit."""
        try:
            signal.alarm(_CLEANER_TIMEOUT_S)
            descriptors.close_from(3)
            if self._uid_base is not None:
                cleaner_uid = self._uid_base + 2 * self._slots + slot
                os.setresuid(cleaner_uid, self._uid_base + slot, 0)
                self._set_parent_death_signal()
                scratch_cleanup.empty(f"{slot_dir}/tmp")
                os.setresuid(0, 0, 0)
                os.rmdir(f"{slot_dir}/tmp")
            else:
                scratch_cleanup.empty(slot_dir)
            os.rmdir(slot_dir)
        finally:
            os._exit(0)
