"""Tests of runtimes with packages that an operator adds. The packages are resolved together with the pinned ones, a
runtime is complete or absent, and runtimes are listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.commands import main as cli
from sandbox.errors import ConfigError
from sandbox.executor import run_once
from sandbox.runtime import build as runtime
from sandbox.runtime import extras as runtime_extras
from sandbox.runtime import imports as runtime_imports
from sandbox.settings.server import ExecutorConfig
from sandbox.types import Call

INDEX_TIMEOUT_S = 60


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for runtimes."""
    monkeypatch.delenv("RSTAR_RUNTIME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "rstar-sandbox"


@pytest.fixture(scope="module")
def needs_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the test if pip reaches no package index."""
    venv = tmp_path_factory.mktemp("pip")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    command = [f"{venv}/bin/pip", "download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(venv), "roman"]
    if subprocess.run(command, capture_output=True, timeout=INDEX_TIMEOUT_S).returncode:
        pytest.skip("needs a package index that pip can reach")


@pytest.fixture
def only_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the default runtime have numpy alone, so that pip installs 20 MB instead of 450 MB."""
    pins = tuple(pin for pin in runtime.REQUIREMENTS if pin.startswith("numpy=="))
    monkeypatch.setattr(runtime, "REQUIREMENTS", pins)
    monkeypatch.setattr(runtime, "_SMOKE_TEST", "import numpy")
    no_fonts = tmp_path / "no_fonts.py"
    no_fonts.touch()
    monkeypatch.setattr(runtime, "_FONT_CACHE_SCRIPT", no_fonts)


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> list[runtime.PackageSet]:
    """Replace resolving and building. The list has the package sets that were built."""
    built: list[runtime.PackageSet] = []

    def build(python: Path, new: Path, directory: Path, packages: runtime.PackageSet) -> None:
        built.append(packages)
        (new / "venv" / "bin").mkdir(parents=True)
        (new / "venv" / "bin" / "python").symlink_to(python)
        (new / "venv" / runtime.MARKER).write_text(json.dumps(packages.encode()))

    def resolve(python: Path, added: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted([*runtime.REQUIREMENTS, *(f"{name}==1" for name in added)]))

    monkeypatch.setattr(runtime, "_build_venv", build)
    monkeypatch.setattr(runtime_extras, "_resolve", resolve)
    return built


def test_a_runtime_with_packages_is_built_once_beside_the_default_one_which_stays_the_default(
    data_home: Path, fake_pip: list[runtime.PackageSet], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runtime"]) == 0
    default = capsys.readouterr().out.strip()
    paths = []
    for arguments in (["--with", "b", "--with", "a"], ["--with", "a", "--with", "b"], ["--with", "a"]):
        assert cli.main(["runtime", *arguments]) == 0
        paths.append(capsys.readouterr().out.splitlines()[-1])
    assert paths[0] == paths[1] != paths[2]
    assert [packages.added for packages in fake_pip] == [(), ("a", "b"), ("a",)]
    assert all(Path(path).parents[2] == data_home for path in paths)
    assert str(runtime.find()) == str(Path(default).parents[1])


def test_all_runtimes_are_listed_with_their_packages(
    data_home: Path,
    fake_pip: list[runtime.PackageSet],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli.main(["runtime", "--list"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["runtime"]) == cli.main(["runtime", "--with", "b", "--with", "a"]) == 0
    (data_home / "broken").mkdir()
    (data_home / "broken" / runtime.MARKER).write_text("[1]")
    capsys.readouterr()
    assert cli.main(["runtime", "--list"]) == 0
    assert [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "default packages",
        "with a, b",
    ]
    monkeypatch.setattr(runtime, "REQUIREMENTS", ("numpy==99",))
    assert cli.main(["runtime", "--list"]) == 0
    assert capsys.readouterr().out.count("pins of another version") == 2


def test_a_runtime_can_be_removed_by_its_name_or_its_path(
    data_home: Path,
    fake_pip: list[runtime.PackageSet],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in "abc":
        assert cli.main(["runtime", "--with", package]) == 0
    pythons = [Path(line) for line in capsys.readouterr().out.splitlines()]
    first, second, third = (python.parents[1] for python in pythons)
    assert cli.main(["runtime", "--remove", first.name, "--remove", str(pythons[1])]) == 0
    assert capsys.readouterr().out == f"removed {first}\nremoved {second}\n"
    assert [path for path in data_home.iterdir() if path.name != third.name] == [], "the removed ones left something"
    (third / runtime.MARKER).write_text("[1]")  # a runtime that no longer works
    assert cli.main(["runtime", "--remove", str(third)]) == 0
    assert list(data_home.iterdir()) == []


def test_only_runtimes_can_be_removed(
    data_home: Path, fake_pip: list[runtime.PackageSet], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runtime", "--remove", "x"]) == 2
    assert "runtime --remove x: expected the name of a runtime, but there is none" in capsys.readouterr().err
    assert cli.main(["runtime", "--with", "a"]) == 0
    directory = Path(capsys.readouterr().out.strip()).parents[1]
    (data_home / "mine").mkdir()
    for name in ("mine", str(data_home / "mine"), "..", "/", ""):
        assert cli.main(["runtime", "--remove", name]) == 2
        assert f"expected one of {directory.name}" in capsys.readouterr().err
    assert {path.name for path in data_home.iterdir()} == {"mine", directory.name}


def test_requirements_come_from_a_file_without_its_comments(
    data_home: Path, fake_pip: list[runtime.PackageSet], tmp_path: Path
) -> None:
    file = tmp_path / "more.txt"
    file.write_text("# mine\nb >= 2, <3  # why\n\na[x,y]==1.0\n")
    assert cli.main(["runtime", "--requirements", str(file), "--with", "c"]) == 0
    assert fake_pip[0].added == ("a[x,y]==1.0", "b >= 2, <3", "c")


@pytest.mark.parametrize(
    "requirement", ["", "-r", "--index-url=http://x", "./here", "/there", "a @ http://x", "git+http://x", "a b", "a;b"]
)
def test_paths_urls_and_options_are_refused(
    requirement: str, data_home: Path, fake_pip: list[runtime.PackageSet], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="expected a package of an index"):
        runtime_extras.build_with(Path(sys.executable), (3, 13), [requirement])
    assert fake_pip == []


def test_a_malformed_requirement_of_a_file_is_refused_with_the_file_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "more.txt"
    file.write_text("a\n# b\n-r c.txt  # d\n")
    with pytest.raises(
        ConfigError, match=r"--requirements .*more\.txt, line 3: '-r c\.txt': expected a package"
    ) as error:
        runtime_extras.read_requirements(file)
    assert "--with" not in str(error.value)


@pytest.mark.parametrize("arguments", [["--force"], ["--check"], ["--path", "x"]])
def test_flags_of_the_default_runtime_are_refused(arguments: list[str], data_home: Path) -> None:
    assert cli.main(["runtime", "--with", "a", *arguments]) == 2


def test_a_missing_file_of_requirements_is_refused(data_home: Path) -> None:
    assert cli.main(["runtime", "--requirements", "nowhere.txt"]) == 2


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "ERROR: Cannot install numpy<2 and numpy==2.4.6 because of a conflict\nERROR: ResolutionImpossible: x",
            "conflicts with the packages of the default runtime, whose versions are fixed: Cannot install numpy<2 and",
        ),
        (
            "ERROR: Could not find a version that satisfies it\nERROR: No matching distribution found for it",
            "pip found no wheel; is the name right, and is a package index reachable? Could not find a version",
        ),
        ("WARNING: x\nERROR: Invalid requirement: 'a=='", "pip cannot resolve it: Invalid requirement: 'a=='"),
        ("killed\nby something", "pip cannot resolve it: killed by something"),
    ],
)
def test_a_failure_of_pip_becomes_one_line(output: str, reason: str) -> None:
    line = runtime_extras._reason(output)
    assert line.startswith(reason)
    assert "\n" not in line


def test_the_modules_of_a_package_follow_from_its_files() -> None:
    assert runtime_imports.modules_of("pytest") == ["py", "pytest"]
    assert runtime_imports.modules_of("msgpack") == ["msgpack"]


def test_a_package_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime_imports, "modules_of", {"broken": ["nowhere"], "good": ["json"]}.__getitem__)
    monkeypatch.setattr(sys, "argv", ["x", "good>=1", "broken[all] == 2"])
    assert runtime_imports.main() == 1
    error = "ERROR: broken: import nowhere: ModuleNotFoundError: No module named 'nowhere'\n"
    assert capsys.readouterr().err == error


@pytest.mark.usefixtures("needs_index", "needs_isolation", "only_numpy")
def test_calls_import_an_added_package(data_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runtime", "--with", "sortedcontainers"]) == 0
    python = capsys.readouterr().out.splitlines()[-1]
    code = "import numpy, sortedcontainers\nsortedcontainers.SortedList([3, 1, 2])"
    assert run_once(Call(code), ExecutorConfig(python=python)).value == "SortedList([1, 2, 3])"


@pytest.mark.usefixtures("needs_index", "only_numpy")
@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("rstar-sandbox-no-such-package", "pip found no wheel"),
        ("numpy<2", "conflicts with the packages of the default runtime, whose versions are fixed: Cannot install"),
    ],
)
def test_a_package_that_does_not_resolve_is_one_line_and_leaves_nothing(
    requirement: str, reason: str, data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runtime", "--with", requirement]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"rstar-sandbox: {requirement}: {reason}")
    assert not data_home.exists()
