"""Tests of code that replaces functions of the interpreter and the standard library: the end of such code is reported
as usual."""

from __future__ import annotations

import pytest

from sandbox.types import Status
from tests.executor.calling import Caller

REPLACED_MODULES = """
    os sys io re json json.encoder json.decoder traceback linecache threading atexit gc types codecs posixpath stat
    fnmatch tokenize _thread collections contextlib itertools functools struct marshal warnings textwrap operator enum
"""
HEADERS = {
    "SandboxFusion": """
import builtins, os, shutil, subprocess, sys
exit = quit = builtins.exit = builtins.quit = None
os._exit = os.kill = os.system = os.putenv = os.fork = os.forkpty = sys.exit = None
""",
    "EvalPlus": """
import builtins, faulthandler, json, os, shutil, subprocess, sys
faulthandler.disable()
builtins.exit = builtins.quit = builtins.open = builtins.exec = builtins.compile = builtins.help = None
os.environ["OMP_NUM_THREADS"] = "1"
for name in (
    "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace "
    "unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir _exit"
).split():
    setattr(os, name, None)
sys.exit = json.dumps = subprocess.Popen = None
shutil.rmtree = shutil.move = shutil.chown = None
for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
    sys.modules[name] = None
""",
    "all builtins": """
import atexit, builtins
atexit._clear()  # handlers of installed packages
vars(builtins).update(dict.fromkeys(vars(builtins).keys() - {"print", "ValueError"}))
""",
    **{
        f"all of {name}": f"""
import {name} as _module
vars(_module).update(dict.fromkeys(vars(_module).keys() - {{"stdout", "stderr", "excepthook"}}))
"""
        for name in REPLACED_MODULES.split()
    },
    "deleted": "import builtins, os, sys\ndel os._exit, sys.excepthook, sys.__excepthook__, builtins.len\n",
    "modules": "import sys\nsys.modules = {}\n",
    "emptied modules": "import sys\nsys.modules.clear()\n",
}


@pytest.fixture(params=HEADERS)
def header(request: pytest.FixtureRequest) -> str:
    return HEADERS[request.param]


def test_code_that_replaces_names_ends_as_ok_with_its_output_and_files(guest: Caller, header: str) -> None:
    code = "out = open('out.txt', 'w')\nout.write('kept')\nout.flush()\n" + header + "print('end')"
    result = guest.run(code, return_files=("*.txt",))
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (Status.OK, 0, "end\n", "")
    assert result.files == {"out.txt": b"kept"}


def test_the_value_of_the_last_line_is_reported_after_names_were_replaced(guest: Caller, header: str) -> None:
    result = guest.run(header + "(1, 'a')")
    assert (result.status, result.value, result.stderr) == (Status.OK, "(1, 'a')", "")


def test_an_error_is_reported_as_usual_after_names_were_replaced(guest: Caller, header: str) -> None:
    result = guest.run(header + "raise ValueError('own')")
    line = header.count("\n") + 1
    assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 1, "")
    assert result.error is not None
    assert (result.error.type, result.error.message, result.error.line) == ("ValueError", "own", line)
    own = f"  File \"main.py\", line {line}, in <module>\n    raise ValueError('own')\nValueError: own\n"
    assert result.stderr == result.error.traceback == "Traceback (most recent call last):\n" + own


def test_output_beyond_the_limit_is_reported_after_names_were_replaced(guest: Caller, header: str) -> None:
    result = guest.run(header + "while True:\n    print('x' * 1000)", output_kb=4)
    assert (result.status, result.stdout[:5]) == (Status.OUTPUT_LIMIT, "xxxxx")


def test_an_exit_handler_finds_what_the_code_has_replaced(guest: Caller) -> None:
    code = "import atexit, builtins, os\natexit.register(lambda: print(os.getcwd, builtins.len))\n"
    result = guest.run(code + "os.getcwd = builtins.len = None\n1 / 0")
    assert (result.stdout, result.error and result.error.type) == ("None None\n", "ZeroDivisionError")
