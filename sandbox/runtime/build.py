"""The guest runtime: a virtual environment with the pinned libraries that math code uses. Its Python runs the calls.

- A directory with the final name is complete: it is built in a sibling directory, tested, and renamed.
- The name contains a hash of the pins, so changed pins make a new runtime beside the old one.
- Only `bin/python` is used. The other scripts contain the path of the build directory.
- The runtime has no pip and no setuptools, because calls can import everything in it.
- All commands use the runtime that `find` returns. If there is none, a runtime is built with the Python that
  `best_python` returns.

`$RSTAR_RUNTIME` names the directory; the default is under `$XDG_DATA_HOME/rstar-sandbox`.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError, SandboxError
from sandbox.held_signals import held_signals

REQUIREMENTS = (
    "antlr4-python3-runtime==4.13.2",
    "contourpy==1.3.3",
    "cycler==0.12.1",
    "fonttools==4.68.0",
    "kiwisolver==1.5.1",
    "latex2sympy2_extended==1.11.0",
    "math-verify==0.9.0",
    "matplotlib==3.11.2",
    "mpmath==1.3.0",
    "networkx==3.6.1",
    "numpy==2.4.6",
    "packaging==26.4",
    "pandas==3.1.1",
    "pillow==13.0.0",
    "pyparsing==3.3.3",
    "python-dateutil==4.0.0",
    "scipy==1.17.1",
    "sympy==1.14.0",
    "tzdata==2026.6",
)
MIN_PYTHON = (3, 11)
"""Oldest Python for which all pins have wheels."""

PREFERRED_PYTHONS = ((3, 13), (3, 12))
"""Versions that are preferred over the server's own Python, in this order."""

SIZE_MB = 450
"""Disk space of a runtime in MB."""

MARKER = "rstar-runtime.json"
_SMOKE_TEST = (
    "import math_verify, matplotlib.pyplot, mpmath, networkx, numpy, pandas, scipy.optimize, sympy; "
    "assert sympy.sqrt(4) == 2; assert matplotlib.get_cachedir() == matplotlib.get_data_path()"
)
_IMPORT_SCRIPT = Path(__file__).with_name("imports.py")
_FONT_CACHE_SCRIPT = Path(__file__).with_name("fonts.py")
_VERSION_QUERY = "import sys; print(sys.version_info[0], sys.version_info[1])"


class RuntimeBuildError(SandboxError):
    """The guest runtime could not be built, for example without network, disk space or the module venv."""


Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackageSet:
    """The packages of a runtime. `requirements` are the pins of all packages. `added` are the packages that an operator
    has added."""

    requirements: tuple[str, ...]
    added: tuple[str, ...] = ()

    def encode(self) -> dict[str, list[str]]:
        """Return a mapping for JSON."""
        return {"requirements": list(self.requirements), "added": list(self.added)}

    @staticmethod
    def decode(raw: Mapping[str, Any]) -> PackageSet:
        """Invert `encode`."""
        return PackageSet(tuple(raw["requirements"]), tuple(raw.get("added", ())))


def default_packages() -> PackageSet:
    return PackageSet(REQUIREMENTS)


def log_to_stderr(line: str) -> None:
    print(f"rstar-sandbox: {line}", file=sys.stderr, flush=True)


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of the runtime that all commands use: of all complete runtimes, the one with the newest
    Python. Return None if there is none."""
    directory = default_dir(sys.version_info[:2], environ)
    if environ.get("RSTAR_RUNTIME"):
        candidates = [directory]
    else:
        names = glob.glob(f"runtime-*-{_pins_hash()}", root_dir=directory.parent)
        candidates = sorted((directory.parent / name for name in names), key=_version_in_name, reverse=True)
    return next(filter(is_complete, candidates), None)


def default_python(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the interpreter of the runtime. Raises `ConfigError` if there is no complete runtime."""
    if (directory := find(environ)) is not None:
        return directory / "bin" / "python"
    directory = default_dir(best_python(environ)[1], environ)
    raise ConfigError(
        f"no guest runtime at {directory}; run `rstar-sandbox runtime` first, or name a Python with --python"
    )


def ensure_python(log: Log = log_to_stderr) -> Path:
    """Return the interpreter of the runtime, and build the runtime first if there is none. Raises as `build` does."""
    if (directory := find()) is not None:
        return directory / "bin" / "python"
    python, version = best_python()
    return build(python, default_dir(version), log=log)


def default_dir(version: tuple[int, int], environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the runtime for a Python version. Raises `ConfigError` if the user has no home
    directory."""
    if named := environ.get("RSTAR_RUNTIME"):
        return Path(named).absolute()
    data = environ.get("XDG_DATA_HOME") or _home(environ) / ".local" / "share"
    return Path(data) / "rstar-sandbox" / f"runtime-{version[0]}.{version[1]}-{_pins_hash()}"


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home directory for the guest runtime; name a directory with RSTAR_RUNTIME=DIR"
        ) from None


def is_complete(directory: Path, packages: PackageSet | None = None) -> bool:
    """Return whether `directory` is a finished runtime with these packages, by default the current pins. The Python
    that it was built with must still exist."""
    wanted = packages or default_packages()
    try:
        found = PackageSet.decode(json.loads((directory / MARKER).read_text(encoding="utf-8")))
        return found.requirements == wanted.requirements and (directory / "bin" / "python").exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def identity(directory: Path) -> str:
    """Return Python version and hash of the pins of a complete runtime: equal runtimes have equal identities."""
    settings = (directory / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    values = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in settings)}
    return f"{'.'.join(values['version'].split('.')[:2])}-{_pins_hash()}"


def build(
    python: Path,
    directory: Path,
    *,
    packages: PackageSet | None = None,
    force: bool = False,
    log: Log = log_to_stderr,
) -> Path:
    """Build a runtime at `directory` with `python`, unless it is complete. Returns the path of its interpreter. The
    default of `packages` is `default_packages()`.

    Raises `ConfigError` if `directory` contains something else, and `RuntimeBuildError` if the build fails.
    """
    packages = packages or default_packages()
    if is_complete(directory, packages) and not force:
        return directory / "bin" / "python"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory, log):
            if force or not is_complete(directory, packages):  # another process may have built it meanwhile
                _check_replaceable(directory)
                more = f" and {', '.join(packages.added)}" if packages.added else ""
                log(f"building the guest runtime once, with {python}{more}: {directory} (about {SIZE_MB} MB)")
                _build_and_swap(python, directory, packages)
    except OSError as error:
        reason = f"{error.strerror or error}, {error.filename or directory}"
        raise RuntimeBuildError(
            f"the guest runtime cannot be built at {directory}: {reason}; "
            "set RSTAR_RUNTIME to a directory that this user can create, for all commands"
        ) from error
    return directory / "bin" / "python"


def best_python(environ: Mapping[str, str] = os.environ) -> tuple[Path, tuple[int, int]]:
    """Return the Python to build a runtime with, and its version: a preferred version on PATH or of pyenv, else the
    Python of this process.

    From 3.12 on, objects can be immortal, so that a call copies fewer memory pages (`guest/fork_refcounts.py`): a call
    of `print` takes 20 % less time, a call of `sympy.solve` 50 % less.
    """
    pyenv = environ.get("PYENV_ROOT") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".pyenv")
    for version in PREFERRED_PYTHONS:
        name = f"python{version[0]}.{version[1]}"
        if sys.version_info[:2] == version:
            return Path(sys.executable), version
        on_path = shutil.which(name, path=environ.get("PATH"))
        of_pyenv = sorted(glob.glob(f"{glob.escape(pyenv)}/versions/*/bin/{name}"), reverse=True)
        for python in map(Path, [on_path, *of_pyenv] if on_path else of_pyenv):
            if _has_venv(python, version):
                return python, version
    return Path(sys.executable), sys.version_info[:2]


def _has_venv(python: Path, version: tuple[int, int]) -> bool:
    """Return whether `python` is CPython of this version, not free-threaded, and has venv. Return False if it cannot be
    run, as a shim of pyenv for a version that is not selected."""
    query = "import ensurepip, sys, venv; print(sys.implementation.name, *sys.version_info[:2], sys.abiflags)"
    try:
        completed = subprocess.run([python, "-I", "-c", query], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return completed.stdout.split() == ["cpython", str(version[0]), str(version[1])]


def version_of(python: Path) -> tuple[int, int]:
    """Return the version of an interpreter. Raises `ConfigError` if it is no Python, or older than `MIN_PYTHON`."""
    try:
        completed = subprocess.run(
            [python, "-I", "-c", _VERSION_QUERY], capture_output=True, text=True, check=True, timeout=30
        )
        major, minor = map(int, completed.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--python {python}: expected a Python interpreter ({error})") from None
    if (major, minor) < MIN_PYTHON:
        raise ConfigError(f"--python {python}: expected Python 3.11 or later, got {major}.{minor}")
    return major, minor


def _version_in_name(directory: Path) -> tuple[int, ...]:
    numbers = directory.name.split("-")[1].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


def _pins_hash() -> str:
    return hashlib.sha256("\n".join(REQUIREMENTS).encode()).hexdigest()[:10]


def _check_replaceable(directory: Path) -> None:
    """Raise `ConfigError` unless `directory` is absent, empty or a runtime: nothing else may be replaced."""
    if directory.is_dir() and ((directory / MARKER).exists() or not any(directory.iterdir())):
        return
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory}: exists and is no guest runtime; name another directory, or remove it")


@contextmanager
def _locked(directory: Path, log: Log) -> Iterator[None]:
    """Allow one builder per directory. The kernel releases the lock when the builder's process ends."""
    path = directory.parent / f".{directory.name}.lock"
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log(f"waiting for another process that is building {directory}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_at(lock.fileno(), path):  # the last holder has removed the file; open it again
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def remove(directory: Path) -> None:
    """Remove a runtime. If the removal is interrupted, the next build of the runtime removes what is left."""
    with _locked(directory, log_to_stderr):
        hidden = Path(tempfile.mkdtemp(prefix=f".{directory.name}.new-", dir=directory.parent))
        directory.rename(hidden / "old")
        shutil.rmtree(hidden)


def _build_and_swap(python: Path, directory: Path, packages: PackageSet) -> None:
    for stale in directory.parent.glob(f".{directory.name}.new-*"):  # the lock excludes other builders
        shutil.rmtree(stale, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{directory.name}.new-", dir=directory.parent))
    try:
        _build_venv(python, new, directory, packages)
        if directory.exists():
            directory.rename(new / "old")
            # rename(2) cannot replace a directory that has files, so there is no runtime until the next rename.
        (new / "venv").rename(directory)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _build_venv(python: Path, new: Path, directory: Path, packages: PackageSet) -> None:
    if (free := shutil.disk_usage(new).free >> 20) < SIZE_MB:
        raise RuntimeBuildError(
            f"the guest runtime needs {SIZE_MB} MB at {directory}, where {free} MB are free; set "
            "RSTAR_RUNTIME to a directory with more space, for all commands"
        )
    venv = new / "venv"
    venv_python = str(venv / "bin" / "python")
    pip = [venv_python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # Compile all but the libraries' tests; bytecode contains the final path in place of the build path.
    compile_all = ["-m", "compileall", "-q", "-j", "0", "-x", r"/tests?/", "-s", str(venv), "-p", str(directory)]
    install = ["install", "--quiet", "--only-binary=:all:", "--no-compile", *packages.requirements]
    steps = {
        "creating the environment": [str(python), "-m", "venv", str(venv)],
        "installing the libraries": [*pip, *install],
        "storing the font cache": [venv_python, "-I", "-B", str(_FONT_CACHE_SCRIPT)],
        "removing pip": [*pip, "uninstall", "--quiet", "--yes", "pip", "setuptools"],
        "compiling": [venv_python, *compile_all, str(venv / "lib")],
        "testing it": [venv_python, "-I", "-B", "-c", _SMOKE_TEST],
    }
    if packages.added:
        steps["testing the added packages"] = [venv_python, "-I", "-B", str(_IMPORT_SCRIPT), *packages.added]
    with _progress(len(steps)) as show:
        for title, command in steps.items():
            show(title)
            run_step(title, command)
    (venv / MARKER).write_text(json.dumps({**packages.encode(), "python": str(python)}) + "\n")
    _make_readable(venv)


def run_step(title: str, command: Sequence[str]) -> None:
    """Run a step of the build. Raises `RuntimeBuildError` with the end of its output if it fails."""
    done = run_in_session(command)
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip())[-2000:]
        errors = [line for line in output.splitlines() if line.startswith("ERROR")]  # leaves out warnings about retries
        details = "\n".join(errors) or output
        raise RuntimeBuildError(f"{title} failed (exit {done.returncode}){_advice(output)}\n{details}")


def run_in_session(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output. The command runs in a session of its own, so Ctrl-C does not reach it.
    Ctrl-C raises an exception in this process, and any exception here kills the command with all its children."""
    # Python's -I would hide pip's settings (index, proxy) too, so only the variables that change imports are removed.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with (
        held_signals() as release_signals,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            start_new_session=True,
        ) as process,
    ):
        try:
            release_signals()
            out, err = process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _advice(output: str) -> str:
    if "ensurepip is not available" in output or "No module named venv" in output:
        return "; this Python has no module venv: on Debian, run `apt install python3-venv`"
    if "No matching distribution" in output or "connection" in output.lower():
        return (
            "; pip found no wheel: is a package index reachable from this machine? Set PIP_INDEX_URL to another index, "
            "or give `serve` and `run` a --python that has the libraries"
        )
    return ""


def _make_readable(venv: Path) -> None:
    """Let all users read the runtime, whatever the umask is: each call has a uid of its own."""
    venv.chmod(0o755)
    for path in venv.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


@contextmanager
def _progress(steps: int) -> Iterator[Log]:
    """Show a progress bar with the current step and the time so far, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda title: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), MofNCompleteColumn(), BarColumn(16), TimeElapsedColumn()
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda title: bar.update(task, advance=1 if bar.tasks[0].description else 0, description=title)
