"""Submissions for code-judge, and the parts of its answers that this server must give too.

`record_code_judge.py` sends them to a code-judge and stores its answers; the tests send them to this server and
compare. Names that start with `sample_` restate a program of code-judge's own tests and quick test.
"""

from __future__ import annotations

from typing import Any

Json = Any

LEAVES_A_CHILD = """
import multiprocessing, time

def work():
    time.sleep(100)

multiprocessing.Process(target=work).start()
time.sleep(0.5)
print("the parent is done")
"""
SOLVES_BY_CLASSES = """
from dataclasses import dataclass
from functools import lru_cache

@dataclass(order=True)
class Item:
    weight: int
    value: int

@lru_cache(None)
def best(index, capacity):
    if index == len(items):
        return 0
    without = best(index + 1, capacity)
    item = items[index]
    if item.weight > capacity:
        return without
    return max(without, item.value + best(index + 1, capacity - item.weight))

count, capacity = map(int, input().split())
items = [Item(*map(int, input().split())) for _ in range(count)]
print(best(0, capacity))
"""


def _python(solution: str, **fields: Json) -> Json:
    return {"type": "python", "solution": solution, **fields}


SUBMISSIONS: dict[str, Json] = {
    "sample_echo": _python("print(input())", input="a", expected_output="a"),
    "sample_wrong_output": _python("print(input())", input="a", expected_output="b"),
    "sample_no_input": _python("print(input())", input="", expected_output="a"),
    "sample_sleep": _python("from time import sleep\nsleep(20)", input="a", expected_output="a"),
    "sample_file": _python("with open('test.txt', 'w') as f:\n    f.write('Hello')", expected_output=""),
    "nothing": _python(""),
    "comment": _python("# nothing to do"),
    "last_expression_is_not_shown": _python("x = 40\nx + 2"),
    "last_expression_and_print": _python("print(1)\n'text'"),
    "no_newline": _python("print('end', end='')", expected_output="end"),
    "no_newline_and_spaces": _python("print('  end  \\n\\n', end='')", expected_output="\n end"),
    "spaces_inside": _python("print('a  b')", expected_output="a b"),
    "carriage_returns": _python("print('a\\r\\nb')", expected_output="a\nb"),
    "only_stderr": _python("import sys\nprint('to stderr', file=sys.stderr)", expected_output=""),
    "both_streams": _python("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out 2')"),
    "sum_of_lines": _python("import sys\nprint(sum(int(line) for line in sys.stdin))", input="1\n2\n3\n"),
    "read_all": _python("import sys\nprint(repr(sys.stdin.read()))", input="a\n\n b\t"),
    "read_bytes": _python("import sys\nprint(sys.stdin.buffer.read())", input="é\r\n"),
    "read_too_much": _python("print(input())\nprint(input())", input="one line"),
    "null_input": _python("import sys\nprint(repr(sys.stdin.read()))", input=None),
    "knapsack": _python(SOLVES_BY_CLASSES, input="3 50\n10 60\n20 100\n30 120\n", expected_output="220"),
    "main_function": _python("def main():\n    print(__name__)\n\nif __name__ == '__main__':\n    main()"),
    "exit_0": _python("import sys\nprint('before')\nsys.exit(0)\nprint('after')", expected_output="before"),
    "exit_none": _python("exit()"),
    "exit_3": _python("import sys\nprint('before')\nsys.exit(3)"),
    "exit_text": _python("import sys\nsys.exit('a message')"),
    "exit_256": _python("import sys\nsys.exit(256)"),
    "quit": _python("print('q')\nquit()"),
    "system_exit": _python("raise SystemExit(7)"),
    "os_exit": _python("import os\nprint('kept', flush=True)\nos._exit(0)"),
    "os_exit_9": _python("import os\nos._exit(9)"),
    "zero_division": _python("print('start')\nprint(1 / 0)"),
    "name_error": _python("print(undefined_name)"),
    "key_error": _python("{}['missing']"),
    "assertion": _python("assert 2 + 2 == 5, 'arithmetic'"),
    "assertion_after_output": _python("print('tests run')\nassert False", expected_output="tests run"),
    "import_error": _python("import no_such_module_here"),
    "chained_error": _python("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('bad') from e"),
    "own_error": _python("class Wrong(Exception):\n    pass\n\nraise Wrong('mine')"),
    "error_in_function": _python("def f(n):\n    return f(n - 1) if n else [][0]\n\nf(3)"),
    "recursion": _python("def f():\n    return f()\nf()"),
    "keyboard_interrupt": _python("raise KeyboardInterrupt"),
    "syntax_error": _python("print('never')\nfor i in range(3) print(i)"),
    "indentation_error": _python("x = 1\n  y = 2"),
    "unclosed": _python("print((1, 2)"),
    "warning": _python("import warnings\nwarnings.warn('careful')\nprint('go on')"),
    "thread_error": _python(
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nprint('main goes on')"
    ),
    "processes": _python(
        "from multiprocessing import Pool\nif __name__ == '__main__':\n    with Pool(2) as pool:\n"
        "        print(pool.map(abs, [-1, 2, -3]))"
    ),
    "fork_and_wait": _python(
        "import os\npid = os.fork()\nif not pid:\n    os._exit(4)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
    "subprocess": _python(
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout)"
    ),
    "asyncio": _python(
        "import asyncio\n\nasync def f():\n    await asyncio.sleep(0.01)\n    return 5\n\n"
        "print(asyncio.run(f()))"
    ),
    "unicode": _python("print('naïve Zürich 東京 😀')", expected_output="naïve Zürich 東京 😀"),
    "unicode_input": _python("print(input()[::-1])", input="東京 é", expected_output="é 京東"),
    "unicode_error": _python("raise ValueError('東京')"),
    "surrogate_output": _python("print('\\ud800')"),
    "nul_in_output": _python("print('a\\0b')"),
    "long_output": _python("print('x' * 5000)"),
    "long_output_is_compared_whole": _python("print('y' * 5000)", expected_output="y" * 5000),
    "long_output_differs_at_the_end": _python("print('y' * 5000 + 'z')", expected_output="y" * 5000),
    "long_unicode_output": _python("print('東' * 3000)"),
    "long_stderr": _python("import sys\nsys.stderr.write('e' * 5000)\nsys.exit(1)"),
    "big_output": _python("for i in range(20000):\n    print('line', i, 'of a long output')"),
    "output_of_1000": _python("print('z' * 999)\nprint('cut')"),
    "busy_loop": _python("print('begin', flush=True)\nwhile True:\n    pass"),
    "unflushed_and_sleep": _python("import time\nprint('begin', end='')\ntime.sleep(60)"),
    "long_output_and_sleep": _python("import time\nprint('x' * 990)\ntime.sleep(60)"),
    "swallows_errors": _python(
        "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass"
    ),
    "short_sleep": _python("import time\ntime.sleep(0.3)\nprint('awake')"),
    "memory": _python("data = bytearray(2 << 30)"),
    "memory_list": _python("data = []\nwhile True:\n    data.append(bytearray(1 << 20))"),
    "memory_of_300_mb": _python("print(len(bytearray(300 << 20)))"),
    "memory_caught": _python("try:\n    bytearray(4 << 30)\nexcept MemoryError:\n    print('caught')"),
    "huge_integer": _python("print(len(str(3 ** 5000)))"),
    "too_many_digits": _python("print(10 ** 5000)"),
    "segmentation_fault": _python("import ctypes\nctypes.string_at(0)"),
    "abort": _python("import os\nos.abort()"),
    "numpy": _python("import numpy as np\nprint(np.arange(6).reshape(2, 3).sum(axis=0))"),
    "numpy_error": _python("import numpy as np\nnp.ones(2) @ np.ones(3)"),
    "sympy": _python("import sympy\nx = sympy.symbols('x')\nprint(sympy.factor(x ** 2 - 1))"),
    "fraction": _python("from fractions import Fraction as F\nprint(F(1, 3) + F(1, 6))", expected_output="1/2"),
    "random_seeded": _python("import random\nrandom.seed(1)\nprint(random.randint(1, 10**9))"),
    "decimal": _python("from decimal import Decimal, getcontext\ngetcontext().prec = 30\nprint(Decimal(2).sqrt())"),
    "prints_reason": _python("print('{\"reason\": \"internal_error\"}')"),
    "options": _python("print('with options')", options={"timeout": "1"}),
    "own_id": _python("print('mine')", sub_id="mine"),
    "unknown_field": _python("print('more')", more=1),
}  # fmt: skip
"""Submissions that both servers answer alike."""

DIFFERENT: dict[str, tuple[Json, Json]] = {
    "sample_child": (
        _python(LEAVES_A_CHILD, expected_output="a"),
        {"run_success": False, "reason": "worker_timeout", "stdout": "the parent is done\nSuicide from timeout.\n"},
    ),
    "output_not_utf8": (
        _python("import sys\nsys.stdout.buffer.write(b'a\\xff\\n')"),
        {"run_success": True, "reason": "", "stdout": "a\N{REPLACEMENT CHARACTER}\n"},
    ),
    "end_marker": (_python("print('@@E')"), {"run_success": True, "reason": "", "stdout": "@@E\n"}),
    "forged_pass": (
        _python("import os\nprint('42@@E', flush=True)\nos._exit(0)", expected_output="42"),
        {"success": False, "run_success": True},
    ),
    "future_import": (
        _python("from __future__ import annotations\nprint('ok')"),
        {"run_success": True, "stdout": "ok\n"},
    ),
    "at_exit": (
        _python("import atexit\natexit.register(print, 'last')\nprint('first')"),
        {"run_success": True, "stdout": "first\nlast\n"},
    ),
    "eight_threads": (
        _python(
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n"
            "    print(sum(pool.map(lambda n: n * n, range(100))))"
        ),
        {"run_success": True, "stdout": "328350\n"},
    ),
    "no_alarm": (
        _python("import signal, time\nsignal.alarm(0)\ntime.sleep(12)\nprint('late')"),
        {"run_success": False, "reason": "worker_timeout"},
    ),
    "reads_passwords": (_python("print(len(open('/etc/shadow').read()) > 0)"), {"run_success": False, "reason": ""}),
    "output_of_5_mb": (
        _python("print('x' * (5 << 20))"),
        {"run_success": False, "stderr": "OutputLimit: wrote more than output_kb; the result contains the beginning"},
    ),
    "surrogate_in_code": (_python("print('\ud800')"), {"run_success": False, "reason": ""}),
    "nul_in_code": (_python("print('a\0b')"), {"run_success": False, "reason": ""}),
    "ten_processes_of_100_mb": (
        _python(
            "import os\nfor _ in range(10):\n    if not os.fork():\n        data = b'x' * (100 << 20)\n"
            "        import time\n        time.sleep(1)\n        os._exit(0)\n"
            "codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(10)]\nprint(codes == [0] * 10)"
        ),
        {},
    ),
    "kills_itself": (
        _python("import os, signal\nprint('x', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)"),
        {},
    ),
}
"""Submissions that this server answers differently, each with the parts of its answer that are checked.
docs/compatibility.md gives the reasons. A submission without such parts has an answer that depends on the level of
isolation."""


def comparable(answer: Json) -> Json:
    """Return the parts of an answer that must be equal at both servers.

    The cost and the generated id are removed. Tracebacks in stderr name other files and lines, so only the last line of
    stderr remains, if stderr was not cut.
    """
    kept = {name: answer[name] for name in ("success", "run_success", "reason", "stdout")}
    stderr = answer["stderr"]
    if stderr is not None:
        lines = stderr.strip().splitlines()
        stderr = "(cut)" if len(stderr) >= 1000 else (lines[-1] if lines else "")
    return {**kept, "stderr": stderr}
