"""Tests that a call runs as a script: it has the same module, arguments, streams and exit as `python main.py`."""

from __future__ import annotations

import pytest

from sandbox.types import Result, Status
from tests.executor.calling import Caller


def stdout_of(result: Result) -> str:
    """Return what a call with status `ok` printed."""
    assert result.status is Status.OK, result
    assert result.stderr == ""
    return result.stdout


def test_stdout_and_stderr_are_returned_separately(guest: Caller) -> None:
    result = guest.run("import sys\nprint('one')\nprint('two', file=sys.stderr)\nprint('three')")
    assert (result.status, result.stdout, result.stderr) == (Status.OK, "one\nthree\n", "two\n")
    assert (result.exit_code, result.signal, result.error, result.truncated) == (0, None, None, ())


def test_text_of_every_unicode_plane_is_returned(guest: Caller) -> None:
    assert stdout_of(guest.run("print('π ≈ 3, 東京, 🐍, \\x00')")) == "π ≈ 3, 東京, 🐍, \x00\n"


def test_output_that_is_not_utf8_is_replaced(guest: Caller) -> None:
    assert stdout_of(guest.run("import os\nos.write(1, b'a\\xff\\xfeb')\nNone")) == "a\ufffd\ufffdb"


def test_printing_a_lone_surrogate_raises_an_error_in_the_code(guest: Caller) -> None:
    result = guest.run("print('\\ud800')")
    assert result.status is Status.ERROR
    assert result.error is not None
    assert result.error.type == "UnicodeEncodeError"


def test_the_script_is_the_main_module(guest: Caller) -> None:
    code = "import sys, __main__\nprint(__name__, __file__, sys.argv, __main__.x if 'x' in globals() else None)"
    assert stdout_of(guest.run(f"x = 5\n{code}")) == "__main__ main.py ['main.py'] 5\n"
    assert stdout_of(guest.run("if __name__ == '__main__':\n    print('yes')")) == "yes\n"


def test_a_module_beside_the_script_can_be_imported(guest: Caller) -> None:
    files = {"other.py": b"x = 7", "pack/__init__.py": b"", "pack/deep.py": b"y = 8"}
    assert stdout_of(guest.run("import other\nfrom pack.deep import y\nprint(other.x, y)", files=files)) == "7 8\n"


@pytest.mark.parametrize(
    "code",
    [
        "print(input() + '|' + input())",
        "import sys\nprint('|'.join(sys.stdin.read().split()))",
        "import sys\nprint('|'.join(line.strip() for line in sys.stdin))",
        "print('|'.join(open(0).read().split()))",
        "import os\nprint('|'.join(os.read(0, 100).decode().split()))",
        "import sys\nprint('|'.join(sys.stdin.buffer.read().decode().split()))",
    ],
)
def test_stdin_can_be_read_in_every_way(guest: Caller, code: str) -> None:
    assert stdout_of(guest.run(code, stdin="äh\n2\n")) == "äh|2\n"


def test_without_input_stdin_is_empty(guest: Caller) -> None:
    assert stdout_of(guest.run("import sys\nprint(repr(sys.stdin.read()))")) == "''\n"
    result = guest.run("input()")
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("EOFError", 1)


def test_a_large_stdin_arrives_whole(guest: Caller) -> None:
    assert stdout_of(guest.run("import sys\nprint(len(sys.stdin.read()))", stdin="x" * (4 << 20))) == f"{4 << 20}\n"


def test_stdin_that_is_not_utf8_arrives_unchanged(guest: Caller) -> None:
    stdin = b"a\xff\xc3b".decode("utf-8", "surrogateescape")
    assert stdout_of(guest.run("import sys\nprint(sys.stdin.buffer.read())", stdin=stdin)) == "b'a\\xff\\xc3b'\n"


def test_the_prompt_of_input_is_printed(guest: Caller) -> None:
    assert stdout_of(guest.run("x = input('n? ')\nprint(x)", stdin="4\n")) == "n? 4\n"


def test_empty_code_is_ok(guest: Caller) -> None:
    for code in ("", "\n\n", "# nothing", "   \n\t\n", "\ufeff"):
        result = guest.run(code)
        assert (result.status, result.stdout, result.value) == (Status.OK, "", None), repr(code)


def test_a_megabyte_of_code_runs(guest: Caller) -> None:
    code = "x = 0\n" + "x += 1\n" * 40_000 + f"# {'-' * 800_000}\nprint(x)"
    assert len(code) > 1 << 20
    assert stdout_of(guest.run(code)) == "40000\n"


@pytest.mark.parametrize(
    ("code", "error_types"),
    [
        ("print(1)\0", ("ValueError", "SyntaxError")),
        ("x = '\ud800'", ("UnicodeEncodeError", "SyntaxError")),
        ("x = \udcff", ("UnicodeEncodeError", "SyntaxError")),
    ],
)
def test_code_that_cannot_be_decoded_is_an_error(guest: Caller, code: str, error_types: tuple[str, ...]) -> None:
    result = guest.run(code)
    assert result.status is Status.ERROR
    assert result.error is not None
    assert result.error.type in error_types


def test_line_endings_of_all_systems_are_accepted(guest: Caller) -> None:
    result = guest.run("x = 1\r\ny = 2\rz = 3\n1/0")
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("ZeroDivisionError", 4)


def test_the_declaration_of_an_encoding_is_ignored(guest: Caller) -> None:
    assert stdout_of(guest.run("# -*- coding: latin-1 -*-\nprint('é')")) == "é\n"


def test_threads_run_and_are_joined_at_exit(guest: Caller) -> None:
    code = """
import threading
gate = threading.Event()
def work():
    gate.wait()
    print("worked")
threading.Thread(target=work).start()
threading.Timer(0.01, gate.set).start()
print("end")
"""
    assert stdout_of(guest.run(code)) == "end\nworked\n"


def test_daemon_threads_are_not_joined_at_exit(guest: Caller) -> None:
    code = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nprint('end')"
    assert stdout_of(guest.run(code)) == "end\n"


def test_an_exception_in_a_thread_is_printed_and_does_not_change_the_status(guest: Caller) -> None:
    result = guest.run("import threading\nt = threading.Thread(target=lambda: 1/0)\nt.start()\nt.join()\nprint('end')")
    assert (result.status, result.stdout) == (Status.OK, "end\n")
    assert "ZeroDivisionError" in result.stderr
    quiet = guest.run("import threading\ndef f(): raise SystemExit(3)\nt = threading.Thread(target=f)\nt.start()")
    assert (quiet.status, quiet.exit_code) == (Status.OK, 0)


def test_thread_pools_work(guest: Caller) -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor as Pool\nwith Pool(4) as p: print(list(p.map(abs, [-1, 2])))"
    )
    assert stdout_of(guest.run(code)) == "[1, 2]\n"


def test_asyncio_works(guest: Caller) -> None:
    code = """
import asyncio
async def sleep_and_return(n):
    await asyncio.sleep(0.001 * n)
    return n
async def main():
    print(await asyncio.gather(*map(sleep_and_return, range(4))), await asyncio.to_thread(abs, -3))
asyncio.run(main())
"""
    assert stdout_of(guest.run(code)) == "[0, 1, 2, 3] 3\n"


def test_multiprocessing_by_fork_works(guest: Caller) -> None:
    code = """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    queue = multiprocessing.get_context("fork").Queue()
    worker = multiprocessing.get_context("fork").Process(target=lambda: queue.put(double(4)))
    worker.start()
    print(queue.get())
    worker.join()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(double, range(4)))
"""
    assert stdout_of(guest.run(code)) == "8\n[0, 2, 4, 6]\n"


def test_a_subprocess_with_python_works(guest: Caller) -> None:
    code = """
import subprocess, sys
print(sys.version_info[0])
done = subprocess.run([sys.executable, "-c", "print(input() * 2)"], input="ab", capture_output=True, text=True)
print(done.stdout, done.stderr, done.returncode)
subprocess.run([sys.executable, "-c", "print('inherited stdout')"])
"""
    assert stdout_of(guest.run(code)) == "3\nabab\n  0\ninherited stdout\n"


def test_the_error_of_a_forked_child_is_not_that_of_the_call(guest: Caller) -> None:
    result = guest.run("import os\nif os.fork() == 0:\n    1/0\nelse:\n    os.wait()\n    print('parent')")
    assert (result.status, result.stdout) == (Status.OK, "parent\n")


def test_processes_that_the_call_leaves_are_killed(guest: Caller) -> None:
    code = "import os, time\npid = os.fork()\nif pid == 0:\n    time.sleep(1000)\nprint('end')"
    assert stdout_of(guest.run(code)) == "end\n"


@pytest.mark.runtime
def test_libraries_are_preloaded_and_import_as_usual(guest_with_numpy: Caller) -> None:
    code = "import sys\nwarm = 'numpy' in sys.modules\nimport numpy as np\nprint(warm, np.arange(6).sum())"
    assert stdout_of(guest_with_numpy.run(code)) == "True 15\n"
    assert stdout_of(guest_with_numpy.run("import sympy\nprint(sympy.factor('x**2 - 1'))")) == "(x - 1)*(x + 1)\n"
