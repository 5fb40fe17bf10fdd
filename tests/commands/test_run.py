"""Tests of `rstar-sandbox run` and `run_once` in a real jail, compared with Python itself."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from sandbox.errors import ConfigError, IsolationError, NodeError, SandboxError
from sandbox.executor import run_once
from sandbox.executor.zygote_pool import ZygotePool
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Call, Limits, Profile, Result, Status
from tests.executor.calling import OWN_PYTHON, wait_gone
from tests.jail import jails
from tests.jail.jails import tree_pids

pytestmark = pytest.mark.usefixtures("needs_isolation")

DEADLINE_S = 60


def python(*args: str, stdin: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run Python itself."""
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    argv = [OWN_PYTHON, *args]
    return subprocess.run(argv, input=stdin, capture_output=True, check=False, cwd=cwd, env=environ, timeout=DEADLINE_S)


def rstar_run(*args: str, stdin: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run `rstar-sandbox run` with the same arguments."""
    argv = [sys.executable, "-m", "sandbox", "run", "--python", OWN_PYTHON, *args]
    return subprocess.run(argv, input=stdin, capture_output=True, check=False, cwd=cwd, timeout=DEADLINE_S)


def config(**settings: object) -> ExecutorConfig:
    return ExecutorConfig(python=OWN_PYTHON, **settings)  # type: ignore[arg-type]


SCRIPTS = {
    "fine": "print('fine')\nimport sys\nprint('also', file=sys.stderr)",
    "silent": "1 + 1",
    "input": "import sys\nprint(input())\nprint(sys.stdin.read().upper(), end='')",
    "bytes": "import sys\nsys.stdout.buffer.write('é\\x00'.encode())\nprint(sys.stdin.buffer.read())",
    "raises": "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)",
    "chained": "try:\n    {}['k']\nexcept KeyError as why:\n    raise ValueError('outer') from why",
    "syntax": "print('never')\nx = (1,\n",
    "exit": "import sys\nprint('x', end='')\nsys.exit(7)",
    "exit text": "raise SystemExit('said')",
    "exit none": "raise SystemExit",
    "os exit": "import os\nos._exit(9)",
    "interrupt": "raise KeyboardInterrupt",
    "handlers": "import atexit\natexit.register(print, 'handler')\n1/0",
    "thread": "import threading\nthreading.Thread(target=print, args=('thread',)).start()",
    "hook": "import sys\nsys.excepthook = lambda *_: print('hook')\n1/0",
    "main": "if __name__ == '__main__':\n    print(__name__, __import__('sys').argv)",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_under_python(name: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SCRIPTS[name])
    stdin = b"first\nsecond\n" if name == "input" else b"first\nsecond\n\xff"  # "input" decodes it, so it must be UTF-8
    expected, got = (run("main.py", stdin=stdin, cwd=tmp_path) for run in (python, rstar_run))
    # Python kills itself by SIGINT after KeyboardInterrupt, for which a shell reports 128 + 2.
    exit_code = 130 if name == "interrupt" else expected.returncode
    assert (got.returncode, got.stdout) == (exit_code, expected.stdout)
    assert got.stderr == expected.stderr.replace(f'"{tmp_path}/main.py"'.encode(), b'"main.py"')


def test_code_comes_from_a_pipe_or_the_command_line(tmp_path: Path) -> None:
    for args, stdin in ((("-",), b"print('piped')"), (("-c", "print(input())"), b"piped\n")):
        done = rstar_run(*args, stdin=stdin, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"piped\n", b"")


def test_files_are_copied_in_and_returned(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xffin")
    code = "open('out.bin', 'wb').write(open('in.txt', 'rb').read()[::-1])"
    done = rstar_run("-c", code, "--file", "in.txt", "--return", "out.bin", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "out.bin").read_bytes() == b"ni\xff"


@pytest.mark.parametrize("args", [("a", "b c"), ("--", "-n", "3"), ("a", "--", "--json")])
def test_arguments_follow_the_code_as_under_python(args: tuple[str, ...], tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:])"
    (tmp_path / "main.py").write_text(code)
    expected = [arg for arg in args if arg != "--"]
    for argv in (["main.py", *args], ["-c", code, *args]):
        done = rstar_run(*argv, cwd=tmp_path)
        assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f"{expected}\n", b"")


def test_variables_are_set_for_the_code() -> None:
    done = rstar_run("-c", "import os; print(os.environ['A'], os.environ['B'])", "--env", "A=1", "--env", "B=x=y")
    assert (done.stdout, done.stderr) == (b"1 x=y\n", b"")


def test_matches_of_a_pattern_are_written_unless_a_file_exists(tmp_path: Path) -> None:
    code = "import os\nos.mkdir('out')\nfor name in ('out/a.txt', 'out/b.txt', 'c.py'): open(name, 'w').write(name)"
    done = rstar_run("-c", code, "--return", "out/*.txt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "a.txt": "out/a.txt",
        "b.txt": "out/b.txt",
    }
    (tmp_path / "out/b.txt").write_text("mine")
    refused = rstar_run("-c", f"{code}\nprint('printed')", "--return", "**/*", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, b"printed\n")
    assert b"--return out/a.txt: exists; use --force" in refused.stderr
    assert not (tmp_path / "c.py").exists(), "nothing is written if one file must not be"
    assert (tmp_path / "out/b.txt").read_text() == "mine"


def test_json_is_the_whole_result() -> None:
    done = rstar_run("-c", "print('out')\n6 * 7", "--json", "--echo")
    result = Result.decode(json.loads(done.stdout))
    assert (done.returncode, result.status, result.stdout, result.value) == (0, Status.OK, "out\n", "42")
    assert result.attempts == 1
    failed = rstar_run("-c", "1/0", "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["error"]["type"] == "ZeroDivisionError"


def test_a_status_that_python_does_not_have_is_reported_in_one_line() -> None:
    timed_out = rstar_run("-c", "print('kept', flush=True)\nwhile True: pass", "--timeout-s", "0.3")
    assert (timed_out.returncode, timed_out.stdout) == (124, b"kept\n")
    assert timed_out.stderr.startswith(b"rstar-sandbox: timed out after ")
    without_python = rstar_run("-c", "1", "--python", "/nowhere/python")
    assert without_python.returncode == 2
    assert without_python.stderr.startswith(b"rstar-sandbox: ")
    assert without_python.stderr.count(b"\n") == 1


def test_ctrl_c_ends_run_without_output_or_leftover_processes() -> None:
    argv = [sys.executable, "-m", "sandbox", "run", "--python", OWN_PYTHON, "-c", "while True: pass"]
    # Background jobs of a shell, and so perhaps these tests and their children, ignore SIGINT.
    accept_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=accept_sigint) as process:
        while len(pids := tree_pids(process.pid)) < 5:  # the command itself, launcher, init, zygote, call
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output) == (130, b"")
    wait_gone(pids)


def test_run_once_returns_a_complete_result() -> None:
    call = Call(
        "import sys\nprint(input(), open('a/b').read())\nopen('c', 'w').write('back')\n[1, 2]",
        stdin="in",
        files={"a/b": b"file"},
        return_files=("c",),
        limits=Limits(timeout_s=20.0),
        id="mine",
    )
    result = run_once(call, config())
    assert (result.id, result.status, result.stdout, result.value) == ("mine", Status.OK, "in file\n", "[1, 2]")
    assert result.files == {"c": b"back"}
    assert result.usage.run_ms > 0


def test_run_once_leaves_nothing_behind() -> None:
    before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    children = set(tree_pids(os.getpid()))
    for _ in range(3):
        assert run_once(Call("1"), config()).value == "1"
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    assert set(tree_pids(os.getpid())) == children


@pytest.mark.runtime
def test_the_profile_follows_from_the_imports(guest_python: Path) -> None:
    with_runtime = ExecutorConfig(python=str(guest_python))
    code = "import sys\nwarm = 'sympy' in sys.modules\nimport sympy\nwarm, sympy.Integer(6).is_prime"
    assert run_once(Call(code), with_runtime).value == "(True, False)"
    assert run_once(Call(code, profile=Profile.BARE), with_runtime).value == "(False, False)"


def test_a_failed_start_raises_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run_once(Call("1"), ExecutorConfig(python=str(tmp_path / "python")))
    with pytest.raises(SandboxError):
        run_once(Call("1"), config(isolation="nsjail"))
    monkeypatch.setattr(ZygotePool, "_start_jail", _start_nothing)
    with pytest.raises(NodeError, match="failed to start 3 times"):
        run_once(Call("1"), config())


def test_a_call_on_a_machine_without_cgroups_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning would go to stderr, where `run` prints the output of the code. Most users have no cgroups, so this case
    must log nothing."""
    monkeypatch.setattr("sandbox.jail.CgroupTree", _refuse_cgroups)
    assert run_once(Call("print(1)"), config()).stdout == "1\n"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def _refuse_cgroups() -> NoReturn:
    raise IsolationError("cgroups: permission denied")


def _start_nothing(_pool: ZygotePool, _sock: object) -> subprocess.Popen[bytes]:
    """Start a process that ends at once in place of the jail."""
    return subprocess.Popen(["true"])


def test_a_call_runs_at_the_level_that_auto_chooses_in_a_user_namespace() -> None:
    """In a user namespace with one id, level namespaces is refused and level landlock works."""
    command = [sys.executable, "-m", "sandbox", "run", "--python", OWN_PYTHON, "-c", "print(1)"]
    run = jails.run_in_user_namespace(*command)
    if "isolation=landlock: this machine lacks" in run.stderr:
        pytest.skip(run.stderr.strip())
    assert (run.returncode, run.stdout) == (0, "1\n"), run.stderr
