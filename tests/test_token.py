"""Tests that only the environment of the server process contains the token, and not the environments of executors,
launchers, zygotes and calls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox.client import Client
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.executor.calling import OWN_PYTHON
from tests.jail.jails import all_users_can_reach, system_python, tree_pids

DEADLINE_S = 60
TOKEN = "token-b0b4c5d2a9e14f7f"


@pytest.mark.parametrize("level", ["namespaces", "landlock", "none"])
@pytest.mark.parametrize("source", ["variable", "file"])
def test_token_is_in_no_environment_below_the_server(level: str, source: str, tmp_path: Path) -> None:
    try:
        choose_level(level)
    except IsolationError as error:
        pytest.skip(str(error))
    python: str | None = OWN_PYTHON
    if level == "landlock" and os.geteuid() == 0 and not all_users_can_reach(OWN_PYTHON):
        python = system_python() or pytest.skip("calls with uids of their own need a Python that others can reach")
    flags = f"--port 0 --isolation {level} --python {python} --profiles bare --zygote-pools 1 --slots 2".split()
    environ = dict(os.environ)
    if source == "variable":
        environ["RSTAR_SANDBOX_TOKEN"] = TOKEN
    else:
        (tmp_path / "token").write_text(TOKEN)
        flags += ["--token-file", str(tmp_path / "token")]
    argv = [sys.executable, "-m", "sandbox", "serve", *flags]
    with (
        subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environ) as process,
        ThreadPoolExecutor() as pool,
    ):
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if " on http://" in line)
            with Client(line.split(" on ")[1].split()[0], token=TOKEN) as client:
                assert client.execute("1").status.value == "ok"  # so the template of the zygote exists
                idle_pids = tree_pids(process.pid)
                call = pool.submit(client.execute, "import os, time\nprint(os.environ)\ntime.sleep(2)")
                pids = idle_pids
                give_up_at = time.monotonic() + DEADLINE_S
                while len(pids) == len(idle_pids) and not call.done():  # until the process of the call exists
                    assert time.monotonic() < give_up_at, "the call does not start"
                    pids = tree_pids(process.pid)
                environments = {pid: _environment(pid) for pid in pids}
                assert "PATH" in call.result().stdout and TOKEN not in call.result().stdout
            process.terminate()
            process.stderr.read()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    # The processes are the server, its executor, the launcher, its init (not at level none), the zygote and the call.
    assert len(pids) == (5 if level == "none" else 7)  # with the template and the call
    server_and_executor = pids[:2]
    assert all(environments[pid] for pid in (pids if os.geteuid() == 0 else server_and_executor)), "not all were read"
    pids_with_token = [
        pid for pid, environment in environments.items() if environment and TOKEN.encode() in environment
    ]
    assert pids_with_token == ([process.pid] if source == "variable" else [])


def _environment(pid: int) -> bytes | None:
    """Return the environment of a process, or None if only root may read it. Launcher and init are not dumpable, and
    zygote and call may have other uids."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return None
