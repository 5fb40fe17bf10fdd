"""Tests of interpreters that a call starts: functions that are replaced in the call's own interpreter are replaced in
them as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.calling import OWN_PYTHON, Caller, executor


@pytest.fixture(scope="module", params=["own", "runtime"])
def each_python(request: pytest.FixtureRequest) -> Iterator[Caller]:
    """Start an executor: first with the Python of the tests, and then with that of the guest runtime. Two versions are
    needed because asyncio uses sendmsg only since Python 3.12."""
    python: str | Path = OWN_PYTHON if request.param == "own" else request.getfixturevalue("guest_python")
    with executor(python) as caller:
        yield caller


CHILDREN = {
    "asyncio streams": (
        """
import asyncio
async def answer(reader, writer):
    writer.writelines([b"h", b"i"]); await writer.drain(); writer.close()
async def main():
    async with await asyncio.start_unix_server(answer, "s"):
        reader, _ = await asyncio.open_unix_connection("s")
        print((await reader.read()).decode())
asyncio.run(main())
""",
        "hi\n",
    ),
    "fork server": (
        """
import multiprocessing
if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=print, args=("hi",))
    process.start(); process.join()
""",
        "hi\n",
    ),
    "locks, which exclude no other process": (
        """
import fcntl
with open("f", "w") as file:
    try: fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error: print(error.errno == __import__("errno").ENOLCK)
""",
        "True\n",
    ),
    "modules of the code with the names of the guest's": (
        "import socket, fcntl, sockets, replacements\nprint(sockets.x, replacements.x)",
        "1 2\n",
    ),
    "a plain path": ("import sys\nprint([path for path in sys.path if 'guest' in path])", "[]\n"),
}
START = """
import subprocess, sys
open("child.py", "w").write(CHILD)
child = subprocess.run([sys.executable, "child.py"], capture_output=True, text=True)
print(child.stdout, end="")
print(child.stderr, end="", file=sys.stderr)
"""
LIST_MODULES = """
import subprocess, sys
argv = [sys.executable, "-c", "import sys; print(*sys.modules)"]
print([subprocess.run(argv, env=env, capture_output=True, text=True).stdout for env in (None, {})])
"""


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_interpreter_runs(name: str, each_python: Caller) -> None:
    child, stdout = CHILDREN[name]
    files = {"sockets.py": b"x = 1", "replacements.py": b"x = 2"}
    result = each_python.run(f"CHILD = {child!r}\n{START}", files=files)
    assert (result.stdout, result.stderr) == (stdout, "")


def test_the_start_of_a_child_interpreter_imports_one_more_module(each_python: Caller) -> None:
    with_ours, without = eval(each_python.run(LIST_MODULES).stdout)
    assert {*with_ours.split()} - {*without.split()} <= {"sitecustomize", "__future__"}
