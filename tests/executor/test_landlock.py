"""Level `landlock` from end to end, as root with uids for its calls and as an ordinary user: each call finds its own
folder and nothing else, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import choose
from sandbox.types import Status
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, Caller, call, executor, wait_gone
from tests.jail import jails

SECRET = "of-the-server-3f1c"


@dataclass(frozen=True)
class Served:
    """A running executor, whose jail's folder is in `temporary`."""

    caller: Caller
    temporary: Path
    has_uids: bool

    def said(self, code: str, **more: Any) -> str:
        """What a call prints that ends well."""
        result = self.caller.run(code, **more)
        assert result.status is Status.OK, result
        return result.stdout

    @property
    def places(self) -> Path:
        (jail,) = self.temporary.iterdir()
        return jail / "calls"


@contextmanager
def serving(who: str, folder: Path, **settings: Any) -> Iterator[Served]:
    try:
        choose("landlock")
    except IsolationError as why:
        pytest.skip(str(why))
    temporary = Path(tempfile.mkdtemp(prefix="landlock-", dir="/tmp"))
    server, guest, options = sys.executable, OWN_PYTHON, {}
    if who == "root":
        if os.geteuid() != 0:
            pytest.skip("root: this is an ordinary user")
        if not jails.is_passable(guest):
            guest = jails.system_python() or pytest.skip("root: needs a Python that other users can reach")
        temporary.chmod(0o755)
    elif os.geteuid() == 0:
        server = jails.python_for_all(folder)
        guest = os.path.realpath(server)
        options = {"user": jails.NOBODY, "group": jails.NOBODY, "extra_groups": []}
        os.chown(temporary, jails.NOBODY, jails.NOBODY)
    options |= {"env": {**os.environ, "TMPDIR": str(temporary), "SECRET": SECRET}}
    with executor(guest, server=[server], process_options=options, isolation="landlock", **settings) as caller:
        yield Served(caller, temporary, who == "root")
        processes = caller.processes()
    wait_gone(processes)  # init is the last, and has removed the folder
    temporary.rmdir()


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp("server")) as served:
        yield served


def test_call_works_in_a_folder_of_its_own(served: Served) -> None:
    code = """
import os, sys, tempfile
open("a", "w").write("x" * 100_000)
os.makedirs("b/c"); os.rename("a", "b/c/a"); os.symlink("b", "d"); os.mkfifo("e")
here = os.getcwd()
assert sys.path[0] == os.environ["HOME"] == tempfile.gettempdir() == here
print(os.path.getsize("d/c/a"), sorted(os.listdir()), tempfile.TemporaryFile().write(b"xy"))
"""
    assert served.said(code) == "100000 ['b', 'd', 'e'] 2\n"


def test_files_come_and_go(served: Served) -> None:
    code = "open('out', 'w').write(open('a/in').read() * 2)"
    result = served.caller.run(code, files={"a/in": b"xy"}, return_files=["out"])
    assert (result.status, result.files) == (Status.OK, {"out": b"xyxy"})


def test_nothing_of_a_call_is_left_to_the_next(served: Served) -> None:
    code = "import os; print(os.listdir()); open('mark', 'w'); os.mkdir('f'); open('f/g', 'w')"
    for _ in range(8):
        assert served.said(code) == "[]\n"


HIDDEN = {
    "host file": "open('/etc/passwd')",
    "host folder": "os.listdir('/etc')",
    "root": "os.listdir('/')",
    "processes": "os.listdir('/proc')",
    "own environment": "open('/proc/self/environ')",
    "environment of the server": f"open('/proc/{os.getpid()}/environ')",
    "temporary folder": "os.listdir(TEMPORARY)",
    "folders of others": "os.listdir(PLACES)",
    "sources of the server": f"open({__file__!r})",
    "writing into it": f"open({__file__!r}, 'a')",
    "writing to the temporary folder": "open(TEMPORARY + '/x', 'w')",
    "writing among the folders": "open(PLACES + '/x', 'w')",
    "a folder among the folders": "os.mkdir(PLACES + '/x')",
    "writing to Python's library": "open(os.__file__, 'a')",
    "emptying Python's library": "os.truncate(os.__file__, 0)",
    "emptying it by opening": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "removing from Python's library": "os.unlink(os.__file__)",
    "linking a host file": "os.link(os.__file__, 'x')",
    "moving the folder away": "os.rename(os.getcwd(), PLACES + '/x')",
    "making a device": "os.mknod('x', 0o20666, os.makedev(1, 8))",
    "running a host program": "os.execv('/bin/sh', ['sh'])",
    "notes on files": "os.setxattr('.', 'user.x', b'1')",
    "priorities": "os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "other users": "os.setuid(0)",
    "network": "__import__('socket').socket()",
}


@pytest.mark.parametrize("what", HIDDEN)
def test_refused(served: Served, what: str) -> None:
    names = f"import os\nTEMPORARY, PLACES = {str(served.temporary)!r}, {str(served.places)!r}\n"
    code = f"{names}try: {HIDDEN[what]}\nexcept PermissionError: print('refused')"
    assert served.said(code) == "refused\n"
    assert os.access(os.__file__, os.R_OK)


def test_environment_is_the_guests(served: Served) -> None:
    assert SECRET not in served.said("import os; print(dict(os.environ))")


def started(served: Served, code: str) -> tuple[int, Path]:
    """A call that runs `code`, makes the file `ready`, and sleeps: its number, and its folder."""
    seq = served.caller.submit(call(f"{code}\nopen('ready', 'w').close()\nimport time\ntime.sleep(1000)"))
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:  # it has no other way to tell us
        if found := [*served.places.glob("*/tmp/ready")]:
            return seq, found[0].parent
        time.sleep(0.01)
    pytest.fail("the call did not start")


def cancel(served: Served, seq: int, folder: Path) -> None:
    served.caller.send("cancel", [seq])
    deadline = time.monotonic() + DEADLINE_S
    while folder.exists():
        assert time.monotonic() < deadline, "the folder is still there"
        time.sleep(0.01)


def test_folder_of_a_running_call_is_out_of_reach(served: Served) -> None:
    seq, folder = started(served, "open('secret', 'w').write('mine')")
    for attempt in (
        "open(OTHER + '/secret')",
        "open(OTHER + '/x', 'w')",
        "os.listdir(OTHER)",
        "os.unlink(OTHER + '/ready')",
    ):
        code = f"import os\nOTHER = {str(folder)!r}\ntry: {attempt}\nexcept PermissionError: print('refused')"
        assert served.said(code) == "refused\n", attempt
    assert (folder / "secret").read_text() == "mine"
    cancel(served, seq, folder)


def test_ends_as_it_says(served: Served) -> None:
    ends = ["os.abort()", "os.kill(os.getpid(), 9)", "signal.raise_signal(15)", "os._exit(3)"]
    results = [served.caller.run(f"import os, signal; {end}") for end in ends]
    assert [(result.exit_code, result.signal) for result in results] == [(None, 6), (None, 9), (None, 15), (3, None)]
