"""Level `nsjail`: a program that builds the root and starts nsjail, which builds the rest. See `plan.launch_argv`.

    server ── launcher ── nsjail ── init (PID 1 inside, guest/init.py) ── guest (the zygote) ── calls
              waits       waits     reaps orphans

- nsjail dies with the launcher, init dies with nsjail, and when init ends the kernel kills all processes inside.
- The root is built before nsjail creates the guest's user namespace, so its mounts are locked (`launch_namespaces`).
- No file stays on the host: nsjail's work directories are on a /run that is private to this mount namespace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from sandbox.errors import IsolationError
from sandbox.jail import kernel, launcher, nsjail_binary, nsjail_config, root_fs, userns
from sandbox.jail.spec import JailSpec
from sandbox.jail.userns import isolation_errors

EXIT_NSJAIL_FAILED = 255
"""nsjail's exit status if it could not build the jail. The zygote never exits with it."""
NSJAIL_WORK_DIR = "/run"
"""Directory that a private tmpfs covers. nsjail creates its work directories there by default, and neither nsjail nor a
Python is installed below it."""
ROOT, CONFIG, LOG = f"{NSJAIL_WORK_DIR}/root", f"{NSJAIL_WORK_DIR}/nsjail.cfg", f"{NSJAIL_WORK_DIR}/nsjail.log"
MAX_LOG_BYTES = 4096


def main() -> NoReturn:
    spec, socket_fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    server_pidfd = launcher.leave_server_session()
    try:
        status = _run_nsjail(spec, socket_fd, server_pidfd)
        if status == EXIT_NSJAIL_FAILED:
            raise IsolationError(f"namespaces and id map: nsjail did not make them ({_log_excerpt()})")
    except IsolationError as error:
        launcher.print_error(error)
        status = launcher.EXIT_LAYER_REFUSED
    os._exit(status)


def _run_nsjail(spec: JailSpec, socket_fd: int, server_pidfd: int) -> int:
    """Start nsjail, wait for it and return its exit status, which is the guest's."""
    binary = os.open(nsjail_binary.find(os.environ), os.O_RDONLY)
    nsjail_alive_r, nsjail_alive_w = os.pipe()
    # If the binary is a script, the script's interpreter opens it again, so it is passed too.
    passed_fds = (binary, socket_fd, nsjail_alive_r, nsjail_alive_w)
    id_map = prepare_host_side(spec)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    start = nsjail_config.StartParameters(socket_fd, nsjail_alive_r, ROOT, LOG, id_map, nice)
    with open(CONFIG, "w", encoding="ascii") as file:
        file.write(nsjail_config.config(spec, start))
    launcher_pid = os.getpid()

    def die_with_launcher() -> None:
        kernel.set_parent_death_signal()
        if os.getppid() != launcher_pid:
            os._exit(launcher.EXIT_CANNOT_START)

    try:
        nsjail = subprocess.Popen(
            ["nsjail", "--config", CONFIG],
            executable=f"/proc/self/fd/{binary}",  # a mount may cover the binary's path
            pass_fds=passed_fds,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_launcher,
        )
    except OSError as error:
        launcher.print_error(f"cannot start nsjail: {error.strerror}")
        return launcher.EXIT_CANNOT_START
    for fd in passed_fds:  # only the guest may keep the socket open, and only nsjail the pipe
        os.close(fd)
    launcher.drop_privileges()
    return launcher.wait_or_kill(server_pidfd, nsjail.pid)


def prepare_host_side(spec: JailSpec) -> str:
    """Build the root and a private work directory for nsjail. Returns the id map that nsjail has to write."""
    privileged = launcher.prepare_root(spec)
    with isolation_errors("work directory", f"nsjail needs {NSJAIL_WORK_DIR}; create that directory"):
        kernel.mount("nsjail", NSJAIL_WORK_DIR, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
        work_dir = f"{NSJAIL_WORK_DIR}/user/{os.getuid()}/nsjail"  # the path that nsjail tries first
        os.makedirs(work_dir)
        os.chmod(work_dir, 0o777)  # nsjail writes to it as the first uid of the range
        os.mkdir(ROOT)
        root_fs.move_to(ROOT)
        # Clear all flags but read-only. Some versions of nsjail remount the root, in a user namespace, with this flag
        # alone, and the kernel would refuse to clear any other flag there.
        kernel.mount("none", ROOT, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)
    with isolation_errors("id map", userns.ID_MAP_REMEDY):
        return userns.zygote_id_map(spec.uid_base, spec.uid_count, userns.open_proc_self(), privileged=privileged)


def _log_excerpt() -> str:
    try:
        with open(LOG, encoding="utf-8", errors="replace") as file:
            lines = file.read(MAX_LOG_BYTES).splitlines()
    except OSError:
        lines = []
    return "; ".join(lines) or "its log is empty"


if __name__ == "__main__":
    main()
