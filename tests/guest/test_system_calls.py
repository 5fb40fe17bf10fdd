"""Tests of the guest's numbers of system calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.jail.syscalls import NUMBERS

GUEST = Path(__file__).parents[2] / "sandbox" / "guest"
PRINT_NUMBERS = f"""
import json, os, sys, types
machine = types.SimpleNamespace(machine=sys.argv[1])
os.uname = lambda: machine
sys.path.insert(0, {str(GUEST)!r})
import system_calls
names = [name for name in sys.argv[2:] if hasattr(system_calls, name.upper())]
print(json.dumps({{name: getattr(system_calls, name.upper()) for name in names}}))
"""


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_guest_has_the_numbers_of_its_machine(machine: str) -> None:
    command = [sys.executable, "-I", "-c", PRINT_NUMBERS, machine, *NUMBERS[machine], "sigprocmask"]
    numbers = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    expected = {**NUMBERS[machine], "sigprocmask": NUMBERS[machine]["rt_sigprocmask"]}
    assert len(numbers) == 30  # 25 with a number for each machine, and 5 from 424 on
    assert numbers == {name: expected[name] for name in numbers}
