"""Tests of the guest runtime: it is complete or absent, built once, and replaces nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.commands import main as cli
from sandbox.errors import ConfigError
from sandbox.runtime import build as runtime

OWN_VERSION = sys.version_info[:2]


def _fake_build(python: Path, new: Path, directory: Path, packages: runtime.PackageSet) -> None:
    """Create the files of `_build_venv` without the libraries."""
    venv = new / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(python)
    (venv / runtime.MARKER).write_text(json.dumps({"requirements": list(runtime.REQUIREMENTS)}), encoding="utf-8")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the build by a fast one. The list has the directories that were built."""
    built: list[Path] = []

    def build(python: Path, new: Path, directory: Path, packages: runtime.PackageSet) -> None:
        built.append(directory)
        _fake_build(python, new, directory, packages)

    monkeypatch.setattr(runtime, "_build_venv", build)
    return built


def build_at(directory: Path, *, force: bool = False) -> Path:
    return runtime.build(Path(sys.executable), directory, force=force)


def test_a_complete_runtime_is_not_built_again(tmp_path: Path, builds: list[Path]) -> None:
    directory = tmp_path / "a" / "runtime"
    assert build_at(directory) == build_at(directory) == directory / "bin" / "python"
    assert builds == [directory]


def test_force_builds_again_and_leaves_nothing_beside_the_runtime(tmp_path: Path, builds: list[Path]) -> None:
    build_at(tmp_path / "runtime")
    build_at(tmp_path / "runtime", force=True)
    assert len(builds) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["runtime"]


def test_changed_pins_require_another_runtime(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_at(tmp_path / "runtime")
    before = runtime.default_dir(OWN_VERSION, {"HOME": "/h"})
    monkeypatch.setattr(runtime, "REQUIREMENTS", ("sympy==1.13",))
    assert not runtime.is_complete(tmp_path / "runtime")
    assert runtime.default_dir(OWN_VERSION, {"HOME": "/h"}) != before
    build_at(tmp_path / "runtime")
    assert len(builds) == 2


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(python: Path, new: Path, directory: Path, packages: runtime.PackageSet) -> None:
        (new / "venv").mkdir()
        raise runtime.RuntimeBuildError("no network")

    monkeypatch.setattr(runtime, "_build_venv", fail)
    with pytest.raises(runtime.RuntimeBuildError, match="no network"):
        build_at(tmp_path / "runtime")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path, builds: list[Path]) -> None:
    leftover = tmp_path / ".runtime.new-x" / "venv" / "bin"
    leftover.mkdir(parents=True)
    build_at(tmp_path / "runtime")
    assert not leftover.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_path_that_is_no_runtime_is_never_replaced(tmp_path: Path, builds: list[Path], kind: str) -> None:
    directory = tmp_path / "precious"
    if kind == "file":
        directory.write_text("thesis", encoding="utf-8")
    elif kind == "link":
        directory.symlink_to(tmp_path / "nowhere")
    else:
        directory.mkdir()
        (directory / "thesis").touch()
    for force in (False, True):
        with pytest.raises(ConfigError, match="is no guest runtime"):
            build_at(directory, force=force)
    assert builds == []


def test_concurrent_builders_build_once(tmp_path: Path, builds: list[Path]) -> None:
    directory = tmp_path / "runtime"
    with (tmp_path / ".runtime.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        builders = [threading.Thread(target=build_at, args=(directory,)) for _ in range(2)]
        for builder in builders:
            builder.start()
        assert builds == []
    for builder in builders:
        builder.join()
    assert builds == [directory]


def test_a_builder_that_locked_a_removed_file_waits_for_the_lock_of_the_new_file(
    tmp_path: Path, builds: list[Path]
) -> None:
    """While a builder waits for a lock file, the file is removed, and another process creates and locks a new file."""
    directory, path = tmp_path / "runtime", tmp_path / ".runtime.lock"
    waits_for_first, waits_for_second = threading.Semaphore(0), threading.Semaphore(0)

    def log(line: str) -> None:
        if "waiting" in line:
            (waits_for_second if is_removed else waits_for_first).release()

    is_removed = False
    with path.open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        builder = threading.Thread(target=runtime.build, args=(Path(sys.executable), directory), kwargs={"log": log})
        builder.start()
        assert waits_for_first.acquire(timeout=60)
        is_removed = True
        path.unlink()
        second = path.open("w")
        fcntl.flock(second, fcntl.LOCK_EX)
    with second:
        assert waits_for_second.acquire(timeout=60), "the builder holds only the lock of a removed file"
        assert builds == []
    builder.join()
    assert builds == [directory]


def test_a_runtime_without_its_base_interpreter_is_not_complete(tmp_path: Path, builds: list[Path]) -> None:
    python = tmp_path / "python-to-be-removed"
    python.symlink_to(sys.executable)
    runtime.build(python, tmp_path / "runtime")
    python.unlink()
    assert not runtime.is_complete(tmp_path / "runtime")


def test_the_directory_follows_the_environment() -> None:
    name = runtime.default_dir((3, 12), {"HOME": "/h"}).name
    assert name.startswith("runtime-3.12-")
    assert runtime.default_dir((3, 12), {"HOME": "/h"}).parent == Path("/h/.local/share/rstar-sandbox")
    assert runtime.default_dir((3, 12), {"HOME": "/h", "XDG_DATA_HOME": "/d"}) == Path("/d/rstar-sandbox", name)
    assert runtime.default_dir((3, 12), {"RSTAR_RUNTIME": "/r", "XDG_DATA_HOME": "/d"}) == Path("/r")
    assert runtime.default_dir((3, 12), {"RSTAR_RUNTIME": "", "XDG_DATA_HOME": "/d"}) == Path("/d/rstar-sandbox", name)


def test_the_runtime_of_the_newest_python_is_used(tmp_path: Path, builds: list[Path]) -> None:
    environ = {"HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="run `rstar-sandbox runtime` first"):
        runtime.default_python(environ)
    for version in ((3, 9), OWN_VERSION, (3, 99)):
        directory = runtime.default_dir(version, environ)
        build_at(directory)
        assert runtime.default_python(environ) == directory / "bin" / "python"
    build_at(runtime.default_dir((3, 98), environ))
    assert runtime.default_python(environ) == directory / "bin" / "python"


def test_a_missing_runtime_is_built_once_for_all_commands(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer_version = (3, 99)
    monkeypatch.setattr(runtime, "best_python", lambda *_: (Path(sys.executable), newer_version))
    monkeypatch.delenv("RSTAR_RUNTIME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as missing:
        runtime.default_python()
    lines: list[str] = []
    python = runtime.ensure_python(lines.append)
    assert len(lines) == 1 and str(runtime.default_dir(newer_version)) in lines[0]
    assert str(runtime.default_dir(newer_version)) in str(missing.value)
    assert runtime.ensure_python(lines.append) == runtime.default_python() == python
    assert cli.main(["runtime"]) == cli.main(["runtime", "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(python)] * 2
    assert builds == [runtime.default_dir(newer_version)] and len(lines) == 1


def test_a_better_python_found_later_is_used_only_with_force(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RSTAR_RUNTIME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    old = build_at(runtime.default_dir((3, 98)))
    monkeypatch.setattr(runtime, "best_python", lambda *_: (Path(sys.executable), (3, 99)))
    assert cli.main(["runtime"]) == 0
    assert capsys.readouterr().out.strip() == str(old) == str(runtime.ensure_python())
    assert cli.main(["runtime", "--force"]) == 0
    assert capsys.readouterr().out.strip() == str(runtime.default_python()) != str(old)


def test_a_runtime_that_other_commands_do_not_use_is_reported(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RSTAR_RUNTIME", str(tmp_path / "theirs"))
    assert cli.main(["runtime", "--path", str(tmp_path / "ours")]) == 0
    assert f"other commands do not find this runtime; set RSTAR_RUNTIME={tmp_path}/ours to" in capsys.readouterr().err
    assert cli.main(["runtime"]) == 0
    assert "other commands" not in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/proc/nowhere/runtime", "file/runtime", "file/a/runtime"])
def test_a_directory_that_cannot_be_written_is_reported_in_one_line(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert cli.main(["runtime", "--path", path]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rstar-sandbox: the guest runtime cannot be built at {Path(path).absolute()}: ")
    assert "set RSTAR_RUNTIME to a directory that this user can create" in line


def test_a_full_disk_is_reported_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(free=(runtime.SIZE_MB << 20) - 1)
    monkeypatch.setattr(runtime.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        runtime.RuntimeBuildError, match=r"needs 450 MB at \S+/runtime, where 449 MB are free; set RSTAR_R"
    ):
        build_at(tmp_path / "runtime")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_runtime_counts_as_missing(tmp_path: Path, builds: list[Path]) -> None:
    """PYENV_ROOT or the runtime may belong to another user."""
    locked = tmp_path / "locked"
    (locked / "versions").mkdir(parents=True)
    build_at(locked / "runtime")
    locked.chmod(0)

    def check() -> None:
        assert runtime.best_python({"PATH": "", "PYENV_ROOT": str(locked)}) == (Path(sys.executable), OWN_VERSION)
        assert not runtime.is_complete(locked / "runtime")
        assert runtime.find({"RSTAR_RUNTIME": str(locked / "runtime")}) is None
        assert runtime.find({"XDG_DATA_HOME": str(locked)}) is None

    try:
        _run_unprivileged(check)
    finally:
        locked.chmod(0o700)


def _run_unprivileged(check: Callable[[], None]) -> None:
    """Run in a child process as an ordinary user, since root can read everything."""
    pid = os.fork()
    if not pid:
        try:
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)  # nobody
            check()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_user_without_a_home_directory_must_name_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match=r"has no home directory .* RSTAR_RUNTIME=DIR"):
        runtime.default_python({})
    assert runtime.default_dir(OWN_VERSION, {"RSTAR_RUNTIME": "/r"}) == Path("/r")


MAIN = """
import signal, sys
from pathlib import Path
from sandbox.commands import main as cli
from sandbox.runtime import build as runtime
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
python = Path(sys.argv.pop(1))
runtime.best_python = lambda *_: (python, (3, 12))
sys.exit(cli.main(sys.argv[1:]))
"""
"""Code whose first argument is the Python that builds a runtime. It runs `cli.main` with the other arguments."""
HANGING_PYTHON = """#!/bin/sh
mkdir "$3"
sleep 1000 &
echo $! > "$FIFO"
wait
"""
"""A Python for which `python -m venv DIR` creates DIR, starts a child, reports its pid, and hangs."""


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", [("runtime",), ("serve", "--port", "0"), ("run", "-c", "1")], ids=lambda c: c[0])
def test_a_signal_during_the_build_leaves_no_files_or_processes(
    signal_number: signal.Signals, exit_code: int, command: tuple[str, ...], tmp_path: Path
) -> None:
    python, fifo, parent_dir = tmp_path / "python", tmp_path / "fifo", tmp_path / "parent"
    python.write_text(HANGING_PYTHON)
    python.chmod(0o755)
    os.mkfifo(fifo)
    argv = [sys.executable, "-c", MAIN, str(python), *command]
    environ = {**os.environ, "FIFO": str(fifo), "RSTAR_RUNTIME": str(parent_dir / "runtime")}
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ) as process:
        pidfd = os.pidfd_open(int(fifo.read_text()))
        process.send_signal(signal_number)
        _, output = process.communicate(timeout=60)
    assert (process.returncode, output.count("\n")) == (exit_code, 1), output
    assert "building the guest runtime" in output
    assert list(parent_dir.iterdir()) == []
    ended, _, _ = select.select([pidfd], [], [], 60)
    os.close(pidfd)
    assert ended, "a child of the build step is still running"


def _fake_python(python: Path, output: str) -> Path:
    """Write a program that prints `output` in place of its implementation, version and ABI flags."""
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\necho '{output}'\n")
    python.chmod(0o755)
    return python


def test_a_runtime_is_built_with_the_preferred_python(tmp_path: Path) -> None:
    pyenv = _fake_python(tmp_path / "pyenv/versions/3.13.1/bin/python3.13", "cpython 3 13")
    shim = _fake_python(tmp_path / "shims/python3.13", "no such version is active")
    environ = {"PATH": str(shim.parent), "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert runtime.best_python(environ) == (pyenv, (3, 13))


def test_a_runtime_is_built_with_the_servers_python_if_no_preferred_one_is_found(tmp_path: Path) -> None:
    freethreaded = _fake_python(tmp_path / "python3.13", "cpython 3 13 t")
    environ = {"PATH": str(freethreaded.parent), "PYENV_ROOT": str(tmp_path / "nowhere")}
    assert runtime.best_python(environ) == (Path(sys.executable), OWN_VERSION)


def test_the_error_of_a_failed_step_contains_the_output_of_pip() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution found for numpy')"]
    with pytest.raises(runtime.RuntimeBuildError, match=r"(?s)installing failed \(exit 1\); pip found no wheel.*numpy"):
        runtime.run_step("installing", command)


@pytest.mark.parametrize(
    ("output", "advises_to_install_venv"),
    [
        ("The virtual environment was not created successfully because ensurepip is not available.", True),
        ("/usr/bin/python3: No module named venv", True),
        ("Error: Command '[..., '-m', 'ensurepip', '--upgrade']' returned non-zero exit status 1.", False),
        ("ModuleNotFoundError: No module named 'sympy'", False),
    ],
)
def test_the_error_of_a_python_without_venv_names_the_package_that_has_it(
    output: str, advises_to_install_venv: bool
) -> None:
    with pytest.raises(runtime.RuntimeBuildError) as raised:
        runtime.run_step("making", [sys.executable, "-c", f"import sys; sys.exit({output!r})"])
    assert ("apt install python3-venv" in str(raised.value)) == advises_to_install_venv


def test_the_error_contains_the_errors_of_pip_without_its_warnings() -> None:
    output = "WARNING: Retrying after connection broken\nERROR: No matching distribution found for numpy"
    with pytest.raises(runtime.RuntimeBuildError) as raised:
        runtime.run_step("installing", [sys.executable, "-c", f"import sys; sys.exit({output!r})"])
    assert str(raised.value).splitlines()[1:] == ["ERROR: No matching distribution found for numpy"]


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_an_executable_that_is_no_python_is_refused(python: str) -> None:
    with pytest.raises(ConfigError, match="expected a Python interpreter"):
        runtime.version_of(Path(python))


def test_runtime_check_does_not_build_a_missing_runtime(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RSTAR_RUNTIME", str(tmp_path / "runtime"))
    assert cli.main(["runtime", "--check"]) == 1
    assert builds == []
    assert cli.main(["runtime"]) == 0
    assert cli.main(["runtime", "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "runtime" / "bin" / "python")] * 2


def test_the_installed_runtime_has_the_pinned_libraries_and_no_pip(guest_python: Path) -> None:
    script = (
        "import importlib.metadata as m, importlib.util as u\n"
        "print(sorted(f'{d.name}=={d.version}' for d in m.distributions()), u.find_spec('pip'))"
    )
    done = subprocess.run([guest_python, "-I", "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"{sorted(runtime.REQUIREMENTS)} None"


def test_the_installed_runtime_is_readable_by_every_uid(guest_python: Path) -> None:
    for directory, _, files in os.walk(guest_python.parent.parent):
        assert os.stat(directory).st_mode & 0o555 == 0o555, directory
        assert all(os.stat(os.path.join(directory, file)).st_mode & 0o444 == 0o444 for file in files), directory
