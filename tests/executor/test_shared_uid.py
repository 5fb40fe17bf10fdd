"""Processes where the server may not have uids as it pleases, as in the image: nobody's use them up for others."""

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
from tests.executor.calling import Caller, call, executor
from tests.jail.jails import dir_for_all_users, host_uid, python_for_all_users, system_python

USER = 10_001
FORK = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]"
STORM = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
COUNT = """
import os, time
started = 0
try:
    while started < 100:
        if os.fork() == 0: time.sleep(1000)
        started += 1
except OSError as why: print(started, type(why).__name__)
"""


@pytest.fixture(scope="module")
def ordinary() -> Iterator[dict[str, Any]]:
    """How an executor starts as in the image: as a user without privileges who can get none."""
    if os.geteuid() != 0:
        pytest.skip("to become another user takes root")
    try:
        choose_level("namespaces")
    except IsolationError as why:
        pytest.skip(str(why))
    with dir_for_all_users() as folder:
        python = python_for_all_users(folder)
        user = {"user": USER, "group": USER, "extra_groups": [], "cwd": "/", "preexec_fn": kernel.set_no_new_privs}
        yield {"python": str(Path(python).resolve()), "server": (python,), "process_options": user}


@pytest.fixture
def caller(ordinary: dict[str, Any]) -> Iterator[Caller]:
    with executor(isolation="namespaces", slots=8, long_slots=520, demote_after_ms=20.0, **ordinary) as caller:
        yield caller


def test_sleepers_and_a_fork_storm_change_no_other_verdict(caller: Caller) -> None:
    """500 sleepers are many times the processes that one call may have."""
    sleepers = [caller.submit(call("import time; time.sleep(1000)", timeout_s=1000)) for _ in range(500)]
    caller.until(lambda: caller.stats.get("running_long") == 500)
    storms = [caller.submit(call(STORM, timeout_s=3)) for _ in range(2)]
    more = [caller.submit(call("import time; time.sleep(1); 7", timeout_s=60)) for _ in range(10)]
    for result in caller.run_all([call(FORK, timeout_s=60) for _ in range(40)]):
        assert (result.status, result.value, result.attempts) == (Status.OK, "0", 1), result
    assert [caller.answer(seq).status for seq in storms] == [Status.TIMEOUT] * 2
    assert [caller.answer(seq).value for seq in more] == ["7"] * 10
    caller.send("cancel", sleepers)
    caller.until(lambda: caller.stats.get("running") == 0)
    assert caller.stats["retried_total"] == 0


def test_each_call_has_its_own_limit_of_processes(caller: Caller) -> None:
    for result in caller.run_all([call(COUNT, processes=6, timeout_s=60) for _ in range(8)]):
        assert result.stdout == "5 BlockingIOError\n"


UNCOUNTED = """
import runpy, sys
from sandbox import jail
jail.probe_process_limits = lambda: jail.ProbedLayer("process limits", False, "not here", "")
del sys.argv[:2]
runpy.run_module("sandbox.executor", run_name="__main__", alter_sys=True)
"""


def test_where_processes_cannot_be_counted_apart_no_call_is_bounded_by_what_others_have(
    ordinary: dict[str, Any],
) -> None:
    server = (*ordinary["server"], "-c", UNCOUNTED)
    with executor(**{**ordinary, "server": server}, isolation="namespaces", demote_after_ms=20.0) as caller:
        many = "import os, time\nfor _ in range(30):\n    if os.fork() == 0: break\ntime.sleep(1000)"
        seq = caller.submit(call(many, processes=6, timeout_s=1000))
        caller.until(lambda: len(caller.processes()) > 30)
        assert caller.run(FORK, processes=6, timeout_s=60).value == "0"
        caller.send("cancel", [seq])


def test_a_call_has_no_privilege_in_its_namespace(caller: Caller) -> None:
    code = "import os\ndef tried(f, *a):\n    try: return f(*a)\n    except OSError as why: return type(why).__name__\n"
    code += "[os.getuid(), *(tried(os.setuid, uid) for uid in (0, 1000)), tried(os.setgroups, [])]"
    assert caller.run(code).value == "[65534, 'PermissionError', 'PermissionError', 'PermissionError']"


@pytest.mark.skipif(os.geteuid() != 0, reason="to give up a capability takes root")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_who_may_write_id_maps_and_no_more_gives_each_slot_a_uid() -> None:
    try:
        choose_level("namespaces")
    except IsolationError as why:
        pytest.skip(str(why))
    guest = system_python() or pytest.skip("calls with uids of their own need a Python that others can reach")
    check_uids(guest, ("setpriv", "--bounding-set", "-sys_admin"))


@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs newuidmap (Debian: uidmap)")
def test_subordinate_ids_give_each_slot_a_uid(ordinary: dict[str, Any]) -> None:
    if not all(f"{USER}:" in Path(f"/etc/{name}").read_text() for name in ("passwd", "subuid", "subgid")):
        pytest.skip(f"needs a user {USER}, with ids in /etc/subuid and /etc/subgid")
    options = {**ordinary["process_options"], "preexec_fn": None}
    check_uids(ordinary["python"], (), ordinary["server"][0], options)


def check_uids(guest: str, prefix: tuple[str, ...], python: str = "", options: dict[str, Any] | None = None) -> None:
    server = (*prefix, python or sys.executable)
    with executor(guest, isolation="namespaces", server=server, process_options=options or {}) as caller:
        before = {*caller.processes()}
        seqs = [caller.submit(call("import time; time.sleep(1000)", timeout_s=1000)) for _ in range(3)]
        caller.until(lambda: caller.stats.get("running") == 3 and len({*caller.processes()} - before) == 3)
        uids = [host_uid(pid) for pid in {*caller.processes()} - before]
        assert len({*uids}) == 3
        assert min(uids) >= 10_000
        caller.send("cancel", seqs)
