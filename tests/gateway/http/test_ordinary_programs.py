"""Ordinary programs on a real server: guards at their head, their own input and output, long outputs, no imports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from sandbox.local import local_service
from tests.gateway.compat.record_sandbox_fusion import post
from tests.guest.test_replaced import HEADERS
from tests.guest.test_streams import ADD, FAST_INPUTS, STDIN, SUMS

GUARDS = ("SandboxFusion", "EvalPlus", "all builtins")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    async with local_service(["--profiles", "bare", "--zygote-pools", "1", "--slots", "4"]) as url:
        yield url


def outcomes(url: str, **body: Any) -> list[str]:
    tests = post(f"{url}/v1/judge", body)["tests"]
    return [test["outcome"] for test in tests]


@pytest.mark.parametrize("guard", GUARDS)
def test_a_program_behind_a_guard_is_judged_by_its_output(url: str, guard: str) -> None:
    code = "data = input()\n" + HEADERS[guard] + "print(data)"
    tests = [{"stdin": str(number), "expected": str(max(number, 1))} for number in range(4)]
    assert outcomes(url, code=code, tests=tests) == ["wrong_answer", "passed", "passed", "passed"]


@pytest.mark.parametrize("guard", GUARDS)
def test_a_function_behind_a_guard_is_judged_by_its_result(url: str, guard: str) -> None:
    code = HEADERS[guard] + "def f(x):\n    return 1 // x and [x, {'a': x}]"
    tests = [{"call": "f", "args": [number], "expected": [1, {"a": 1}]} for number in range(3)]
    assert outcomes(url, code=code, tests=tests) == ["failed", "passed", "wrong_answer"]


@pytest.mark.parametrize("guard", GUARDS)
def test_code_behind_a_guard_ends_as_ok_in_all_routes(url: str, guard: str) -> None:
    code = HEADERS[guard] + "print('end')"
    result = post(f"{url}/v1/execute", {"code": code})
    assert (result["status"], result["stdout"], result["stderr"]) == ("ok", "end\n", "")
    run = post(f"{url}/run_code", {"code": code, "language": "python"})["run_result"]
    assert (run["status"], run["return_code"], run["stdout"], run["stderr"]) == ("Finished", 0, "end\n", "")
    cells = post(f"{url}/run_jupyter", {"cells": [code, "print(2)", "raise ValueError('own')", "3"]})["cells"]
    assert [cell["stdout"] for cell in cells] == ["end\n", "2\n", "", ""]
    assert [[error["ename"] for error in cell["error"]] for cell in cells] == [[], [], ["ValueError"], []]
    assert cells[3]["display"] == [{"text/plain": "3"}]


def test_programs_with_their_own_input_pass(url: str) -> None:
    codes = [f"import os, sys\n{head}\nput = sys.stdout.write{ADD}" for head in FAST_INPUTS.values()]
    body = {"programs": [{"code": code} for code in codes], "defaults": {"tests": [{"stdin": STDIN, "expected": SUMS}]}}
    judged = post(f"{url}/v1/judge", body)["results"]
    failed = [name for name, program in zip(FAST_INPUTS, judged, strict=True) if program["outcome"] != "passed"]
    assert not failed, failed


@pytest.mark.parametrize("limits", [{}, {"output_kb": 1}])
def test_a_right_answer_longer_than_output_kb_passes(url: str, limits: dict[str, int]) -> None:
    lines = "".join(f"{number}\n" for number in range(20_000))
    numbers = [number / 10 for number in range(20_000)]
    code = "print(*range(int(input())), sep='\\n')\ndef f(n):\n    return [x / 10 for x in range(n)]"
    program = {"code": code, "tests": [{"stdin": "20000", "expected": lines}], "limits": limits}
    assert outcomes(url, **program) == ["passed"]
    program |= {"code": code.split("\n", 1)[1], "tests": [{"call": "f", "args": [20_000], "expected": numbers}]}
    assert outcomes(url, **program) == ["passed"]


def test_output_far_longer_than_the_expected_one_exceeds_its_limit(url: str) -> None:
    judged = post(f"{url}/v1/judge", {"code": "while True: print(1)", "tests": [{"expected": "1\n"}]})
    assert judged["tests"][0]["status"] == "output_limit"


SOLUTION = '''"""A solution as it is submitted to LeetCode."""
from __future__ import annotations
class Solution:
    def f(self, numbers: List[int], k: Optional[int] = None) -> Dict[int, int]:
        if not numbers:
            raise ValueError(k)
        heap: List[int] = []
        for number in numbers:
            heappush(heap, number)
        best = min(inf, heap[0], pow(7, 2, 10), heapq.nsmallest(1, heap)[0], math.gcd(4, 6), gcd(4, 6))
        found = [bisect_left([1, 2], 2), bisect.bisect([1, 2], 2)]
        return [best, *found, Counter("aab")["a"], next(count(5)), lru_cache(abs)(-1)]
'''
CALLS = [{"call": "Solution.f", "args": [[3, 2]], "expected": [2, 1, 2, 2, 5, 1]}] * 3


def test_with_the_prelude_a_solution_without_imports_passes(url: str) -> None:
    assert outcomes(url, code=SOLUTION, tests=CALLS, prelude="leetcode") == ["passed"] * 3
    annotated = SOLUTION.replace("from __future__ import annotations\n", "")
    assert outcomes(url, code=annotated, tests=CALLS[:1], prelude="leetcode") == ["passed"]
    assert outcomes(url, code=annotated, tests=CALLS[:1]) == ["failed"]
    printed = {"code": "print(Counter(input()).most_common(1))", "prelude": "leetcode"}
    assert outcomes(url, **printed, tests=[{"stdin": "abb", "expected": "[('b', 2)]"}]) == ["passed"]


def test_with_the_prelude_line_numbers_are_those_of_the_program(url: str) -> None:
    body = {"code": SOLUTION, "tests": [{"call": "Solution.f", "args": [[]], "expected": 0}], "prelude": "leetcode"}
    stderr = post(f"{url}/v1/judge", body)["tests"][0]["stderr"]
    assert f'"main.py", line {SOLUTION[: SOLUTION.index("raise")].count(chr(10)) + 1}, in f' in stderr
