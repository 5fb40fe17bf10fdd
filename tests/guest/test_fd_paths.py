"""Tests of the paths of a call's own descriptors (such as /dev/fd/0): code can open them with and without a file system
`/proc`."""

from __future__ import annotations

import pytest

from tests.executor.calling import Caller
from tests.guest.test_script import stdout_of

WAYS = {
    "open": "open('{path}').read()",
    "open in binary mode": "open('{path}', 'rb').read().decode()",
    "os.open": "os.read(os.open('{path}', os.O_RDONLY), 100).decode()",
    "io.open": "io.open('{path}', encoding='utf-8').read()",
    "pathlib": "pathlib.Path('{path}').read_text()",
    "fileinput": "''.join(fileinput.input('{path}'))",
    "bytes": "open(b'{path}').read()",
    "a context": "contextlib.ExitStack().enter_context(open('{path}')).read()",
}


@pytest.mark.parametrize("path", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
@pytest.mark.parametrize("way", WAYS)
def test_the_input_is_read_by_its_path(guest: Caller, way: str, path: str) -> None:
    code = f"import contextlib, fileinput, io, os, pathlib\nprint({WAYS[way].format(path=path)})"
    assert stdout_of(guest.run(code, stdin="line 1\nπ\n")) == "line 1\nπ\n\n"


def test_output_goes_to_the_descriptor_that_the_path_names(guest: Caller) -> None:
    code = """
print("first")
for mode in ("w", "a", "wb"):
    with open("/dev/stdout", mode) as file: print(file.name, file.write("x\\n" if mode != "wb" else b"y\\n"))
print("err", file=open("/dev/stderr", "w"))
print("last", file=open("/proc/self/fd/2", "a"))
"""
    result = guest.run(code)
    assert result.stdout == "first\n" + "/dev/stdout 2\nx\n" * 2 + "/dev/stdout 2\ny\n"
    assert result.stderr == "err\nlast\n"


def test_an_own_pipe_is_opened_by_its_number(guest: Caller) -> None:
    code = "import os\nr, w = os.pipe()\nos.write(w, b'x')\nprint(open(f'/dev/fd/{r}', 'rb', 0).read(1))"
    assert stdout_of(guest.run(code)) == "b'x'\n"


def test_a_module_and_an_argument_may_name_the_path(guest: Caller) -> None:
    reader = b"def read(): return open('/dev/stdin').read()"
    assert stdout_of(guest.run("import reader\nprint(reader.read())", stdin="x", files={"reader.py": reader})) == "x\n"
    assert stdout_of(guest.run("import sys\nprint(open(sys.argv[1]).read())", stdin="x", argv=["/dev/stdin"])) == "x\n"


def test_a_closed_descriptor_and_other_paths_are_not_found(guest: Caller) -> None:
    code = """
for path in ("/dev/fd/77", "/proc/self/fd/77", "/dev/fd/", "/dev/fd/-1", "/dev/stdin2", "/proc/self/fd/../maps"):
    try: open(path)
    except OSError as error: print(error.filename == path)
"""
    assert stdout_of(guest.run(code)) == "True\n" * 6


def test_code_that_names_no_path_of_a_descriptor_has_the_built_in_functions(guest: Caller) -> None:
    code = "import builtins, io, os, posix\nprint(open is builtins.open is io.open, os.open is posix.open, type(open))"
    assert stdout_of(guest.run(code)) == "True True <class 'builtin_function_or_method'>\n"


def test_the_replaced_functions_do_not_become_methods_and_keep_rmtree_safe(guest: Caller) -> None:
    code = """
import os, shutil
class Files: opened, opened_fd, removed = open, os.open, os.unlink
Files().opened("file", "w").close()
os.close(Files().opened_fd("file", os.O_RDONLY))
Files().removed("file")
print(os.path.exists("file"), "/dev/stdin", {os.open, os.unlink} <= os.supports_dir_fd)
"""
    assert stdout_of(guest.run(code)) == "False /dev/stdin True\n"
