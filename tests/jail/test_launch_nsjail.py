"""Tests of the isolation level `nsjail`: how nsjail is found, started and ended.

They use a script that replaces nsjail, or the real nsjail if it is installed. `test_launch_namespaces` attacks a jail
at this level from inside.
"""

from __future__ import annotations

import os
import re
import select
import signal
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import (
    Interpreter,
    JailSpec,
    Level,
    ProbedLayer,
    choose_level,
    launch_nsjail,
    nsjail_binary,
    nsjail_config,
    probe,
)
from sandbox.jail.launcher import EXIT_LAYER_REFUSED
from tests.executor.calling import call, executor, wait_gone
from tests.jail import jails
from tests.jail.conftest import JailSetup


def write_program(path: Path, script: str = "exit 0") -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def spec(isolation: None, python: Interpreter, guest_dir: Path) -> JailSpec:
    return jails.make_spec(python, (None, 0), guest_dir, Level.NSJAIL)


def test_nsjail_is_found_on_path_or_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    default = str(write_program(tmp_path / "bin" / "nsjail"))
    other = str(write_program(tmp_path / "bin" / "nsjail-3.4"))
    environ = {"PATH": str(tmp_path / "bin")}
    assert nsjail_binary.find(environ) == default
    assert nsjail_binary.find({**environ, "RSTAR_NSJAIL": ""}) == default
    assert nsjail_binary.find({**environ, "RSTAR_NSJAIL": "nsjail-3.4"}) == other
    assert nsjail_binary.find({"PATH": "/missing", "RSTAR_NSJAIL": other}) == other


@pytest.mark.parametrize("setting", ["{}/missing", "missing-nsjail", "{}", "{}/text"])
def test_an_nsjail_that_is_no_program_is_named(tmp_path: Path, setting: str) -> None:
    (tmp_path / "text").write_text("")
    environ = {"PATH": str(tmp_path), "RSTAR_NSJAIL": setting.format(tmp_path)}
    message = f"RSTAR_NSJAIL={environ['RSTAR_NSJAIL']!r}: expected a command on PATH or an executable file; install"
    with pytest.raises(IsolationError, match=re.escape(message)):
        nsjail_binary.find(environ)


def test_a_missing_nsjail_is_reported_with_a_remedy(isolation: None) -> None:
    with pytest.raises(IsolationError, match="no nsjail on PATH, and RSTAR_NSJAIL is not set; install nsjail"):
        choose_level("nsjail", environ={"PATH": "/missing"})
    assert choose_level("auto", environ={"PATH": "/missing"}).level is Level.NAMESPACES
    layer = next(layer for layer in probe({"PATH": "/missing"}) if layer.name == "nsjail")
    assert not layer.ok
    assert "install nsjail" in layer.found


def test_auto_refuses_a_wrong_RSTAR_NSJAIL(isolation: None) -> None:
    with pytest.raises(IsolationError, match="RSTAR_NSJAIL='/missing'"):
        choose_level("auto", environ={"RSTAR_NSJAIL": "/missing"})


def test_auto_chooses_nsjail_only_after_a_successful_trial() -> None:
    seccomp = ProbedLayer("seccomp", True, "", "")
    success = (seccomp, ProbedLayer("nsjail", True, "", ""))
    failure = (seccomp, ProbedLayer("nsjail", False, "a trial failed: for a test", ""))
    assert choose_level("auto", success, {}).level is Level.NSJAIL
    assert choose_level("nsjail", success, {}).level is Level.NSJAIL
    assert choose_level("auto", failure, {}).level is Level.NAMESPACES
    with pytest.raises(IsolationError, match="a trial failed: for a test; or ask for isolation=namespaces"):
        choose_level("nsjail", failure, {})


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 9", r"does not hold \(status 9\)"),
        (f"echo 'no memory' > {launch_nsjail.LOG}; exit 255", "no memory"),
        ("exit 255", "its log is empty"),
    ],
)
def test_a_failed_nsjail_trial_reports_the_reason(isolation: None, tmp_path: Path, script: str, reason: str) -> None:
    environ = {**os.environ, "RSTAR_NSJAIL": str(write_program(tmp_path / "nsjail", script))}
    with pytest.raises(IsolationError, match=rf"^isolation=nsjail: a trial failed: (jail: |the jail ).*{reason}"):
        choose_level("nsjail", environ=environ)


def test_nsjail_receives_only_its_configuration(
    spec: JailSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report"
    script = f"""echo "$# $1 $2" > {report}; env | grep -c SECRET >> {report}; cat "$2" >> {report}; exit 7"""
    monkeypatch.setenv("RSTAR_NSJAIL", str(write_program(tmp_path / "nsjail", script)))
    monkeypatch.setenv("SECRET", "of the server")
    with jails.running(spec) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == 7
    arguments, secret_count, *config_lines = report.read_text().splitlines()
    assert arguments == f"2 --config {launch_nsjail.CONFIG}"
    assert secret_count == "0"
    start = nsjail_config.StartParameters(3, 4, launch_nsjail.ROOT, launch_nsjail.LOG, "0 0 1", 0)
    expected_lines = nsjail_config.config(spec, start).splitlines()
    policy_lines = len(nsjail_config.POLICY)  # the lines after these differ in descriptors and ids
    assert config_lines[:policy_lines] == expected_lines[:policy_lines]
    assert len(config_lines) == len(expected_lines)


def test_a_failure_of_nsjail_is_a_launch_error_with_its_log(
    spec: JailSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo 'clone: Operation not permitted' > {launch_nsjail.LOG}; exit 255"
    monkeypatch.setenv("RSTAR_NSJAIL", str(write_program(tmp_path / "nsjail", script)))
    with jails.running(spec) as jail:
        assert "clone: Operation not permitted" in jail.launch_error()
        assert jail.process.returncode == EXIT_LAYER_REFUSED


def test_a_missing_nsjail_program_is_a_launch_error(
    spec: JailSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSTAR_NSJAIL", str(tmp_path / "missing"))
    with jails.running(spec) as jail:
        assert "expected a command on PATH or an executable file; install nsjail" in jail.launch_error()
        assert jail.process.returncode == EXIT_LAYER_REFUSED


def files_of_nsjail() -> list[str]:
    """Return nsjail's work directories on the host."""
    paths = [Path("/tmp"), Path("/dev/shm"), Path("/run/user"), *Path("/run/user").glob("*")]
    return [str(path) for parent in paths for path in parent.glob("nsjail*")]


def test_killing_nsjail_ends_the_jail_and_leaves_nothing(nsjail_available: None, spec: JailSpec) -> None:
    state_before = Path("/proc/self/mounts").read_text(), files_of_nsjail()
    with jails.running(spec, "send('up'); wait()") as jail:
        assert jail.receive() == "up"
        _launcher, nsjail, *jailed = jails.tree_pids(jail.process.pid)
        assert len(jailed) == 2, "init and the guest"
        pidfds = [os.pidfd_open(pid) for pid in jailed]
        os.kill(nsjail, signal.SIGKILL)
        assert jail.process.wait(jails.DEADLINE_S) == 128 + signal.SIGKILL
        assert jail.is_closed()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], jails.DEADLINE_S)[0], "a process of the jail outlived nsjail"
            os.close(pidfd)
    assert (Path("/proc/self/mounts").read_text(), files_of_nsjail()) == state_before


def test_standard_input_and_output_are_the_jails_dev_null(nsjail_available: None, spec: JailSpec) -> None:
    code = "send([os.fstat(fd).st_dev == os.stat('/dev/null').st_dev for fd in (0, 1)])"
    assert jails.run(spec, code) == [True, True]


def test_priority_is_that_of_the_server(nsjail_available: None, jail_setup: JailSetup) -> None:
    assert jail_setup.run("send(os.getpriority(os.PRIO_PROCESS, 0))") == os.getpriority(os.PRIO_PROCESS, 0)


PRINT_CONFINEMENT = """
import ctypes, os, socket
sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable capabilities, in two structs
ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets)
try: socket.socket()
except PermissionError: filtered = True
print(list(sets), os.getpid(), filtered, os.listdir("."), os.path.exists("/proc"), os.uname().nodename)
"""


def test_calls_have_no_capabilities_no_files_and_a_filter(nsjail_available: None) -> None:
    with executor(isolation="nsjail") as caller:
        assert caller.ready["isolation"] == "nsjail"
        result = caller.run(PRINT_CONFINEMENT)
        assert result.stdout == "[0, 0, 0, 0, 0, 0] 1 True [] False sandbox\n", result
        assert caller.run("open('left', 'w')\nwhile True: pass", timeout_s=0.2).status == "timeout"
        assert caller.run("import os; print(os.listdir())").stdout == "[]\n"
        assert caller.run("b = bytearray(1 << 30)", memory_mb=64).status == "memory_limit"


def test_calls_are_retried_after_the_death_of_nsjail(nsjail_available: None) -> None:
    with executor(isolation="nsjail") as caller:
        (launcher,) = jails.children(caller.process.pid)
        _launcher, nsjail, *jailed = jails.tree_pids(launcher)
        seq = caller.submit(call("print('still here')"))
        os.kill(nsjail, signal.SIGKILL)
        wait_gone(jailed)
        result = caller.receive(seq)
        assert (result.status, result.stdout) == ("ok", "still here\n"), result
