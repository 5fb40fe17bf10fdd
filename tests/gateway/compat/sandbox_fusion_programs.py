"""Requests for SandboxFusion and programs for verl's reward function.

`record_sandbox_fusion.py` sends them to a server of SandboxFusion and stores its answers. The tests send them to this
server and compare. Names that start with `sample_` restate a sample of SandboxFusion's own tests and documents.
"""

from __future__ import annotations

import base64
import random
import re
from typing import Any

Json = Any


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _code(code: str, **fields: Json) -> tuple[str, Json]:
    return "/run_code", {"language": "python", "run_timeout": 10, "code": code, **fields}


def _cells(*cells: str, **fields: Json) -> tuple[str, Json]:
    return "/run_jupyter", {"cells": list(cells), **fields}


REQUESTS: dict[str, tuple[str, Json]] = {
    "sample_print": _code("print(321)"),
    "sample_timeout": _code("import time\ntime.sleep(30)", run_timeout=0.5),
    "sample_assertion": _code("assert 2 + 2 == 5"),
    "sample_syntax_error": _code("float b = 2"),
    "sample_file": _code(
        "with open('one/two/note.txt') as file:\n    print(file.read())", files={"one/two/note.txt": _b64("a note")}
    ),
    "sample_stdin": _code("print(int(input()) + 1)", stdin="41"),
    "sample_fetch": _code("open('out.txt', 'w').write('result')", fetch_files=["out.txt"]),
    "sample_cells": _cells("word = 'hi'", "word", "print(word)"),
    "sample_cells_error": _cells(
        "word = 'hi'", "import sys\n_ = sys.stderr.write('a warning\\n')", "assert False", "print(word)"
    ),
    "nothing": _code(""),
    "comment": _code("# nothing to do"),
    "last_expression_is_not_shown": _code("1 + 1"),
    "several_lines": _code("for i in range(5):\n    print(i, i * i)"),
    "no_newline": _code("print('end', end='')"),
    "stderr": _code("import sys\nprint('out')\nprint('err', file=sys.stderr)"),
    "unicode": _code("print('naïve Zürich 東京 😀')"),
    "unicode_stdin": _code("print(input()[::-1])", stdin="東京 é"),
    "exit_0": _code("import sys\nprint('before')\nsys.exit(0)\nprint('after')"),
    "exit_3": _code("import sys\nsys.exit(3)"),
    "exit_text": _code("import sys\nsys.exit('a message')"),
    "exit_none": _code("import sys\nsys.exit()"),
    "exit_256": _code("import sys\nsys.exit(256)"),
    "exit_minus_1": _code("import sys\nsys.exit(-1)"),
    "raise_system_exit": _code("raise SystemExit(7)"),
    "os_exit": _code("import os\nprint('kept', flush=True)\nos._exit(9)"),
    "zero_division": _code("print('start')\nprint(1 / 0)"),
    "name_error": _code("print(undefined_name)"),
    "nested_error": _code("def f(n):\n    return g(n)\n\ndef g(n):\n    return [1, 2][n]\n\nf(5)"),
    "chained_error": _code("try:\n    int('x')\nexcept ValueError as error:\n    raise KeyError('k') from error"),
    "own_error": _code("class MyError(Exception):\n    pass\n\nraise MyError('mine')"),
    "keyboard_interrupt": _code("raise KeyboardInterrupt"),
    "recursion": _code("def f():\n    return f()\n\ntry:\n    f()\nexcept RecursionError:\n    print('caught')"),
    "indentation_error": _code("def f():\nreturn 1"),
    "unclosed": _code("print('a'"),
    "unicode_error_output": _code("raise ValueError('ünïcode')"),
    "module_not_found": _code("import no_such_module_here"),
    "eof": _code("print(input())\nprint(input())", stdin="only one line"),
    "no_stdin": _code("input()"),
    "empty_stdin": _code("import sys\nprint(repr(sys.stdin.read()))", stdin=""),
    "long_stdin": _code("import sys\nprint(sum(map(int, sys.stdin)))", stdin="\n".join(map(str, range(2000)))),
    "windows_stdin": _code("print([line for line in __import__('sys').stdin])", stdin="a\r\nb\r\n"),
    "main_guard": _code("if __name__ == '__main__':\n    print('main')"),
    "two_files": _code(
        "import helper\nprint(helper.value, open('data.csv').read().split(','))",
        files={"helper.py": _b64("value = 42\n"), "data.csv": _b64("1,2,3")},
    ),
    "null_file": _code("import os\nprint(os.path.exists('absent'))", files={"absent": None}),
    "binary_file": _code("print(list(open('b', 'rb').read()))", files={"b": _b64(bytes(range(0, 256, 51)))}),
    "dot_path": _code("print(open('a.txt').read())", files={"./a.txt": _b64("dot")}, fetch_files=["./a.txt"]),
    "fetch_changed": _code(
        "with open('a.txt', 'a') as file:\n    file.write(' more')",
        files={"a.txt": _b64("some")},
        fetch_files=["a.txt"],
    ),
    "fetch_absent": _code("print('no file')", fetch_files=["absent.txt"]),
    "fetch_directory": _code("import os\nos.mkdir('d')", fetch_files=["d"]),
    "fetch_nested": _code(
        "import os\nos.makedirs('d/e')\nopen('d/e/f', 'wb').write(bytes([0, 255]))", fetch_files=["d/e/f", "d/e/g"]
    ),
    "fetch_odd_names": _code(
        "for name in ('a[1].txt', '*', 'b?', 'bx'):\n    open(name, 'w').write(name)",
        fetch_files=["a[1].txt", "*", "b?", "c[2]"],
    ),
    "fetch_after_error": _code("open('a.txt', 'w').write('kept')\nraise ValueError", fetch_files=["a.txt"]),
    "output_before_timeout": _code("print('early', flush=True)\nwhile True: pass", run_timeout=0.5),
    "killed_child": _code(
        "import os, signal\npid = os.fork()\nif not pid:\n    os.kill(os.getpid(), signal.SIGTERM)\nprint(os.wait()[1])"
    ),
    "threads": _code(
        "import threading\nt = [threading.Thread(target=print, args=(n,)) for n in range(3)]\n"
        "for x in t:\n    x.start()\n    x.join()"
    ),
    "at_exit": _code("import atexit\natexit.register(print, 'bye')\nprint('hello')"),
    "generator": _code("def f():\n    yield from range(3)\nprint(list(f()), sum(f()))"),
    "dataclass": _code(
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\nprint(P(), P(2) == P(2))"
    ),
    "big_numbers": _code("print(2**200, 10**30 // 7)"),
    "floats": _code("print(0.1 + 0.2, 1e100, float('nan'), round(2.675, 2))"),
    "asyncio": _code("import asyncio\nasync def f():\n    return 5\nprint(asyncio.run(f()))"),
    "json": _code("import json\nprint(json.dumps({'a': [1, None, True]}, indent=1))"),
    "memory_error": _code("try:\n    x = bytearray(1 << 60)\nexcept MemoryError:\n    print('no memory')"),
    "memory_error_uncaught": _code("x = bytearray(1 << 60)"),
    "hundred_kilobytes": _code("print('x' * 100_000)"),
    "two_megabytes": _code("print('x' * 2_000_000)", run_timeout=2),
    "not_utf_8": _code("import sys\nsys.stdout.buffer.write(bytes([97, 255]))"),
    "segmentation_fault": _code("import ctypes\nctypes.string_at(0)"),
    "abort": _code("import os\nos.abort()"),
    "kills_itself": _code("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    "alarm": _code("import signal, time\nsignal.alarm(1)\ntime.sleep(60)", run_timeout=3),
    "numpy_with_limit": _code("import numpy\nprint(numpy.arange(4).sum())", memory_limit_MB=1024),
    "too_much_memory": _code("x = [bytearray(1 << 20) for _ in range(400)]", memory_limit_MB=300),
    "argv": _code("import sys\nprint(len(sys.argv))"),
    "limit_without_numpy": _code("print(sum(range(10)))", memory_limit_MB=1024, compile_timeout=10),
    "unknown_field": _code("print('fine')", no_such_field=1),
    "cells_namespace": _cells("import math\ndef f(x):\n    return math.sqrt(x)", "f(16)", "del f", "f(4)"),
    "cells_display": _cells("1", "'text'", "None", "[1, 'a']", "{'k': 1.5}", "x = 5", "x;", "# comment", ""),
    "cells_long_list": _cells("list(range(60))", "{number: 'v' * 9 for number in range(9)}", "tuple(range(50))"),
    "cells_streams": _cells("import sys\nprint('o')\nprint('e', file=sys.stderr)", "print('second')"),
    "cells_processes": _cells("import os\n_ = os.write(1, b'direct')"),
    "cells_display_call": _cells("display(1, 'two')\n3", "display()"),
    "cells_html": _cells(
        "class T:\n  def __repr__(self):\n    return 'T()'\n  def _repr_html_(self):\n    return '<b>t</b>'",
        "T()",
    ),
    "cells_underscore": _cells("41", "_ + 1"),
    "cells_errors": _cells("1 / 0", "undefined", "raise KeyError('k')", "x = = 1", "'still here'"),
    "cells_incomplete": _cells("x = ("),
    "cells_exit": _cells("exit(3)", "'after'"),
    "cells_system_exit": _cells("raise SystemExit(3)", "'after'"),
    "cells_await": _cells("import asyncio", "await asyncio.sleep(0, 'done')"),
    "cells_main": _cells("__name__"),
    "cells_files": _cells(
        "text = open('in.txt').read()",
        "with open('out.txt', 'w') as file:\n    _ = file.write(text.upper())",
        files={"in.txt": _b64("abc")},
        fetch_files=["out.txt"],
    ),
    "cells_timeout": _cells("print('first')", "import time\ntime.sleep(60)", total_timeout=0.5),
    "cells_none": _cells(),
}
"""Route and body of each request, by name."""

_TEMPORARY_SCRIPT = re.compile(r"/tmp/tmp\w+/tmp\w+\.py")
_PACKAGES = re.compile(r"/[\w/.-]+/site-packages/")
_MAX_CHARS = 2000
"""Characters up to which a text is compared whole."""
_OF_SOME_PYTHONS = re.compile(r"^ +[~^]+\n|^  File .*, in <listcomp>\n.*\n", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def comparable(answer: Json) -> Json:
    """Return the parts of an answer that must be equal. Removed are:

    - what differs from run to run: times, names of temporary files;
    - what differs between versions of Python: marks below the lines of a traceback, frames of comprehensions;
    - texts that SandboxFusion's own driver of a notebook writes;
    - all lines but the last of a traceback in a notebook.
    """
    answer = {name: value for name, value in answer.items() if name != "executor_pod_name"}
    if (run := answer.get("run_result")) is not None:
        answer["run_result"] = {
            **run,
            "execution_time": isinstance(run["execution_time"], float),
            "stdout": _shortened(run["stdout"]),
            "stderr": _comparable_stderr(run["stderr"]),
        }
    if (driver := answer.get("driver")) is not None:
        answer["driver"] = {"status": driver["status"], "return_code": driver["return_code"]}
    if "cells" in answer:
        answer["cells"] = [_comparable_cell(cell) for cell in answer["cells"]]
    return answer


def _comparable_stderr(text: str) -> str:
    return _OF_SOME_PYTHONS.sub("", _PACKAGES.sub("site-packages/", _TEMPORARY_SCRIPT.sub("main.py", text)))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:20]}... ({len(text)} characters)"


def _comparable_cell(cell: Json) -> Json:
    stderr = _PACKAGES.sub("site-packages/", cell["stderr"])
    return {**cell, "stderr": stderr, "error": list(map(_comparable_error, cell["error"]))}


def _comparable_error(error: Json) -> Json:
    evalue = re.sub(r"\((\d+\.py|Cell In\[\d+\]), line", "(CELL, line", error["evalue"])
    last = _COLOUR.sub("", error["traceback"][-1]).strip().split("\n")[-1].rstrip(": ")
    return {"ename": error["ename"], "evalue": evalue, "last_line": last}


def scored_programs() -> list[tuple[str, str, Json]]:
    """Return 200 programs as (kind, completion, test cases) for verl's `compute_score`: right and wrong answers to
    tasks with random numbers, programs that crash, and programs that never end."""
    rng = random.Random(20)
    programs = []
    for number in range(200):
        task = (_sum_task, _function_task, _assert_task, _text_task)[number % 4]
        kind = ("right", "wrong", "right", "crash", "right", "wrong", "right", "wrong", "right", "loop")[
            number // 4 % 10
        ]
        code, cases = task(rng, kind)
        programs.append((kind, f"Here it is.\n```python\n{code}\n```\n", cases))
    return programs


_SPOILERS = {
    "right": "",
    "wrong": "",
    "crash": "raise ValueError('wrong turn')\n",
    "loop": "while True:\n    pass\n",
}


def _sum_task(rng: random.Random, kind: str) -> tuple[str, Json]:
    sign = "-" if kind == "wrong" else "+"
    pairs = [(rng.randrange(1, 100), rng.randrange(1, 100)) for _ in range(3)]
    code = f"a, b = map(int, input().split())\n{_SPOILERS[kind]}print(a {sign} b)"
    return code, {"inputs": [f"{a} {b}\n" for a, b in pairs], "outputs": [f"{a + b}\n" for a, b in pairs]}


def _function_task(rng: random.Random, kind: str) -> tuple[str, Json]:
    lists = [[rng.randrange(50) for _ in range(rng.randrange(2, 9))] for _ in range(2)]
    body = "return sorted(values, reverse=True)" if kind == "wrong" else "return sorted(values)"
    spoiler = _SPOILERS[kind].replace("\n", "\n        ")
    code = f"class Solution:\n    def order(self, values):\n        {spoiler}{body}"
    return code, {
        "fn_name": "order",
        "inputs": [str(values) for values in lists],
        "outputs": [str(sorted(values)) for values in lists],
    }


def _assert_task(rng: random.Random, kind: str) -> tuple[str, Json]:
    numbers = [rng.randrange(2, 30) for _ in range(2)]
    offset = 1 if kind == "wrong" else 0
    spoiler = _SPOILERS[kind].replace("\n", "\n    ")
    code = f"def triangle(n):\n    {spoiler}return n * (n + 1) // 2 + {offset}"
    return code, {"assert_case": [f"assert triangle({n}) == {n * (n + 1) // 2}" for n in numbers]}


def _text_task(rng: random.Random, kind: str) -> tuple[str, Json]:
    words = ["".join(rng.choices("abcde é", k=8)).strip() for _ in range(2)]
    expression = "text" if kind == "wrong" else "text[::-1].upper()"
    code = f"import sys\ntext = sys.stdin.readline().rstrip('\\n')\n{_SPOILERS[kind]}print({expression})"
    if kind == "wrong" and rng.random() < 0.5:  # right for one of the two cases
        code = code.replace("print(text)", f"print(text[::-1].upper() if text == {words[0]!r} else text)")
    return code, {"inputs": [word + "\n" for word in words], "outputs": [word[::-1].upper() for word in words]}
