"""Runs inside a machine that `tests.machines` has booted: tries the server there, and prints its row.

The kernel command line has the set-up, the parts to run, and the number of calls. The row is printed after each part.
So a machine that does not come to its end has the row of its finished parts.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.machines.unit import STEPS, try_unit

USER = "tester"
ROW = "row: "
"""Start of a line with the row, as JSON."""
SERVICE = ["-pDelegate=yes", "-pOOMPolicy=continue", "-pTasksMax=infinity", "-pWorkingDirectory=/src"]
"""The properties of docker/rstar-sandbox.service that concern cgroups."""
ENVIRON = {"RSTAR_RUNTIME": "/opt/runtime"}
SYSTEMD_RUN = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect", *SERVICE)
SET_UPS: Mapping[str, Sequence[str]] = {
    "root": SYSTEMD_RUN,
    "user": (*SYSTEMD_RUN, "--user", f"--machine={USER}@"),
    "root-without-cgroups": SYSTEMD_RUN,
    "user-without-cgroups": ("runuser", "-u", USER, "--"),
}
"""By name: the command that starts a program in this set-up. An ordinary user has cgroups in a unit of the user's own
systemd."""
KERNEL_OPTIONS = {"root-without-cgroups": "cgroup_disable=memory"}
IPC_NAMESPACES = 64
"""Maximum number of IPC namespaces of a user at one time. Before Linux 6.3 the kernel frees them slowly, so calls must
not make any. With the usual limit of some thousands, only many calls would show that they do."""
PART_TIMEOUT_S = 3600
MAX_TEXT_CHARS = 500
PATIENT_BENCH = """
import sys
from importlib import import_module
from bench.servers import server_under_test, service
bench = import_module(f"bench.{sys.argv[1]}")
bench.MAX_S = server_under_test.READY_TIMEOUT_S = service.START_TIMEOUT_S = 1800
bench.TIMEOUT_S = 300
raise SystemExit(bench.main(sys.argv[2:]))
"""
"""Runs a benchmark that gives the server and its calls more time, since the cores of a machine may be emulated."""
MAX_AGREEMENT_CALLS = 200
"""Each call also runs in an interpreter of its own, and most of them import SymPy."""
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Try the server in this process, or start this program again in the set-up of the kernel command line."""
    if argv:
        try_server(argv[0], argv[1].split(","), int(argv[2]))
        return 0
    words = [word.partition("=") for word in Path("/proc/cmdline").read_text().split()]
    options = {name: value for name, _, value in words}
    set_up = options["set_up"]
    if set_up == "user":
        uid = pwd.getpwnam(USER).pw_uid
        _run("loginctl", "enable-linger", USER)
        _run("systemctl", "start", f"user@{uid}.service")
        _run("systemctl", "set-property", f"user-{uid}.slice", "TasksMax=infinity")
    Path("/proc/sys/user/max_ipc_namespaces").write_text(str(IPC_NAMESPACES))
    environ = [f"{name}={value}" for name, value in ENVIRON.items()]
    command = [sys.executable, "-m", "tests.machines.guest", set_up, options["parts"], options["calls"]]
    return subprocess.run([*SET_UPS[set_up], "env", *environ, *command], check=False).returncode


def try_server(set_up: str, parts: Sequence[str], calls: int) -> None:
    row: Row = {"kernel": os.uname().release, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    for name in parts:
        start = time.monotonic()
        try:
            row[name] = PARTS[name](row, calls)
        except (OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
            row[name] = {"problem": f"{error}"[-MAX_TEXT_CHARS:]}
        row[name]["seconds"] = round(time.monotonic() - start)
        print(ROW + json.dumps(row), flush=True)


def doctor(_row: Row, _calls: int) -> Row:
    report = json.loads(_python("-m", "sandbox", "doctor", "--json").splitlines()[-1])
    checks = {check["name"]: check for check in report["checks"]}
    return {
        "level": report["level"],
        "call": report["call"],
        "cgroups": checks["cgroups"]["found"],
        "uids": checks["uids"]["found"],
        "missing": [name for name, check in checks.items() if not check["ok"]],
    }


def mix(_row: Row, calls: int) -> Row:
    return _checked_calls(calls, kill_every_s=1e6)


def kills(row: Row, calls: int) -> Row:
    """Kill processes, with time between two kills for the server to replace what was killed."""
    result = _checked_calls(calls, kill_every_s=max(1, row["doctor"]["seconds"] / 3))
    if not result["kills"]:
        raise ValueError("the calls ended before a process was killed; use more --calls")
    return result


def _checked_calls(calls: int, kill_every_s: float) -> Row:
    options = ["--calls", str(calls), "--kill-every", str(kill_every_s), "--executors", "1", "--in-flight", "64"]
    result = _bench("chaos", "--stdlib-only", *options)
    counts = {name: result[name] for name in ("calls", "lost", "doubled", "mismatched", "unavailable", "leftovers")}
    return {**counts, "kills": sum(result["kills"].values())}


def invariance(_row: Row, _calls: int) -> Row:
    result = _bench("invariance", "--stdlib-only", "--loops", "2")
    return {name: result[name] for name in ("calls", "changed", "misjudged", "unstable")}


def agreement(_row: Row, calls: int) -> Row:
    result = _bench("agreement", "--n", str(min(calls, MAX_AGREEMENT_CALLS)))
    return {name: result[name] for name in ("calls", "differences", "unstable")}


def escape(row: Row, _calls: int) -> Row:
    return _tests("tests/escape", "--isolation", row["doctor"]["level"])


def cgroups(_row: Row, _calls: int) -> Row:
    return _tests("tests/executor/test_cgroups.py", "tests/jail/test_cgroup_tree.py")


def jail(_row: Row, _calls: int) -> Row:
    return _tests("tests/jail", "tests/guest/test_fork_batch.py", "tests/guest/test_confine.py")


def unit(_row: Row, _calls: int) -> Row:
    return try_unit() if os.geteuid() == 0 else {"skipped": len(STEPS), "failures": []}


PARTS: Mapping[str, Callable[[Row, int], Row]] = {
    "doctor": doctor,
    "mix": mix,
    "kills": kills,
    "cgroups": cgroups,
    "jail": jail,
    "unit": unit,
    "escape": escape,
    "invariance": invariance,
    "agreement": agreement,
}


def _bench(name: str, *arguments: str) -> Row:
    """Return the result of a benchmark."""
    output = _python("-c", PATIENT_BENCH, name, *arguments, "--json")
    return dict(json.loads(output.splitlines()[-1]))


def _tests(*arguments: str) -> Row:
    """Return the numbers of tests by outcome, and the names of those that failed."""
    output = _python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", output, re.MULTILINE)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z]+)", output.splitlines()[-1])}
    return {**counts, "failures": [line[:MAX_TEXT_CHARS] for line in failed]}


def _python(*arguments: str) -> str:
    return _run(sys.executable, *arguments)


def _run(*command: str) -> str:
    """Return the output of a program. Raises `ValueError` if it printed none on stdout and ended with an error."""
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PART_TIMEOUT_S)
    print(run.stdout[-10 * MAX_TEXT_CHARS :], run.stderr[-10 * MAX_TEXT_CHARS :], flush=True)
    if run.returncode and not run.stdout:
        raise ValueError(f"{command[0]} ended with {run.returncode}: {run.stderr}")
    return run.stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
