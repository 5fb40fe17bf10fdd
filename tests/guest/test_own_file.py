"""Tests of the file that contains the code of a call. The code can read the file, and processes that the code starts
can run it again."""

from __future__ import annotations

import json

import pytest

from tests.executor.calling import Caller
from tests.guest.test_script import stdout_of

READERS = {
    "open": "print(open(__file__).read(), end='')",
    "pathlib": "import pathlib; print(pathlib.Path(__file__).read_text(), end='')",
    "the name in sys.argv": "import sys; print(open(sys.argv[0]).read(), end='')",
    "a copy": "import shutil; shutil.copy(__file__, 'copy.py'); print(open('copy.py').read(), end='')",
    "its name": "print(open('main.py').read(), end='')",
}


@pytest.mark.parametrize("way", READERS)
def test_the_code_can_read_its_own_file(guest: Caller, way: str) -> None:
    assert stdout_of(guest.run(f"# π\n{READERS[way]}\n")) == f"# π\n{READERS[way]}\n"


PROCESSES = {
    "Pool": "with multiprocessing.get_context('spawn').Pool(2) as pool: print(pool.map(square, range(4)))",
    "ProcessPoolExecutor": """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool: print(list(pool.map(square, range(4))))
""",
    "Process": """
    multiprocessing.set_start_method("spawn")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=send_squares, args=(sender,)); process.start()
    print(receiver.recv()); process.join(); assert process.exitcode == 0
""",
}


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_spawned_process_runs_the_code_again(guest: Caller, kind: str) -> None:
    code = f"""
import concurrent.futures, multiprocessing
def square(n): return n * n
def send_squares(sender): sender.send([square(n) for n in range(4)])
if __name__ == "__main__":
    {PROCESSES[kind].strip()}
"""
    assert stdout_of(guest.run(code)) == "[0, 1, 4, 9]\n"


def test_the_code_runs_itself_as_a_program(guest: Caller) -> None:
    code = """
import subprocess, sys
if sys.argv[1:]: print(sys.argv[1:])
else: print(subprocess.run([sys.executable, __file__, "again"], capture_output=True, text=True).stdout, end="")
"""
    assert stdout_of(guest.run(code)) == "['again']\n"


def test_a_file_of_the_call_with_the_same_name_is_kept(guest: Caller) -> None:
    code = "print(open('main.py').read())"
    assert stdout_of(guest.run(code, files={"main.py": b"text"})) == "text\n"


@pytest.mark.parametrize(
    ("change", "returned"), [("", ["a.txt"]), ("open('main.py', 'a').write('#')", ["a.txt", "main.py"])]
)
def test_patterns_return_the_code_only_if_it_was_changed(guest: Caller, change: str, returned: list[str]) -> None:
    result = guest.run(f"open('a.txt', 'w').close(); print(__file__)\n{change}", return_files=["*"])
    assert sorted(result.files) == returned


def test_code_that_does_not_name_its_file_finds_an_empty_directory(guest: Caller) -> None:
    assert stdout_of(guest.run("import os; print(os.listdir())")) == "[]\n"


def test_the_cells_of_a_notebook_have_no_file(guest: Caller) -> None:
    cell = "import multiprocessing, os\nprint(os.listdir())"
    output = stdout_of(guest.run(f"__import__('rstar_notebook').run({cell!r})"))
    assert json.loads(output)["stdout"] == "[]\n"


def test_code_for_which_the_scratch_directory_has_no_room_runs_without_its_file(guest: Caller) -> None:
    code = f"import os\nprint(__file__, os.listdir())\n# {'x' * (2 << 20)}"
    assert stdout_of(guest.run(code, disk_mb=1)) == "main.py []\n"
