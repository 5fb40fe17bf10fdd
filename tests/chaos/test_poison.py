"""Tests of programs that kill the processes which run them, on a real server without isolation.

Gateway and client both send lost calls again. Still such a program is started at most `attempts` times, and no other
call is lost with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.servers.server_under_test import ServerUnderTest
from sandbox.client import Client
from sandbox.types import Result, Status
from tests.executor.calling import OWN_PYTHON

pytestmark = pytest.mark.timeout(400)
ATTEMPTS = 3
FLAGS = (
    *("--isolation", "none", "--profiles", "bare", "--executors", "1", "--zygote-pools", "1", "--slots", "4"),
    *("--attempts", str(ATTEMPTS)),
)
VICTIMS = {
    "its zygote": "victim = os.getppid()",
    "its executor": """
victim = os.getppid()
while b"sandbox.executor" not in open(f"/proc/{victim}/cmdline", "rb").read():
    victim = int(open(f"/proc/{victim}/stat").read().rpartition(")")[2].split()[1])
""",
}
"""Code that sets `victim` to the pid of a process, by the name of the process."""
POISON = """
import os, signal, time
with open({starts!r}, "a") as starts:
    starts.write("x")
{victim}
os.kill(victim, signal.SIGKILL)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    with ServerUnderTest(OWN_PYTHON, FLAGS) as server:
        yield server


def poison(victim: str, starts: Path) -> str:
    """Return a program that writes a byte to a file when it starts, and then kills a process."""
    return POISON.format(starts=str(starts), victim=VICTIMS[victim])


def error_type(result: Result) -> str:
    return result.error.type if result.error is not None else ""


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_program_that_kills_a_process_is_started_attempts_times_in_all_and_fails_no_other_call(
    victim: str, server: ServerUnderTest, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    # The server has four slots. Some of the other calls run beside the program, and the rest after it.
    others = [f"import time\ntime.sleep(0.05)\nprint({number})" for number in range(12)]
    with Client(server.url) as client:
        results = client.run_batch([others[0], poison(victim, starts), *others[1:]])
    poisonous = results.pop(1)
    assert starts.read_text() == "x" * ATTEMPTS
    assert (poisonous.status, error_type(poisonous), poisonous.attempts) == (Status.UNAVAILABLE, "Poison", ATTEMPTS)
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(12)]


def test_a_judged_program_that_kills_its_zygote_is_started_attempts_times_for_its_test(
    server: ServerUnderTest, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    program = {"code": poison("its zygote", starts), "tests": [{"stdin": "", "expected": ""}]}
    with Client(server.url) as client:
        (judged,) = client.judge([program])
    assert starts.read_text() == "x" * ATTEMPTS
    assert (judged.is_scorable, judged.tests[0].message.partition(":")[0]) == (False, "Poison")
