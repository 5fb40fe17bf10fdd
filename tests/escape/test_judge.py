"""Attacks on judging: each program tries to pass its tests without solving its task. The programs are sent over HTTP to
a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from sandbox.local import local_service
from tests.escape.test_secrets import SEARCHES

pytestmark = pytest.mark.usefixtures("guest_python", "needs_isolation")

SECRET = "expected-output-7f3a91c4"
"""The expected output. No program below contains it, so a program that prints it has found it somewhere."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server that runs in a thread of its own."""
    started, addresses = threading.Event(), list[str]()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        async with local_service(["--profiles", "bare", "--zygote-pools", "1", "--slots", "4"]) as address:
            addresses.append(address)
            loops.append((asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert started.wait(120)
    yield addresses[0]
    loop, stop = loops[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def judge(url: str, **body: Any) -> dict[str, Any]:
    async def send() -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/judge", json=body) as response:
            assert response.status == 200, await response.text()
            judged: dict[str, Any] = await response.json()
            return judged

    return asyncio.run(send())


SEARCH_LIMITS = {"timeout_s": 120, "memory_mb": 1024}
SEARCH = """
import os, sys, glob
needle = "".join(reversed("4c19a3f7-tuptuo-detcepxe"))
found = []
for root, _, names in os.walk("/"):
    if root.startswith(("/proc/sys", "/sys")): continue
    for name in names:
        path = os.path.join(root, name)
        try:
            if os.path.isfile(path) and os.path.getsize(path) < 1 << 20 and needle.encode() in open(path, "rb").read():
                found.append(path)
        except OSError: pass
sys.stdout.write(needle if found else "nothing")
"""
MEMORY = f"""
import ctypes, os, re, sys
libc = ctypes.CDLL(None)
found = []
def scan(data): found.extend(re.findall(rb"expected-output-[0-9a-f]{{8}}", data))
{SEARCHES["memory"]}
print(found[0].decode() if found else "nothing")
"""
OUTPUT_ATTACKS = {
    "a verdict on stdout": 'print(\'passed\'); print(\'{"outcome": "passed", "passed": 1}\')',
    "a verdict in the report": "import os, struct\nos.write(3, struct.pack('<6i', 6, -1, 0, 0, -1, 0) + b'passed')",
    "an early exit with code 0": "import os; os._exit(0)",
    "an exit by an exception": "raise SystemExit(0)",
    "an output that equals everything": "class E(str):\n    __eq__ = lambda a, b: True\nprint(E())",
    "a replaced runner": "import sys\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
    "frame.f_globals['expected'] = ''\nprint(frame.f_globals.get('expected'))",
    "a search of the files": SEARCH,
    "a search of the memory": MEMORY,
    "a search of the environment": "import os, sys\nprint(os.environ, sys.argv, os.listdir('.'))",
}


@pytest.mark.parametrize("attack", OUTPUT_ATTACKS)
@pytest.mark.parametrize("count", [1, 2], ids=["alone", "compiled"])
def test_a_program_cannot_pass_without_the_answer(url: str, attack: str, count: int) -> None:
    tests = [{"stdin": "", "expected": SECRET}] * count
    judged = judge(url, code=OUTPUT_ATTACKS[attack], tests=tests, limits=SEARCH_LIMITS)
    assert judged["passed"] == 0
    assert {test["outcome"] for test in judged["tests"]} <= {"wrong_answer", "failed"}, judged
    assert SECRET not in str(judged)


def test_the_search_of_the_memory_finds_what_is_there(url: str) -> None:
    """If the search found nothing here, the failure of the attack above would prove nothing."""
    tests = [{"stdin": SECRET, "expected": SECRET}]
    judged = judge(url, code="data = input()\n" + MEMORY, tests=tests, limits=SEARCH_LIMITS)
    assert judged["passed"] == 1


FUNCTION_ATTACKS = {
    "an early exit": "import sys; sys.exit(0)",
    "an exit in the function": "import os\ndef solve(): os._exit(0)",
    "a printed answer": f"print({SECRET!r})\ndef solve(): return 0",
    "an object that equals everything": "class E:\n    __eq__ = lambda a, b: True\ndef solve(): return E()",
    "a replaced json": "import json\njson.dumps = lambda *a, **k: 'null'\ndef solve(): return 0",
    "replaced builtins": "import builtins\nbuiltins.repr = lambda v: 'passed'\ndef solve(): return 0",
    "a forged report": "import os, struct\ndef solve():\n    os.write(3, struct.pack('<6i', 6, -1, 0, 0, -1, 0) + b'passed')"
    "\n    os._exit(0)",
    "a value that is no JSON": "import json\njson.dumps = lambda *a, **k: '['\ndef solve(): return 0",
    "deep nesting": "def solve():\n    x = []\n    for _ in range(500): x = [x]\n    return x",
}


@pytest.mark.parametrize("attack", FUNCTION_ATTACKS)
def test_a_function_cannot_pass_without_the_answer(url: str, attack: str) -> None:
    tests = [{"call": "solve", "args": [], "expected": SECRET}] * 3
    judged = judge(url, code=FUNCTION_ATTACKS[attack], tests=tests)
    assert judged["passed"] == 0
    assert {test["outcome"] for test in judged["tests"]} <= {"wrong_answer", "failed"}


CHECKER = """
import sys
actual, expected = open("actual").read(), open("expected").read()
print("compared")
sys.exit(0 if actual.strip() == expected.strip() else 1)
"""
CHECKER_ATTACKS = {
    "files of the checker": "for name in ('expected', 'actual', 'input'): open(name, 'w').write('')",
    "a printed exit": "print('import sys; sys.exit(0)')",
    "a shell": "print('$(exit 0)\\n`exit 0`')",
    "a link": "import os\nfor name in ('expected', 'actual'): os.symlink('/dev/null', name)",
    "a process that outlives the call": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1)\n"
    "    open('expected', 'w').write('')",
    "nothing": "",
}


@pytest.mark.parametrize("attack", CHECKER_ATTACKS)
def test_a_program_cannot_tamper_with_its_checker(url: str, attack: str) -> None:
    tests = [{"stdin": "", "expected": SECRET}] * 3
    judged = judge(url, code=CHECKER_ATTACKS[attack], tests=tests, checker=CHECKER)
    assert [test["outcome"] for test in judged["tests"]] == ["wrong_answer"] * 3
    assert [test["message"] for test in judged["tests"]] == ["compared"] * 3


FORGED_VALUES = {
    "no JSON": "json.dumps = lambda *a, **k: '?'",
    "nothing": "json.dumps = lambda *a, **k: ''",
    "two values": "json.dumps = lambda *a, **k: '1], [1'",
    "nesting": "json.dumps = lambda *a, **k: '[' * 950 + ']' * 950",
    "more digits than int takes": "json.dumps = lambda *a, **k: '1' * 5000",
}


@pytest.mark.parametrize("forged", FORGED_VALUES)
def test_a_value_that_its_checker_cannot_read_is_wrong(url: str, forged: str) -> None:
    """If the checker failed because of the value, the test would be unjudged. Then a wrong program would have no score
    instead of 0."""
    checker = "import json, sys\nsys.exit(0 if json.load(open('actual')) == [7, 8] else 1)"
    code = f"import json\n{FORGED_VALUES[forged]}\ndef solve(): return [7]"
    judged = judge(url, code=code, tests=[{"call": "solve"}], checker=checker)
    assert (judged["outcome"], judged["is_scorable"]) == ("wrong_answer", True)
    right = judge(url, code="def solve(): return [7, 8]", tests=[{"call": "solve"}], checker=checker)
    assert right["outcome"] == "passed"


@pytest.mark.parametrize(
    "checker",
    [
        "1 / 0",
        "while True: pass",
        "raise SystemExit(2)",
        "import os; os.abort()",
        "x = (",
        "x = bytes(2**40)",
    ],
)
def test_a_broken_checker_is_not_the_fault_of_the_program(url: str, checker: str) -> None:
    judged = judge(url, code="print(1)", tests=[{"expected": "1"}], checker=checker)
    assert (judged["outcome"], judged["is_scorable"]) == ("unjudged", False)
    assert judged["tests"][0]["status"] == "ok"


def test_right_programs_pass(url: str) -> None:
    tests = [{"stdin": f"{a} {b}\n", "expected": f"{a + b}\n"} for a, b in ((1, 2), (3, -3), (10**20, 1))]
    code = "a, b = map(int, input().split())\nprint(a + b)"
    assert judge(url, code=code, tests=tests)["outcome"] == "passed"
    assert judge(url, code=code, tests=tests, checker=CHECKER)["outcome"] == "passed"
    calls = [{"call": "Sum.of", "args": [[1, 2.5, a]], "expected": 3.5 + a} for a in range(3)]
    code = "class Sum:\n    def of(self, numbers): return sum(numbers)"
    assert judge(url, code=code, tests=calls, compare={"rel": 1e-9})["outcome"] == "passed"


def test_code_that_crashes_the_compiler_only_fails_itself(url: str) -> None:
    judged = judge(url, code="x = " + "-" * 200_000 + "1", tests=[{"expected": "1"}] * 4)
    assert judged["outcome"] == "failed"
    assert judge(url, code="print(1)", tests=[{"expected": "1"}] * 4)["outcome"] == "passed"


@pytest.mark.parametrize(
    "guarded", ["print(f(input()))", "import sys; sys.exit(0)", "import unittest; unittest.main()"]
)
def test_a_function_is_called_whatever_its_program_would_do_as_a_script(url: str, guarded: str) -> None:
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        f"def f(x): return A(x).x\nif __name__ == '__main__':\n    {guarded}"
    )
    assert judge(url, code=code, tests=[{"call": "f", "args": [1], "expected": 1}])["outcome"] == "passed"
    script = judge(url, code="print(__name__)", tests=[{"expected": "__main__"}])
    assert script["outcome"] == "passed"
