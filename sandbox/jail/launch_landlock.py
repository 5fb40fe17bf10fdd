"""Level `landlock`: the launcher, for containers that grant no namespaces. Started by `plan.command`.

    server ── launcher ── init (adopts orphans) ── guest (the zygote), its own process group ── calls, their own uids
              waits       ends and removes what the guest leaves

- Only the guest is held by Landlock: it reads what Python needs and writes into the folder of calls. Launcher and init
  run nothing but this file.
- Init ends with the guest or the launcher. By then it has killed the guest's group, every uid of the jail's slots and
  its own children, until none is left: all below are its children once their parents are dead. Then it removes the
  folder.
- Whoever holds the lock on the folder owns the uids: the next launcher waits for it, and first sweeps what one that was
  killed together with its init has left.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn

from sandbox.errors import IsolationError
from sandbox.jail import kernel, launcher
from sandbox.jail.landlock_rules import REMOVE_DIR, rules_for
from sandbox.jail.private import share
from sandbox.jail.spec import FIRST_SLOT_UID, JailSpec
from sandbox.jail.uid_range import LANDLOCK_CAPABILITIES

SWEEP_S = 60.0
"""For one slot's folder; what hostile code can fill in its time can be removed in less."""


def main() -> NoReturn:
    spec, fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    parent = launcher.detach_from_server()
    try:
        folder = _Folder(spec)
        folder.make()
    except IsolationError as why:
        print(f"jail: {why}", file=sys.stderr, flush=True)
        os._exit(launcher.EXIT_LAYER_REFUSED)
    launcher_alive_r, launcher_alive_w = os.pipe()  # init sees the end of this process
    init = os.fork()
    if init == 0:
        os.close(launcher_alive_w)
        os._exit(_run_init(spec, folder, fd, launcher_alive_r))
    os.close(fd)
    kernel.set_not_dumpable()
    ended = _first_of(parent, os.pidfd_open(init))
    if ended == parent:
        os._exit(1)
    code = launcher.reap_until(init)
    folder.sweep()  # nothing is left to do, unless init was killed
    os._exit(code)


def _run_init(spec: JailSpec, folder: _Folder, fd: int, launcher_alive_r: int) -> int:
    kernel.set_child_subreaper()
    guest = os.fork()
    if guest == 0:
        _become_guest(spec, fd)
    with suppress(PermissionError):  # it has done so itself, and runs its program already
        os.setpgid(guest, guest)
    launcher.close_fds_except(launcher_alive_r, folder.lock)
    kernel.set_not_dumpable()
    _first_of(launcher_alive_r, os.pidfd_open(guest))
    code = _end_all(spec, guest)
    folder.sweep()
    return code


def _become_guest(spec: JailSpec, fd: int) -> NoReturn:
    try:
        os.chdir("/")  # where the server was started is its own affair
        os.setpgid(0, 0)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a ruleset for each slot
        kernel.set_no_new_privs()
        if spec.uid_base is not None:
            share(spec.python)
            os.setgroups([])
            kernel.limit_bounding_set(LANDLOCK_CAPABILITIES)
        given = rules_for(spec, kernel.landlock_abi())
        calls = (f"{spec.scratch}/calls", given.scratch | REMOVE_DIR)
        kernel.restrict_with_landlock(given.handled, (*given.paths, calls), given.flags)
    except OSError as why:
        print(f"jail: landlock: the kernel refused ({why})", file=sys.stderr, flush=True)
        os._exit(launcher.EXIT_LAYER_REFUSED)
    launcher.exec_guest(spec, fd)


def _end_all(spec: JailSpec, guest: int) -> int:
    """Kill until there is nobody left; the guest's exit status.

    A call leaves the guest's group only when it has its uid, or else dies with its zygote: so whoever is not of the
    group when that is killed is killed after it.
    """
    code = 0
    while True:
        with suppress(ProcessLookupError):
            os.killpg(guest, signal.SIGKILL)
        _kill_slots(spec)
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, status = os.wait()
            while pid:  # all that are dead by now: there are hundreds of slots to go through again
                if pid == guest:
                    code = os.waitstatus_to_exitcode(status)
                    code = code if code >= 0 else 128 - code
                pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code


def _children() -> list[int]:
    """Of this process; none where the kernel does not tell (CONFIG_PROC_CHILDREN)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _kill_slots(spec: JailSpec) -> None:
    """Everything that has a slot's uid, at once: kill(2) goes by the effective uid; see `guest/landlock_slots.py`."""
    if spec.uid_base is None:
        return
    for slot in range(spec.slots):
        uid = spec.uid_base + FIRST_SLOT_UID + slot
        os.setresuid(uid + spec.slots, uid, 0)
        try:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        finally:
            os.setresuid(0, 0, 0)


class _Folder:
    """The jail's folder: `guest`, a copy of the guest's source, and `calls`, with a place for each slot."""

    def __init__(self, spec: JailSpec) -> None:
        assert spec.scratch is not None
        self.spec = spec
        self.path = spec.scratch
        self.lock = -1

    def make(self) -> None:
        """Take it over, empty. Raises `IsolationError`."""
        try:
            self._take()
            _kill_slots(self.spec)
            self._clear()
            shutil.copytree(self.spec.guest_dir, f"{self.path}/guest", ignore=_all_but_sources)
            os.mkdir(f"{self.path}/calls")
            for path, mode in ((self.path, 0o711), (f"{self.path}/guest", 0o755), (f"{self.path}/calls", 0o711)):
                os.chmod(path, mode)
        except OSError as why:
            raise IsolationError(f"folder of calls: {why}; name another place with TMPDIR") from None

    def sweep(self) -> None:
        """Remove it, and all that calls have left in it. Idempotent."""
        try:
            self._clear()
            os.rmdir(self.path)
        except FileNotFoundError:
            pass
        except (OSError, subprocess.SubprocessError) as why:
            print(f"jail: {self.path} is not removed: {why}", file=sys.stderr, flush=True)

    def _take(self) -> None:
        while True:
            with suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            held = os.fstat(self.lock)
            if held.st_uid != os.geteuid():
                raise PermissionError(f"{self.path} belongs to uid {held.st_uid}")
            with suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == held.st_ino:
                    return
            os.close(self.lock)  # whoever held it has removed it while we waited

    def _clear(self) -> None:
        calls = f"{self.path}/calls"
        for name in os.listdir(calls) if os.path.isdir(calls) else ():
            self._remove_place(f"{calls}/{name}", int(name.partition(".")[0]))
        for name in os.listdir(self.path):
            shutil.rmtree(f"{self.path}/{name}")

    def _remove_place(self, place: str, slot: int) -> None:
        """Nothing of the server's walks through what hostile code has made: its owner does."""
        if _is_removed(f"{place}/tmp") and _is_removed(place):
            return
        has_uids = self.spec.uid_base is not None
        filled = f"{place}/tmp" if has_uids else place
        argv = [self.spec.guest_python, "-I", "-S", "-B", f"{self.spec.guest_dir_in_jail}/scratch_cleanup.py", filled]
        become = partial(self._become_owner, slot) if has_uids else None
        subprocess.run(argv, env={}, stdin=subprocess.DEVNULL, timeout=SWEEP_S, check=True, preexec_fn=become)
        _is_removed(f"{place}/tmp")
        os.rmdir(place)

    def _become_owner(self, slot: int) -> None:
        """In a child: be the user that the calls of a slot are, and reach the guest's Python as they do."""
        assert self.spec.uid_base is not None
        uid = self.spec.uid_base + FIRST_SLOT_UID + slot
        share(self.spec.python)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _is_removed(folder: str) -> bool:
    """Remove a folder if it is empty or there; say whether it is not there any more."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _all_but_sources(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".py")]


def _first_of(*ends: int) -> int:
    """Wait until one of these descriptors has something to read or has ended."""
    poll = select.poll()
    for fd in ends:
        poll.register(fd, select.POLLIN)
    return poll.poll()[0][0]


if __name__ == "__main__":
    main()
