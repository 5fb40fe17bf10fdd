"""The guest runtime: whole or not there, made once, and never in the place of something else."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sandbox import cli, runtime
from sandbox.errors import ConfigError

HERE = sys.version_info[:2]


def _fake_build(python: Path, new: Path, folder: Path) -> None:
    """What `_build` leaves, without the libraries."""
    venv = new / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(python)
    (venv / runtime._MARKER).write_text(json.dumps({"requirements": list(runtime.REQUIREMENTS)}), encoding="utf-8")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were built, by a builder that takes no time."""
    built: list[Path] = []

    def build(python: Path, new: Path, folder: Path) -> None:
        built.append(folder)
        _fake_build(python, new, folder)

    monkeypatch.setattr(runtime, "_build", build)
    return built


def _make(folder: Path, *, force: bool = False) -> Path:
    return runtime.make(Path(sys.executable), folder, force=force)


def test_a_second_run_makes_nothing(tmp_path: Path, builds: list[Path]) -> None:
    folder = tmp_path / "a" / "runtime"
    assert _make(folder) == _make(folder) == folder / "bin" / "python"
    assert builds == [folder]


def test_force_makes_it_anew_and_leaves_nothing_beside_it(tmp_path: Path, builds: list[Path]) -> None:
    _make(tmp_path / "runtime")
    _make(tmp_path / "runtime", force=True)
    assert len(builds) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".runtime.lock", "runtime"]


def test_changed_pins_make_another_one(tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _make(tmp_path / "runtime")
    before = runtime.default_folder(HERE, {"HOME": "/h"})
    monkeypatch.setattr(runtime, "REQUIREMENTS", ("sympy==1.13",))
    assert not runtime.is_whole(tmp_path / "runtime")
    assert runtime.default_folder(HERE, {"HOME": "/h"}) != before
    _make(tmp_path / "runtime")
    assert len(builds) == 2


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(python: Path, new: Path, folder: Path) -> None:
        (new / "venv").mkdir()
        raise runtime.RuntimeFailed("no network")

    monkeypatch.setattr(runtime, "_build", fail)
    with pytest.raises(runtime.RuntimeFailed, match="no network"):
        _make(tmp_path / "runtime")
    assert [path.name for path in tmp_path.iterdir()] == [".runtime.lock"]


def test_what_a_killed_build_left_is_not_used_and_is_cleared(tmp_path: Path, builds: list[Path]) -> None:
    left = tmp_path / ".runtime.new-x" / "venv" / "bin"
    left.mkdir(parents=True)
    _make(tmp_path / "runtime")
    assert not left.exists()


@pytest.mark.parametrize("there", ["file", "full", "link"])
def test_what_is_not_ours_is_never_replaced(tmp_path: Path, builds: list[Path], there: str) -> None:
    folder = tmp_path / "precious"
    if there == "file":
        folder.write_text("thesis", encoding="utf-8")
    elif there == "link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        folder.mkdir()
        (folder / "thesis").touch()
    for force in (False, True):
        with pytest.raises(ConfigError, match="is no runtime of ours"):
            _make(folder, force=force)
    assert builds == []


def test_two_at_once_build_once(tmp_path: Path, builds: list[Path]) -> None:
    folder = tmp_path / "runtime"
    with (tmp_path / ".runtime.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [threading.Thread(target=_make, args=(folder,)) for _ in range(2)]
        for other in others:
            other.start()
        assert builds == []
    for other in others:
        other.join()
    assert builds == [folder]


def test_a_runtime_without_its_base_interpreter_is_not_whole(tmp_path: Path, builds: list[Path]) -> None:
    python = tmp_path / "python-to-be-removed"
    python.symlink_to(sys.executable)
    runtime.make(python, tmp_path / "runtime")
    python.unlink()
    assert not runtime.is_whole(tmp_path / "runtime")


def test_the_folder_follows_the_environment() -> None:
    name = runtime.default_folder((3, 12), {"HOME": "/h"}).name
    assert name.startswith("runtime-3.12-")
    assert runtime.default_folder((3, 12), {"HOME": "/h"}).parent == Path("/h/.local/share/rstar-sandbox")
    assert runtime.default_folder((3, 12), {"HOME": "/h", "XDG_DATA_HOME": "/d"}) == Path("/d/rstar-sandbox", name)
    assert runtime.default_folder((3, 12), {"RSTAR_RUNTIME": "/r", "XDG_DATA_HOME": "/d"}) == Path("/r")


def test_the_runtime_of_the_newest_python_is_taken(tmp_path: Path, builds: list[Path]) -> None:
    environ = {"HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="run `rstar-sandbox runtime` first"):
        runtime.default_python(environ)
    for version in ((3, 9), HERE, (3, 99)):
        folder = runtime.default_folder(version, environ)
        _make(folder)
        assert runtime.default_python(environ) == folder / "bin" / "python"
    _make(runtime.default_folder((3, 98), environ))
    assert runtime.default_python(environ) == folder / "bin" / "python"


def _pretend(python: Path, says: str) -> Path:
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    return python


def test_a_runtime_is_made_with_the_newest_tried_python(tmp_path: Path) -> None:
    pyenv = _pretend(tmp_path / "pyenv/versions/3.13.1/bin/python3.13", "cpython 3 13")
    shim = _pretend(tmp_path / "shims/python3.13", "no such version is active")
    environ = {"PATH": str(shim.parent), "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert runtime.best_base(environ) == (pyenv, (3, 13))


def test_a_runtime_is_made_with_our_own_python_where_no_better_is_found(tmp_path: Path) -> None:
    freethreaded = _pretend(tmp_path / "python3.13", "cpython 3 13 t") if HERE < (3, 12) else tmp_path / "none"
    environ = {"PATH": str(freethreaded.parent), "PYENV_ROOT": str(tmp_path / "nowhere")}
    assert runtime.best_base(environ) == (Path(sys.executable), HERE)


def test_a_failing_step_says_what_pip_said() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution found for numpy')"]
    with pytest.raises(runtime.RuntimeFailed, match=r"(?s)installing failed \(exit 1\); pip found no wheel.*numpy"):
        runtime._step("installing", command)


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_what_is_no_python_is_refused(python: str) -> None:
    with pytest.raises(ConfigError, match="expected a Python interpreter"):
        runtime.version_of(Path(python))


def test_check_makes_nothing(
    tmp_path: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RSTAR_RUNTIME", str(tmp_path / "runtime"))
    assert cli.main(["runtime", "--check"]) == 1
    assert builds == []
    assert cli.main(["runtime"]) == 0
    assert cli.main(["runtime", "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "runtime" / "bin" / "python")] * 2


def test_the_real_one_has_the_pinned_libraries_and_no_pip(guest_python: Path) -> None:
    script = (
        "import importlib.metadata as m, importlib.util as u\n"
        "print(sorted(f'{d.name}=={d.version}' for d in m.distributions()), u.find_spec('pip'))"
    )
    done = subprocess.run([guest_python, "-I", "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"{sorted(runtime.REQUIREMENTS)} None"


def test_the_real_one_is_readable_by_every_uid(guest_python: Path) -> None:
    for folder, _, files in os.walk(guest_python.parent.parent):
        assert os.stat(folder).st_mode & 0o555 == 0o555, folder
        assert all(os.stat(os.path.join(folder, file)).st_mode & 0o444 == 0o444 for file in files), folder
