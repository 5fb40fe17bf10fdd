"""Tests of the command line: fast help, exit codes, and `run` with the output and exit code of Python."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.commands import main as cli
from sandbox.errors import IsolationError, NodeError
from sandbox.runtime import build as runtime
from sandbox.settings.server import ExecutorConfig, ServeConfig
from sandbox.types import Call, CallError, Limits, Profile, Result, Status, Usage

MAX_HELP_CPU_S = 0.5
COMMANDS = ((), ("serve",), ("run",), ("doctor",), ("runtime",), ("mcp",))

MakeResult = Callable[[Call, ExecutorConfig], Result]


def _fake_executor(monkeypatch: pytest.MonkeyPatch, make_result: MakeResult | Result) -> list[Call]:
    """Replace the executor by a fake. Returns the list of the calls that reach it."""
    calls: list[Call] = []

    def run_once(call: Call, config: ExecutorConfig) -> Result:
        calls.append(call)
        return make_result if isinstance(make_result, Result) else make_result(call, config)

    monkeypatch.setitem(sys.modules, "sandbox.executor", types.SimpleNamespace(run_once=run_once))
    _close_stdin(monkeypatch)
    # Without this variable, a machine without a runtime would build one.
    monkeypatch.setenv("RSTAR_SANDBOX_PYTHON", sys.executable)
    return calls


def _close_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close standard input, as for a daemon. Otherwise `run` would read the stdin of pytest as the call's input."""
    monkeypatch.setattr("sys.stdin", None)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_fast_and_imports_no_framework(command: tuple[str, ...]) -> None:
    code = (
        "import sys; from sandbox.commands.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as error: assert error.code == 0\n"
        "slow = {'aiohttp', 'trio', 'rich', 'msgpack', 'asyncio', 'torch'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    least_s = min(_cpu_seconds([sys.executable, "-c", code, *command, "--help"]) for _ in range(3))
    assert least_s < MAX_HELP_CPU_S


def _cpu_seconds(command: list[str]) -> float:
    """Return the CPU seconds of a command, which do not depend on the load of the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_version_is_the_installed_one() -> None:
    done = subprocess.run([sys.executable, "-m", "sandbox", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("rstar-sandbox 0.")


@pytest.mark.parametrize("argv", [[], ["fly"], ["serve", "--prot", "1"], ["run", "--profil", "bare", "x.py"]])
def test_wrong_usage_that_argparse_detects_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--port", "http"], "--port: expected a whole number from 0 to 65535, got 'http'"),
        (["serve", "--host", "0.0.0.0"], "needs a token"),
        (["run"], "expected one of FILE, - (code on standard input) or -c CODE"),
        (["run", "-c", "1", "--profile", "huge"], "run.profile: expected one of auto, bare, numeric, symbolic, scien"),
        (["run", "-c", "1", "--env", "A"], "--env A: expected NAME=VALUE"),
        (["run", "-c", "1", "--env", "1A=x"], "run.env: expected names of ASCII letters"),
        (["run", "-c", "1", "--return", "../*"], "expected a relative path"),
        (["run", "nowhere.py"], "nowhere.py: cannot be read (No such file or directory)"),
        (["run", "-c", "1", "--timeout-s", "soon"], "run.limits.timeout_s: expected a number from 0.01"),
        (["run", "-c", "1", "--memory-mb", "-5"], "run.limits.memory_mb: expected a whole number from 16"),
        (["run", "-c", "1", "--return", "../up"], "expected a relative path"),
    ],
)
def test_wrong_usage_that_the_command_detects_exits_with_2_and_names_the_expectation(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _close_stdin(monkeypatch)
    assert cli.main(argv) == 2
    output = capsys.readouterr().err
    assert output.startswith("rstar-sandbox: ")
    assert message in output


@pytest.mark.parametrize(
    ("failure", "exit_code"),
    [
        (NodeError("gone"), 1),
        (IsolationError("no seccomp"), 2),
        (KeyboardInterrupt(), 130),  # 128 + SIGINT
    ],
)
def test_a_failure_of_the_service_gives_an_exit_code_and_no_traceback(
    failure: BaseException, exit_code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: Call, config: ExecutorConfig) -> Result:
        raise failure

    _fake_executor(monkeypatch, fail)
    assert cli.main(["run", "-c", "1"]) == exit_code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Result("", Status.OK, exit_code=0), 0),
        (Result("", Status.ERROR, exit_code=3), 3),
        (Result("", Status.ERROR, exit_code=None), 1),
        (Result("", Status.ERROR, exit_code=0), 1),  # an error is never reported as success
        (Result("", Status.KILLED, signal=11), 139),  # 128 + the signal, as in a shell
        (Result("", Status.TIMEOUT, signal=9), 124),  # as timeout(1) exits
        (Result("", Status.MEMORY_LIMIT, exit_code=1), 1),
        (Result("", Status.OUTPUT_LIMIT, exit_code=0), 1),
        (Result("", Status.UNAVAILABLE), 1),
    ],
)
def test_run_exits_with_0_only_if_the_call_is_ok(result: Result, expected: int) -> None:
    assert cli.exit_code(result) == expected


def test_run_prints_what_python_prints(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_executor(monkeypatch, Result("", Status.ERROR, "out é\udc80", "Traceback: no\n", exit_code=1))
    assert cli.main(["run", "-c", "print(1)"]) == 1
    assert capfdbinary.readouterr() == ("out é\\udc80".encode(), b"Traceback: no\n")
    assert calls == [Call("print(1)", b"", echo=False)]


def test_run_prints_the_last_value_only_with_echo(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_executor(monkeypatch, lambda call, _: Result("", Status.OK, value="2" if call.echo else None))
    assert cli.main(["run", "-c", "1 + 1"]) == 0
    assert capfd.readouterr().out == ""
    assert cli.main(["run", "-c", "1 + 1", "--echo"]) == 0
    assert capfd.readouterr().out == "2\n"
    assert [call.echo for call in calls] == [False, True]


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (Result("", Status.TIMEOUT, usage=Usage(run_ms=2000.0)), "timed out after 2.0 s"),
        (Result("", Status.MEMORY_LIMIT), "ran out of memory; --memory-mb gives more"),
        (Result("", Status.MEMORY_LIMIT, error=CallError("MemoryError", "")), "ran out of memory; --memory-mb gives"),
        (Result("", Status.OUTPUT_LIMIT, truncated=("stdout",)), "truncated: stdout"),
        (Result("", Status.KILLED, signal=11), "killed by signal 11"),
        (Result("", Status.UNAVAILABLE, error=CallError("NodeError", "all died")), "could not be run: all died"),
    ],
)
def test_run_reports_statuses_that_python_does_not_have(
    result: Result, line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_executor(monkeypatch, result)
    assert cli.main(["run", "-c", "1"]) != 0
    assert f"rstar-sandbox: {line}" in capfd.readouterr().err


def test_run_passes_code_input_files_limits_and_settings_to_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("main.py").write_text("\ufeffprint('é')", encoding="utf-8")
    Path("in.csv").write_bytes(b"1,2")
    Path("answers").write_text("7\n", encoding="utf-8")
    configs: list[ExecutorConfig] = []

    def answer(call: Call, config: ExecutorConfig) -> Result:
        configs.append(config)
        return Result("", Status.OK)

    calls = _fake_executor(monkeypatch, answer)
    flags = "--stdin answers --file in.csv --timeout-s 2 --memory-mb 64 --profile numeric --isolation none"
    assert cli.main(["run", "main.py", *flags.split()]) == 0
    limits = Limits(timeout_s=2.0, memory_mb=64)
    files = {"in.csv": b"1,2"}
    assert calls == [Call("print('é')", b"7\n", files, limits=limits, echo=False, profile=Profile.NUMERIC)]
    assert configs[0].isolation == "none"


def test_run_reads_code_or_input_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake_executor(monkeypatch, Result("", Status.OK))
    for argv in (["run", "-"], ["run", "-c", "input()"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"42")))
        assert cli.main(argv) == 0
    assert [(call.code, call.stdin) for call in calls] == [("42", b""), ("input()", b"42")]


def test_run_json_is_the_whole_result_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Result("", Status.ERROR, "a\nb", exit_code=3)
    _fake_executor(monkeypatch, result)
    assert cli.main(["run", "-c", "1", "--json"]) == 3
    [line] = capsys.readouterr().out.splitlines()
    assert Result.decode(json.loads(line)) == result


def test_returned_files_stay_in_the_current_directory_and_overwrite_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir()
    outside.mkdir()
    monkeypatch.chdir(home)
    Path("link").symlink_to(outside)
    calls = _fake_executor(monkeypatch, Result("", Status.OK, files={"new/a": b"1", "unasked": b"2"}))
    assert cli.main(["run", "-c", "1", "--return", "new/a"]) == 0
    assert Path("new/a").read_bytes() == b"1"
    assert not Path("unasked").exists()
    assert cli.main(["run", "-c", "1", "--return", "new/a"]) == 2
    assert "use --force" in capsys.readouterr().err
    assert cli.main(["run", "-c", "1", "--return", "new/a", "--force"]) == 0
    assert cli.main(["run", "-c", "1", "--return", "link/a", "--force"]) == 2
    assert "leads out of the current directory" in capsys.readouterr().err
    assert len(calls) == 2, "a refusal comes before the run"
    assert not any(outside.iterdir())


def test_a_missing_returned_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _fake_executor(monkeypatch, Result("", Status.OK, missing_files=("out.csv",)))
    assert cli.main(["run", "-c", "1", "--return", "out.csv"]) == 0
    assert "--return out.csv: the code left no such file" in capfd.readouterr().err


@dataclass(frozen=True)
class ProbedLayer:
    """The fields of `sandbox.jail.ProbedLayer`."""

    name: str
    ok: bool
    found: str
    purpose: str


@pytest.mark.parametrize("command", [("run", "-c", "1"), ("serve", "--port", "0")], ids=lambda command: command[0])
def test_run_and_serve_build_the_runtime_once_and_fail_with_no_install(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    built: list[Path] = []

    def build(python: Path, new: Path, directory: Path, packages: runtime.PackageSet) -> None:
        built.append(directory)
        (new / "venv" / "bin").mkdir(parents=True)
        (new / "venv" / "bin" / "python").symlink_to(python)
        (new / "venv" / runtime.MARKER).write_text(json.dumps({"requirements": runtime.REQUIREMENTS}))

    pythons: list[str | None] = []
    """The Python of each call or server."""

    def serve(config: ServeConfig) -> int:
        pythons.append(config.python)
        return 0

    def answer(call: Call, config: ExecutorConfig) -> Result:
        pythons.append(config.python)
        return Result("", Status.OK)

    _fake_executor(monkeypatch, answer)
    monkeypatch.setitem(sys.modules, "sandbox.gateway", types.SimpleNamespace(serve=serve))
    monkeypatch.delenv("RSTAR_SANDBOX_PYTHON")
    monkeypatch.setattr(runtime, "_build_venv", build)
    directory = tmp_path / "runtime"
    monkeypatch.setenv("RSTAR_RUNTIME", str(directory))
    caplog.set_level("INFO")
    assert cli.main([*command, "--no-install"]) == 2
    assert f"no guest runtime at {directory}; run `rstar-sandbox runtime` first" in capsys.readouterr().err
    assert (built, pythons) == ([], [])  # neither a build nor a call
    for _ in range(2):
        assert cli.main([*command]) == 0
    assert cli.main([*command, "--no-install"]) == 0
    assert (built, pythons) == ([directory], [str(directory / "bin" / "python")] * 3)
    lines = [*caplog.messages, *capsys.readouterr().err.splitlines()]
    assert len(lines) == 1 and "building the guest runtime" in lines[0]
    assert cli.main([*command, "--python", "/their/python"]) == 0
    assert pythons[-1] == "/their/python"


def test_serve_chooses_the_level_once_for_all_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose_level(requested: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(level=types.SimpleNamespace(value="landlock"), reason=f"weaker than {requested}")

    monkeypatch.setitem(sys.modules, "sandbox.jail", types.SimpleNamespace(choose_level=choose_level))
    served: list[ServeConfig] = []
    fake = types.SimpleNamespace(serve=lambda config: served.append(config) or 0)
    monkeypatch.setitem(sys.modules, "sandbox.gateway", fake)
    assert cli.main(["serve", "--executors", "4", "--slots", "8", "--cores", "4"]) == 0
    executors = served[0].per_executor()
    assert [executor.isolation for executor in executors] == ["landlock"] * 4
    assert served[0].isolation_reason == "weaker than auto"


def test_a_closed_stdout_causes_no_traceback(guest_python: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sandbox", "runtime", "--check"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
