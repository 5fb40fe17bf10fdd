"""Level `landlock`: a program for containers that grant no namespaces. `plan.launch_argv` starts it.

    server ── launcher ── init (subreaper) ── guest (the zygote), its own process group ── calls, one uid per slot
              waits       cleans up after the guest

- Landlock restricts the guest: it may read the files that Python needs, and write below `scratch_root`/calls. Launcher
  and init are not restricted, since they run only the code of this file.
- When the guest or the launcher ends, init kills the guest's process group, all processes with a uid of a slot, and all
  children of init. init repeats this until it has no child. Then no process of the jail is left, because a process
  whose parent has died becomes a child of init. At last init renames `scratch_root` and removes it, which may take
  minutes.
- The launcher that holds the lock on `scratch_root` owns the uids of the slots. Once the directory is renamed, the next
  launcher may take the lock and these uids.
- If launcher and init are killed together, the directories of their jail are left. The next init with the same
  `scratch_root` has a child that removes them while the guest runs.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from typing import NoReturn

from sandbox import machine
from sandbox.errors import IsolationError
from sandbox.jail import kernel, launcher, python_access, root_fs
from sandbox.jail.landlock_rules import REMOVE_DIR, rules_for
from sandbox.jail.spec import FIRST_SLOT_UID, JailSpec
from sandbox.jail.uid_range import LANDLOCK_CAPABILITIES

CLEANUP_TIMEOUT_S = 60.0
"""Maximum number of seconds for the removal of one slot's files."""


def main() -> NoReturn:
    spec, socket_fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    server_pidfd = launcher.leave_server_session()
    try:
        scratch = _ScratchRoot(spec)
        scratch.create()
    except IsolationError as error:
        launcher.print_error(error)
        os._exit(launcher.EXIT_LAYER_REFUSED)
    launcher_alive_r, launcher_alive_w = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(launcher_alive_w)
        os._exit(_run_init(spec, scratch, socket_fd, launcher_alive_r))
    os.close(socket_fd)
    kernel.set_not_dumpable()
    if launcher.wait_for_first(server_pidfd, os.pidfd_open(init)) == server_pidfd:
        os._exit(1)
    status = launcher.reap_until(init)
    scratch.remove()  # init has removed it already, unless init was killed
    os._exit(status)


def _run_init(spec: JailSpec, scratch: _ScratchRoot, socket_fd: int, launcher_alive_r: int) -> int:
    kernel.set_child_subreaper()
    guest = os.fork()
    if guest == 0:
        _run_guest(spec, socket_fd)
    with suppress(PermissionError):  # EACCES: the guest has called exec, and before that setpgid for itself
        os.setpgid(guest, guest)
    launcher.close_fds_except(launcher_alive_r, scratch.lock)
    kernel.set_not_dumpable()
    if (old := scratch.old_dirs()) and os.fork() == 0:
        scratch.remove_old_and_exit(old)
    launcher.wait_for_first(launcher_alive_r, os.pidfd_open(guest))
    status = _kill_all(spec, guest)
    scratch.remove()
    return status


def _run_guest(spec: JailSpec, socket_fd: int) -> NoReturn:
    try:
        os.chdir("/")  # the guest must not keep the server's directory busy
        os.setpgid(0, 0)
        machine.raise_fd_limit(sys.maxsize)  # the zygote holds a ruleset per slot
        kernel.set_no_new_privs()
        if spec.uid_base is not None:
            python_access.make_reachable(spec.python)
            os.setgroups([])
            kernel.limit_bounding_set(LANDLOCK_CAPABILITIES)
        rules = rules_for(spec, kernel.landlock_abi())
        calls = (f"{spec.scratch_root}/calls", rules.scratch_rights | REMOVE_DIR)
        kernel.restrict_with_landlock(rules.handled, (*rules.paths, calls), rules.flags)
    except OSError as error:
        launcher.print_error(f"landlock: the kernel refused ({error})")
        os._exit(launcher.EXIT_LAYER_REFUSED)
    launcher.exec_guest(spec, socket_fd)


def _kill_all(spec: JailSpec, guest: int) -> int:
    """Kill processes until init has no child left, and return the guest's exit status.

    A call leaves the guest's process group only after it has taken the uid of its slot. So each process outside of the
    group has the uid of a slot, and `_kill_slots` kills it. If slots have no uids, a call dies with its zygote.
    """
    guest_status = 0
    while True:
        with suppress(ProcessLookupError):
            os.killpg(guest, signal.SIGKILL)
        _kill_slots(spec)
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, status = os.wait()
            while pid:  # reap all ended children before the next round of kills, which needs a system call per slot
                if pid == guest:
                    guest_status = launcher.shell_exit_status(status)
                pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return guest_status


def _children() -> list[int]:
    """Return the children of this process. The list is empty if the kernel lacks it (CONFIG_PROC_CHILDREN)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _kill_slots(spec: JailSpec) -> None:
    """Kill all processes with a slot's uid, by one kill(2) per slot.

    During kill(2), this process has the effective uid of the slot's calls, so that it may signal them. Its real uid is
    the slot's second uid (`guest/landlock_slots.py`), so that no call can signal this process.
    """
    if spec.uid_base is None:
        return
    for slot in range(spec.landlock_slots):
        uid = spec.uid_base + FIRST_SLOT_UID + slot
        os.setresuid(uid + spec.landlock_slots, uid, 0)
        try:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        finally:
            os.setresuid(0, 0, 0)


class _ScratchRoot:
    """The directory `scratch_root`. It contains `guest`, a copy of the guest's source, and `calls`, with a directory
    per slot. Before `scratch_root` is removed, it gets the name `scratch_root`.N."""

    def __init__(self, spec: JailSpec) -> None:
        assert spec.scratch_root is not None
        self.spec = spec
        self.path = spec.scratch_root
        self.lock = -1

    def create(self) -> None:
        """Lock the directory and fill it. Raises `IsolationError`."""
        try:
            self._acquire_lock()
            _kill_slots(self.spec)
            if os.listdir(self.path):
                self._rename()
                self._acquire_lock()
            root_fs.copy_guest(self.spec.guest_dir, f"{self.path}/guest")
            os.mkdir(f"{self.path}/calls")
            for directory in (self.path, f"{self.path}/calls"):
                os.chmod(directory, 0o711)
        except OSError as error:
            raise IsolationError(f"scratch directories: {error}; choose another directory with TMPDIR") from None

    def remove(self) -> None:
        """Remove the directory, and the renamed directories that earlier jails have left, with all files of calls in
        them. Idempotent."""
        with suppress(FileNotFoundError):
            self._rename()
        for path in self.old_dirs():
            self._remove(path)

    def old_dirs(self) -> list[str]:
        """Return the renamed directories of earlier jails."""
        return glob.glob(f"{glob.escape(self.path)}.*")

    def remove_old_and_exit(self, old_dirs: list[str]) -> NoReturn:
        """Remove the directories that no other process removes, and exit. Runs in a child of init."""
        try:
            os.close(self.lock)  # if init is killed, the next launcher must not wait for this process
            kernel.set_parent_death_signal()
            for path in old_dirs:
                self._remove(path)
        finally:
            os._exit(0)

    def _acquire_lock(self) -> None:
        while True:
            with suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            locked = os.fstat(self.lock)
            if locked.st_uid != os.geteuid():
                raise PermissionError(f"{self.path} belongs to uid {locked.st_uid}")
            with suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == locked.st_ino:
                    return
            os.close(self.lock)  # the last owner renamed the directory while this process waited for the lock

    def _rename(self) -> None:
        """Give the directory another name, and unlock it. Raises FileNotFoundError if it has been renamed already."""
        os.rename(self.path, f"{self.path}.{time.time_ns()}")
        fcntl.flock(self.lock, fcntl.LOCK_UN)  # to close it is not enough, since other processes have it open
        os.close(self.lock)

    def _remove(self, path: str) -> None:
        """Remove a renamed directory, unless another process does so."""
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            calls = f"{path}/calls"
            for name in os.listdir(calls) if os.path.isdir(calls) else ():  # SLOT, or SLOT.PID.N if moved aside
                self._remove_slot_dir(path, name)
            if _remove_if_empty(calls):
                shutil.rmtree(f"{path}/guest", ignore_errors=True)
                os.rmdir(path)
        except BlockingIOError:
            pass
        except OSError as error:
            launcher.print_error(f"cannot remove {path}: {error}")

    def _remove_slot_dir(self, root: str, name: str) -> None:
        """Remove the directory of a slot; print why if that fails.

        A child process with the slot's uid empties it, because no process with more rights may enter directories of
        hostile code.
        """
        slot_dir = f"{root}/calls/{name}"
        if _remove_if_empty(f"{slot_dir}/tmp") and _remove_if_empty(slot_dir):
            return
        has_uids = self.spec.uid_base is not None
        hostile_dir = f"{slot_dir}/tmp" if has_uids else slot_dir
        argv = [self.spec.guest_python, "-I", "-S", "-B", f"{root}/guest/scratch_cleanup.py", hostile_dir]
        become = partial(self._become_slot_user, int(name.partition(".")[0])) if has_uids else None
        null = subprocess.DEVNULL
        try:
            subprocess.run(argv, env={}, stdin=null, timeout=CLEANUP_TIMEOUT_S, check=True, preexec_fn=become)
            _remove_if_empty(f"{slot_dir}/tmp")
            os.rmdir(slot_dir)
        except (OSError, subprocess.SubprocessError) as error:  # the files of the other slots are removed nevertheless
            launcher.print_error(f"cannot remove {slot_dir}: {error}")

    def _become_slot_user(self, slot: int) -> None:
        """Take the effective uid of a slot's calls. Runs in a child process, which must still reach the guest's Python.
        The real and the saved uid become the slot's third uid, so that neither a call nor the clean-up after a call can
        kill this process."""
        assert self.spec.uid_base is not None
        uid = self.spec.uid_base + FIRST_SLOT_UID + slot
        cleaner_uid = uid + 2 * self.spec.landlock_slots
        python_access.make_reachable(self.spec.python)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(cleaner_uid, uid, cleaner_uid)


def _remove_if_empty(path: str) -> bool:
    """Remove a directory if it exists and is empty. Returns whether it does not exist any more."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
