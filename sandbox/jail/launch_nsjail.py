"""Level `nsjail`: the launcher, which lays the root out and has nsjail make the jail. Started by `plan.command`.

    server ── launcher ── nsjail ── init (PID 1 inside, guest/init.py) ── guest (the zygote) ── calls
              waits       waits     reaps orphans

- nsjail dies with the launcher, init with nsjail, and the kernel kills everything inside when init ends.
- The root is made before nsjail makes the user namespace of the guest, so that its mounts are locked (`namespaces`).
- Nothing of ours or nsjail's stays on the host: its work folders are made on a private /run.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from sandbox.errors import IsolationError
from sandbox.jail import kernel, launcher, nsjail_binary, nsjail_config, root_fs, userns
from sandbox.jail.spec import JailSpec
from sandbox.jail.userns import layer_errors

EXIT_NSJAIL_FAILED = 255
"""nsjail's exit status when it could not make the jail. The zygote's own is never that."""
# nsjail makes its work folders below /run first of all, and what it is made of is never there.
NSJAIL_WORK_DIR = "/run"
ROOT, CONFIG, LOG = f"{NSJAIL_WORK_DIR}/root", f"{NSJAIL_WORK_DIR}/nsjail.cfg", f"{NSJAIL_WORK_DIR}/nsjail.log"
LOG_BYTES = 4096


def main() -> NoReturn:
    spec, fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    parent = launcher.detach_from_server()
    try:
        status = _run(spec, fd, parent)
        if status == EXIT_NSJAIL_FAILED:
            raise IsolationError(f"namespaces and id map: nsjail did not make them ({_log_excerpt()})")
    except IsolationError as why:
        print(f"jail: {why}", file=sys.stderr, flush=True)
        status = launcher.EXIT_LAYER_REFUSED
    os._exit(status)


def _run(spec: JailSpec, fd: int, parent: int) -> int:
    """nsjail's exit status, which is the guest's."""
    binary = os.open(nsjail_binary.find(os.environ), os.O_RDONLY)
    launcher_alive_r, launcher_alive_w = os.pipe()
    id_map = prepare_host_side(spec)
    start = nsjail_config.StartParameters(fd, launcher_alive_r, ROOT, LOG, id_map, os.getpriority(os.PRIO_PROCESS, 0))
    with open(CONFIG, "w", encoding="ascii") as file:
        file.write(nsjail_config.config(spec, start))
    launcher_pid = os.getpid()
    child = os.fork()
    if child == 0:
        _become_nsjail(binary, launcher_pid, fd, launcher_alive_r, launcher_alive_w)
    for ours in (
        binary,
        fd,
        launcher_alive_r,
        launcher_alive_w,
    ):  # the socket's last end is the guest's, the pipe's is nsjail's
        os.close(ours)
    launcher.drop_privileges()
    return launcher.wait_or_kill(parent, child)


def prepare_host_side(spec: JailSpec) -> str:
    """Bring this process where nsjail can start: the root laid out, and a private folder for its work. Returns the id
    map for it to write."""
    privileged = launcher.prepare_root(spec)
    with layer_errors("work folder", f"nsjail works in {NSJAIL_WORK_DIR}; make that folder"):
        kernel.mount("nsjail", NSJAIL_WORK_DIR, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
        work = (
            f"{NSJAIL_WORK_DIR}/user/{os.getuid()}/nsjail"  # where it looks first, and already as the jail's first uid
        )
        os.makedirs(work)
        os.chmod(work, 0o777)
        os.mkdir(ROOT)
        root_fs.move_to(ROOT)
        # Some versions remount it for a moment with no flag but this one, which would be to unlock any other.
        kernel.mount("none", ROOT, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)
    with layer_errors("id map", userns.ID_MAP_REMEDY):
        return userns.inner_map(spec.uid_base, spec.uid_count, userns.open_proc_self(), privileged=privileged)


def _become_nsjail(binary: int, launcher_pid: int, fd: int, launcher_alive_r: int, launcher_alive_w: int) -> NoReturn:
    """Exec nsjail, by descriptor: its path may lie below what we have mounted."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    launcher.close_fds_except(binary, fd, launcher_alive_r, launcher_alive_w)
    for ours in (binary, fd, launcher_alive_r, launcher_alive_w):  # a script's interpreter opens the first anew
        os.set_inheritable(ours, True)
    kernel.set_parent_death_signal()
    if os.getppid() == launcher_pid:
        try:
            os.execve(binary, ["nsjail", "--config", CONFIG], {})
        except OSError as why:
            print(f"jail: cannot start nsjail: {why.strerror}", file=sys.stderr, flush=True)
    os._exit(launcher.EXIT_CANNOT_START)


def _log_excerpt() -> str:
    try:
        with open(LOG, encoding="utf-8", errors="replace") as file:
            return "; ".join(file.read(LOG_BYTES).splitlines()) or "it does not say why"
    except OSError:
        return "it does not say why"


if __name__ == "__main__":
    main()
