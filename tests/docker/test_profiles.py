"""Tests of real executors under the seccomp profiles of containers. The profiles are loaded without a container
engine."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import bpf, choose_level
from sandbox.jail.seccomp import AUDIT_ARCHS, EPERM
from sandbox.jail.syscalls import NUMBERS
from tests.executor.calling import executor
from tests.jail.jails import system_python

PROFILE = Path(__file__).parents[2] / "docker" / "seccomp.json"
DEFAULT_PROFILES = ("/usr/share/containers/seccomp.json", "/etc/containers/seccomp.json", "/etc/docker/seccomp.json")
"""Paths where distributions install the default profile of container engines."""
DEADLINE_S = 60
ACTIONS = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}
NUMBER_OFFSET, ARCH_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
"""Offsets of the fields in struct seccomp_data."""
RUN_UNDER_FILTER = """
import os, sys
from pathlib import Path
from sandbox.jail import kernel
kernel.set_no_new_privs()
kernel.load_seccomp(Path(sys.argv[1]).read_bytes())
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""A program that loads a filter and executes Python with its other arguments."""

MACHINE = os.uname().machine
DOCKER_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
pytestmark = pytest.mark.skipif(MACHINE not in NUMBERS, reason="needs the numbers of system calls")


def compile_profile(profile: Mapping[str, Any]) -> bytes:
    """Compile a profile for a container without capabilities: the first matching rule decides."""
    rules = [
        (NUMBERS[MACHINE][name], rule)
        for rule in profile["syscalls"]
        for name in rule["names"]
        if name in NUMBERS[MACHINE]
        and not rule.get("includes", {}).get("caps")
        and DOCKER_ARCHITECTURES[MACHINE] in rule.get("includes", {}).get("arches", [DOCKER_ARCHITECTURES[MACHINE]])
    ]
    default_result = ACTIONS[profile["defaultAction"]] | profile.get("defaultErrnoRet", errno.EPERM)
    return bpf.assemble(
        [
            bpf.Instruction(bpf.LOAD, ARCH_OFFSET),
            bpf.Instruction(bpf.IF_EQUAL, AUDIT_ARCHS[MACHINE], yes="0"),
            bpf.Instruction(bpf.RETURN, EPERM),
            *(line for index, (number, rule) in enumerate(rules) for line in _compile_rule(index, number, rule)),
            bpf.Instruction(bpf.RETURN, default_result, label=str(len(rules))),
        ]
    )


def _compile_rule(index: int, number: int, rule: Mapping[str, Any]) -> Iterator[bpf.Instruction]:
    """Yield the instructions of one rule. A rule that does not match jumps to the label of the next one."""
    next_rule = str(index + 1)
    yield bpf.Instruction(bpf.LOAD, NUMBER_OFFSET, label=str(index))
    yield bpf.Instruction(bpf.IF_EQUAL, number, no=next_rule)
    for check in rule.get("args") or ():
        is_masked = check["op"] == "SCMP_CMP_MASKED_EQ"
        expected = check.get("valueTwo", 0) if is_masked else check["value"]
        for half_offset in (0, 4):  # an argument has 64 bits, an instruction compares 32
            yield bpf.Instruction(bpf.LOAD, ARGUMENTS_OFFSET + 8 * check["index"] + half_offset)
            if is_masked:
                yield bpf.Instruction(bpf.AND, check["value"] >> 8 * half_offset & 0xFFFFFFFF)
            expected_half = expected >> 8 * half_offset & 0xFFFFFFFF
            if check["op"] == "SCMP_CMP_NE":  # the value is small, so only the lower half of the argument is compared
                yield bpf.Instruction(bpf.IF_EQUAL, expected_half, yes=next_rule)
                break
            yield bpf.Instruction(bpf.IF_EQUAL, expected_half, no=next_rule)
    yield bpf.Instruction(bpf.RETURN, ACTIONS[rule["action"]] | rule.get("errnoRet", 0))


def argv_under(profile: Mapping[str, Any], directory: Path) -> list[str]:
    """Return the argv of a Python under this profile."""
    (directory / "filter").write_bytes(compile_profile(profile))
    return [sys.executable, "-c", RUN_UNDER_FILTER, str(directory / "filter")]


def skip_unless_supported(level: str) -> None:
    try:
        choose_level(level)
    except IsolationError as error:
        pytest.skip(str(error))


def check_calls_run(profile: str | Path, level: str, directory: Path) -> None:
    """Check that a call runs at this level in an executor under the profile."""
    skip_unless_supported(level)
    python = system_python()
    if python is None:
        pytest.skip("needs a Python that every user can reach")
    server = argv_under(json.loads(Path(profile).read_text()), directory)
    with executor(python, server=server, isolation=level) as caller:
        result = caller.run("import os; open('own', 'w'); print(os.listdir())")
        assert (result.status, result.stdout) == ("ok", "['own']\n"), result


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_level_runs_under_the_profile(level: str, tmp_path: Path) -> None:
    check_calls_run(PROFILE, level, tmp_path)


def test_the_priority_of_long_calls_can_be_lowered_under_the_profile(tmp_path: Path) -> None:
    code = "from sandbox.jail.probe import probe_layers; print(probe_layers(['priorities'])[0].ok)"
    argv = [*argv_under(json.loads(PROFILE.read_text()), tmp_path), "-c", code]
    run = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert run.stdout == "True\n"


def test_level_landlock_runs_under_the_engines_default_profile(tmp_path: Path) -> None:
    default = next(filter(os.path.isfile, DEFAULT_PROFILES), None)
    if default is None:
        pytest.skip(f"needs an engine's default profile: there is none of {', '.join(DEFAULT_PROFILES)}")
    check_calls_run(default, "landlock", tmp_path)


@pytest.mark.parametrize("syscall", ["unshare", "mount", "pivot_root", "sethostname"])
def test_level_namespaces_needs_each_system_call_that_the_profile_adds(syscall: str, tmp_path: Path) -> None:
    skip_unless_supported("namespaces")
    profile = json.loads(PROFILE.read_text())
    profile["syscalls"] = [rule for rule in profile["syscalls"] if syscall not in rule["names"]]
    argv = [*argv_under(profile, tmp_path), "-c", "from sandbox.jail import choose_level; choose_level('namespaces')"]
    run = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert syscall in run.stderr
    assert "Operation not permitted" in run.stderr
