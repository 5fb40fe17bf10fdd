"""Tests of the numbers of system calls. They are those of the kernel's headers (Debian's package linux-libc-dev)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.jail.syscalls import NUMBERS

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
"""By machine: where distributions install the header with its numbers."""
WANTED = ("RENAMEAT", "NEW_STAT", "SET_GET_RLIMIT", "MEMFD_SECRET", "SYS_CLONE3")
"""Parts of asm-generic/unistd.h that arch/arm64/include/uapi/asm/unistd.h includes."""
UNUSED = {"uretprobe", "uprobe"}
"""System calls of x86_64 between 334 and 424, which the table leaves out: the kernel itself makes them."""


def numbers_of_header(path: Path) -> dict[str, int]:
    """Return the numbers that a header defines, by the names of their system calls."""
    command = ["cc", "-E", "-dM", *(f"-D__ARCH_WANT_{name}" for name in WANTED), str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values = dict(re.findall(r"^#define (__NR\w+) (\w+)$", text, re.MULTILINE))
    names = [name for name in values if name.startswith("__NR_")]  # not __NR3264_*, to which others refer
    names = [name for name in names if name not in ("__NR_syscalls", "__NR_arch_specific_syscall")]
    return {name.removeprefix("__NR_"): int(values.get(values[name], values[name])) for name in names}


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_table_equals_the_header_of_its_machine(machine: str) -> None:
    path = next(filter(Path.exists, map(Path, HEADERS[machine])), None)
    if path is None or shutil.which("cc") is None:
        pytest.skip(f"needs cc and one of {', '.join(HEADERS[machine])}")
    header, table = numbers_of_header(path), NUMBERS[machine]
    newest = min(max(header.values()), max(table.values()))  # the header may be of an older or of a newer kernel
    known = {name: number for name, number in header.items() if number <= newest and name not in UNUSED}
    assert known == {name: number for name, number in table.items() if number <= newest}


def test_every_number_has_one_name_and_aarch64_has_no_call_of_its_own() -> None:
    """The policy is written for the names of x86_64, so a further name would have no rule."""
    for machine, table in NUMBERS.items():
        assert len({*table.values()}) == len(table), machine
    assert NUMBERS["aarch64"].keys() < NUMBERS["x86_64"].keys()
