"""Tests of limits of processes and of namespaces where all calls share one uid, as in the container image.

One call cannot use up the processes of another call, although the kernel counts processes per uid.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import choose_level, kernel
from sandbox.types import Status
from tests.executor.calling import Caller, call, executor, executor_after
from tests.jail.jails import dir_for_all_users, host_uid, python_for_all_users, system_python

USER = 10_001
"""Uid of the ordinary user, as in the image."""
FORK = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]"
FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
COUNT_FORKS = """
import os, time
started = 0
try:
    while started < 100:
        if os.fork() == 0: time.sleep(1000)
        started += 1
except OSError as error: print(started, type(error).__name__)
"""


@pytest.fixture(scope="module")
def ordinary_user() -> Iterator[dict[str, Any]]:
    """Arguments of `executor` for a start as in the image: an ordinary user with no_new_privs."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    try:
        choose_level("namespaces")
    except IsolationError as error:
        pytest.skip(str(error))
    with dir_for_all_users() as directory:
        python = python_for_all_users(directory)
        options = {"user": USER, "group": USER, "extra_groups": [], "cwd": "/", "preexec_fn": kernel.set_no_new_privs}
        yield {"python": str(Path(python).resolve()), "server": (python,), "process_options": options}


@pytest.fixture
def caller(ordinary_user: dict[str, Any]) -> Iterator[Caller]:
    with executor(isolation="namespaces", slots=8, long_slots=520, demote_after_ms=20.0, **ordinary_user) as caller:
        yield caller


FEW_IPC_NAMESPACES = """
import os
from sandbox.jail import kernel
uid, gid = os.geteuid(), os.getegid()
maps = {"setgroups": "deny", "gid_map": f"{gid} {gid} 1", "uid_map": f"{uid} {uid} 1"}
kernel.unshare(kernel.CLONE_NEWUSER)
for path, text in {**maps, "/proc/sys/user/max_ipc_namespaces": "4"}.items():
    with open(os.path.join("/proc/self", path), "w") as file: file.write(text)
kernel.drop_capabilities()
"""
"""Code for `executor_after`. The executor's jails and calls together get at most four IPC namespaces at a time."""


def test_calls_at_once_need_no_ipc_namespaces_of_their_own(
    ordinary_user: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Before Linux 6.3 the kernel frees one IPC namespace in each RCU grace period, too slowly for a loop of calls.

    If a zygote cannot start a call, the executor starts the call again. So the statuses alone show nothing.
    """
    server = executor_after(FEW_IPC_NAMESPACES, python=ordinary_user["server"])
    with executor(isolation="namespaces", slots=12, **{**ordinary_user, "server": server}) as caller:
        results = caller.run_all([call("import time; time.sleep(1)", timeout_s=60) for _ in range(12)])
    assert [result.status for result in results] == [Status.OK] * 12
    assert "could not be started" not in capfd.readouterr().err


def test_sleepers_and_fork_bombs_change_no_other_result(caller: Caller) -> None:
    """500 sleeping processes are many times the process limit of one call."""
    sleepers = [caller.submit(call("import time; time.sleep(1000)", timeout_s=1000)) for _ in range(500)]
    caller.until(lambda: caller.stats.get("running_long") == 500)
    bombs = [caller.submit(call(FORK_BOMB, timeout_s=3)) for _ in range(2)]
    short = [caller.submit(call("import time; time.sleep(1); 7", timeout_s=60)) for _ in range(10)]
    for result in caller.run_all([call(FORK, timeout_s=60) for _ in range(40)]):
        assert (result.status, result.value, result.attempts) == (Status.OK, "0", 1), result
    assert [caller.result_of(seq).status for seq in bombs] == [Status.TIMEOUT] * 2
    assert [caller.result_of(seq).value for seq in short] == ["7"] * 10
    caller.send("cancel", sleepers)
    caller.until(lambda: caller.stats.get("running") == 0)
    assert caller.stats["retried_total"] == 0


def test_each_call_has_its_own_process_limit(caller: Caller) -> None:
    for result in caller.run_all([call(COUNT_FORKS, processes=6, timeout_s=60) for _ in range(8)]):
        assert result.stdout == "5 BlockingIOError\n", "six processes with the first"


NO_PROCESS_LIMITS = """
from sandbox import jail
jail.probe_process_limits = lambda: jail.ProbedLayer("process limits", False, "not here", "")
"""
"""Code for `executor_after`. The kernel cannot limit the processes of each call."""


def test_without_process_limits_per_call_the_processes_of_others_do_not_count(
    ordinary_user: dict[str, Any],
) -> None:
    server = executor_after(NO_PROCESS_LIMITS, python=ordinary_user["server"])
    with executor(**{**ordinary_user, "server": server}, isolation="namespaces", demote_after_ms=20.0) as caller:
        code = "import os, time\nfor _ in range(30):\n    if os.fork() == 0: break\ntime.sleep(1000)"
        seq = caller.submit(call(code, processes=6, timeout_s=1000))
        caller.until(lambda: len(caller.processes()) > 30)
        assert caller.run(FORK, processes=6, timeout_s=60).value == "0"
        caller.send("cancel", [seq])


def test_a_call_has_no_privileges_in_its_user_namespace(caller: Caller) -> None:
    code = """
import os
def error_of(function, argument):
    try: function(argument)
    except OSError as error: return type(error).__name__
[os.getuid(), *(error_of(os.setuid, uid) for uid in (0, 1000)), error_of(os.setgroups, [])]
"""
    assert caller.run(code).value == "[65534, 'OSError', 'OSError', 'PermissionError']"  # the ids are not mapped


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give up a capability")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_each_slot_has_its_own_uid_if_the_server_may_only_write_id_maps() -> None:
    try:
        choose_level("namespaces")
    except IsolationError as error:
        pytest.skip(str(error))
    guest_python = system_python() or pytest.skip(
        "calls with their own uids need a Python in a directory that everyone may enter"
    )
    check_uids(guest_python, ("setpriv", "--bounding-set", "-sys_admin"))


@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs newuidmap (Debian: uidmap)")
def test_each_slot_has_its_own_subordinate_uid(ordinary_user: dict[str, Any]) -> None:
    if not all(f"{USER}:" in Path(f"/etc/{name}").read_text() for name in ("passwd", "subuid", "subgid")):
        pytest.skip(f"needs a user {USER} with ids in /etc/subuid and /etc/subgid")
    options = {**ordinary_user["process_options"], "preexec_fn": None}
    check_uids(ordinary_user["python"], (), ordinary_user["server"][0], options)


def check_uids(
    guest_python: str, prefix: tuple[str, ...], python: str = "", options: dict[str, Any] | None = None
) -> None:
    """Assert that three calls which run at once have three uids, and that the host uses none of these.

    `prefix` comes before the command that starts the executor in `python`, by default the Python of this test.
    """
    server = (*prefix, python or sys.executable)
    with executor(guest_python, isolation="namespaces", server=server, process_options=options or {}) as caller:
        pids_before = {*caller.processes()}
        seqs = [caller.submit(call("import time; time.sleep(1000)", timeout_s=1000)) for _ in range(3)]
        caller.until(lambda: caller.stats.get("running") == 3 and len({*caller.processes()} - pids_before) == 3)
        uids = [host_uid(pid) for pid in {*caller.processes()} - pids_before]
        assert len({*uids}) == 3
        assert min(uids) >= 10_000
        caller.send("cancel", seqs)
