"""Runs inside a machine, as root: starts docker/rstar-sandbox.service by systemd, and tries it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.client import ServiceError
from sandbox.types import Status
from tests.machines import load

SERVICE = "rstar-sandbox.service"
UNIT = Path(__file__).parents[2] / "docker" / SERVICE
HOME = Path("/var/lib/rstar-sandbox")
SETTINGS = Path("/etc/rstar-sandbox")
MEMORY_BOMB = {"code": "held = bytearray(b'x') * (900 << 20)\nprint(len(held))", "limits": {"memory_mb": 64}}
CHILDREN_BOMB = {
    "code": "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        held = bytearray(b'x') * (40 << 20)\n"
    "        time.sleep(1000)\ntime.sleep(1000)",
    "limits": {"memory_mb": 64, "timeout_s": 300},
}
"""Each process is within the limit and all together are not, so the kernel kills the call in its cgroup."""


def try_unit() -> dict[str, Any]:
    """Return the number of steps that held, and those that did not."""
    _install()
    steps = {name: _tried(step) for name, step in STEPS.items()}
    failures = [f"{name}: {problem}" for name, problem in steps.items() if problem]
    return {"passed": len(steps) - len(failures), "failures": failures, "exposure": _exposure()}


def _install() -> None:
    subprocess.run(["useradd", "--system", "--create-home", f"--home-dir={HOME}", "rstar-sandbox"], check=True)
    (HOME / "runtime").symlink_to("/opt/runtime")
    SETTINGS.mkdir()
    (SETTINGS / "token").write_text(load.TOKEN)
    (SETTINGS / "serve.toml").write_text('profiles = ["bare"]\n')
    shutil.copy(UNIT, "/etc/systemd/system")
    _systemctl("daemon-reload")


def _start() -> str:
    _systemctl("start", SERVICE)
    return load.answer()


def _exceed_memory() -> str:
    """The kernel's OOM killer ends the call, and systemd lets the server run on."""
    pid = _main_pid()
    with load.client() as client:
        results = client.run_batch([MEMORY_BOMB, CHILDREN_BOMB, {"code": "print(1)"}])
    statuses = [result.status for result in results]
    if statuses[1:] != [Status.MEMORY_LIMIT, Status.OK] or statuses[0] not in (Status.MEMORY_LIMIT, Status.ERROR):
        return f"statuses: {', '.join(statuses)}"
    if "oom_kill 0" in Path("/sys/fs/cgroup/system.slice", SERVICE, "memory.events").read_text():
        return "the OOM killer ended no process below the unit: calls have no cgroups"
    return "" if _main_pid() == pid else "the server was restarted"


def _kill() -> str:
    pid = _main_pid()
    os.kill(pid, signal.SIGKILL)
    load.wait(lambda: _main_pid() not in (0, pid))
    return load.answer()


def _stop_under_load() -> str:
    if problem := load.stop(lambda: _systemctl("stop", SERVICE)):
        return problem
    state = _systemctl("show", "--property=Result", "--value", SERVICE)
    if state != "success":
        return f"systemd's result is {state}"
    return "its cgroup is left behind" if Path("/sys/fs/cgroup/system.slice", SERVICE).exists() else ""


STEPS: dict[str, Callable[[], str]] = {
    "start, 20 calls": _start,
    "OOM kill of a call": _exceed_memory,
    "restart after SIGKILL": _kill,
    "stop under load": _stop_under_load,
}
"""Steps, which return an empty text or the reason why they do not hold."""


def _tried(step: Callable[[], str]) -> str:
    try:
        return step()
    except (OSError, ServiceError, TimeoutError, subprocess.SubprocessError) as error:
        journal = subprocess.run(["journalctl", "-u", SERVICE, "-n", "8", "-o", "cat"], capture_output=True, text=True)
        return f"{type(error).__name__}: {error}; {journal.stdout}"


def _main_pid() -> int:
    return int(_systemctl("show", "--property=MainPID", "--value", SERVICE))


def _systemctl(*arguments: str) -> str:
    run = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _exposure() -> str:
    """The score of `systemd-analyze security`: from 0, the best, to 10."""
    run = subprocess.run(["systemd-analyze", "security", SERVICE], capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level.*: ([\d.]+)", run.stdout)
    return found[1] if found else "unknown"
