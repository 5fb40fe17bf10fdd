"""nsjail found, started, and ended: with a script in its place, and with the real one where there is one.

What holds inside a jail is claimed in `test_namespaces`, for this level too."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import Interpreter, JailSpec, Level, ProbedLayer, choose_level, nsjail_binary, nsjail_config, probe
from sandbox.jail import launch_nsjail as nsjail
from sandbox.jail.launcher import EXIT_LAYER_REFUSED
from tests.executor.calling import call, executor, wait_gone
from tests.jail import jails
from tests.jail.conftest import Way


def program(path: Path, script: str = "exit 0") -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def spec(machine: None, python: Interpreter, guest_dir: Path) -> JailSpec:
    return jails.spec_for(python, (None, 0), guest_dir, Level.NSJAIL)


def test_is_found_on_path_and_where_it_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path = str(program(tmp_path / "bin" / "nsjail"))
    other = str(program(tmp_path / "bin" / "nsjail-3.4"))
    on_path = {"PATH": str(tmp_path / "bin")}
    assert nsjail_binary.find(on_path) == path
    assert nsjail_binary.find({**on_path, "RSTAR_NSJAIL": ""}) == path
    assert nsjail_binary.find({**on_path, "RSTAR_NSJAIL": "nsjail-3.4"}) == other
    assert nsjail_binary.find({"PATH": "/missing", "RSTAR_NSJAIL": other}) == other


@pytest.mark.parametrize(
    ("asked", "came"),
    [
        ("{}/missing", "no such file"),
        ("missing-nsjail", "no such command on PATH"),
        ("{}", "a directory"),
        ("{}/text", "a file that is not executable"),
    ],
)
def test_what_is_no_program_is_refused_by_name(tmp_path: Path, asked: str, came: str) -> None:
    (tmp_path / "text").write_text("")
    environ = {"PATH": str(tmp_path), "RSTAR_NSJAIL": asked.format(tmp_path)}
    with pytest.raises(IsolationError) as why:
        nsjail_binary.find(environ)
    assert f"RSTAR_NSJAIL={environ['RSTAR_NSJAIL']!r}: expected a program, got {came}; install nsjail" in str(why.value)


def test_absence_is_said_with_what_to_do(machine: None) -> None:
    with pytest.raises(IsolationError, match="no nsjail on PATH, and RSTAR_NSJAIL is not set; install nsjail"):
        choose_level("nsjail", environ={"PATH": "/missing"})
    assert choose_level("auto", environ={"PATH": "/missing"}).level is Level.NAMESPACES
    layer = next(layer for layer in probe({"PATH": "/missing"}) if layer.name == "nsjail")
    assert (layer.ok, "install nsjail" in layer.found) == (False, True)


def test_auto_does_not_pass_over_a_setting_that_is_wrong(machine: None) -> None:
    with pytest.raises(IsolationError, match="RSTAR_NSJAIL='/missing'"):
        choose_level("auto", environ={"RSTAR_NSJAIL": "/missing"})


def test_auto_takes_it_only_if_a_trial_held() -> None:
    def found(ok: bool) -> tuple[ProbedLayer, ...]:
        return (ProbedLayer("seccomp", True, "", ""), ProbedLayer("nsjail", ok, "a trial failed: for a test", ""))

    assert choose_level("auto", found(True), {}).level is choose_level("nsjail", found(True), {}).level is Level.NSJAIL
    assert choose_level("auto", found(False), {}).level is Level.NAMESPACES
    with pytest.raises(IsolationError, match="a trial failed: for a test; or ask for isolation=namespaces"):
        choose_level("nsjail", found(False), {})


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 9", r"does not hold \(status 9\)"),
        (f"echo 'no such luck' > {nsjail.LOG}; exit 255", "no such luck"),
        ("exit 255", "its log is empty"),
    ],
)
def test_a_trial_that_fails_says_why(machine: None, tmp_path: Path, script: str, why: str) -> None:
    environ = {**os.environ, "RSTAR_NSJAIL": str(program(tmp_path / "nsjail", script))}
    with pytest.raises(IsolationError, match=rf"^isolation=nsjail: a trial failed: (jail: |the jail ).*{why}"):
        choose_level("nsjail", environ=environ)


def test_nsjail_gets_a_configuration_and_nothing_else(
    spec: JailSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
echo "$# $1 $2" > {tmp_path}/seen; env | grep -c SECRET >> {tmp_path}/seen; cat "$2" >> {tmp_path}/seen; exit 7"""
    monkeypatch.setenv("RSTAR_NSJAIL", str(program(tmp_path / "nsjail", script)))
    monkeypatch.setenv("SECRET", "of the server")
    with jails.started(spec, None) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == 7
    arguments, secrets, *text = (tmp_path / "seen").read_text().splitlines()
    assert (arguments, secrets) == (f"2 --config {nsjail.CONFIG}", "0")
    policy = nsjail_config.config(
        spec, nsjail_config.StartParameters(3, 4, nsjail.ROOT, nsjail.LOG, "0 0 1", 0)
    ).splitlines()
    assert text[: len(nsjail_config.POLICY)] == policy[: len(nsjail_config.POLICY)]
    assert len(text) == len(policy)


def test_nsjail_that_gives_up_ends_the_start_in_its_words(
    spec: JailSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo 'clone: Operation not permitted' > {nsjail.LOG}; exit 255"
    monkeypatch.setenv("RSTAR_NSJAIL", str(program(tmp_path / "nsjail", script)))
    with jails.started(spec, None) as jail:
        assert "clone: Operation not permitted" in jail.refused()
        assert jail.process.returncode == EXIT_LAYER_REFUSED


def test_nsjail_that_is_no_program_ends_the_start(
    spec: JailSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSTAR_NSJAIL", str(tmp_path / "missing"))
    with jails.started(spec, None) as jail:
        assert "no such file; install nsjail" in jail.refused()
        assert jail.process.returncode == EXIT_LAYER_REFUSED


def left_behind() -> list[str]:
    """Where nsjail makes its folders on a host that lets it."""
    places = [Path("/tmp"), Path("/dev/shm"), Path("/run/user"), *Path("/run/user").glob("*")]
    return [str(path) for place in places for path in place.glob("nsjail*")]


def test_killing_nsjail_takes_the_jail_down_and_leaves_nothing(nsjail: None, spec: JailSpec) -> None:
    before = Path("/proc/self/mounts").read_text(), left_behind()
    with jails.started(spec, "tell('up'); wait()") as jail:
        assert jail.answer() == "up"
        _launcher, outer, *inside = jails.descendants(jail.process.pid)
        assert len(inside) == 2  # init and the guest
        ends = [os.pidfd_open(pid) for pid in inside]
        os.kill(outer, signal.SIGKILL)
        assert jail.process.wait(jails.DEADLINE_S) == 128 + signal.SIGKILL
        assert jail.is_silent()
        for end in ends:
            assert select.select([end], [], [], jails.DEADLINE_S)[0], "a process of the jail outlived nsjail"
            os.close(end)
    assert (Path("/proc/self/mounts").read_text(), left_behind()) == before


def test_standard_input_is_the_jails_own_null(nsjail: None, spec: JailSpec) -> None:
    own = "tell([os.fstat(fd).st_dev == os.stat('/dev/null').st_dev for fd in (0, 1)])"
    assert jails.ask(spec, own) == [True, True]


def test_priority_is_the_servers(nsjail: None, way: Way) -> None:
    assert way.ask("tell(os.getpriority(os.PRIO_PROCESS, 0))") == os.getpriority(os.PRIO_PROCESS, 0)


CALL = """
import ctypes, os, socket
sets = (ctypes.c_uint32 * 6)()
ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets)
try: socket.socket()
except PermissionError: filtered = True
print(list(sets), os.getpid(), filtered, os.listdir("."), os.path.exists("/proc"), os.uname().nodename)
"""


def test_calls_run_confined(nsjail: None) -> None:
    with executor(isolation="nsjail") as caller:
        assert caller.ready["isolation"] == "nsjail"
        result = caller.run(CALL)
        assert result.stdout == "[0, 0, 0, 0, 0, 0] 1 True [] False sandbox\n", result
        assert caller.run("open('left', 'w')\nwhile True: pass", timeout_s=0.2).status == "timeout"
        assert caller.run("import os; print(os.listdir())").stdout == "[]\n"
        assert caller.run("b = bytearray(1 << 30)", memory_mb=64).status == "memory_limit"


def test_calls_survive_the_death_of_nsjail(nsjail: None) -> None:
    with executor(isolation="nsjail") as caller:
        (launcher,) = jails.children(caller.process.pid)
        outer, *inside = jails.descendants(launcher)[1:]
        seq = caller.submit(call("print('still here')"))
        os.kill(outer, signal.SIGKILL)
        wait_gone(inside)
        result = caller.answer(seq)
        assert (result.status, result.stdout) == ("ok", "still here\n"), result
