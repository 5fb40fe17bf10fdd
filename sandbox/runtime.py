"""The guest's Python: a virtual environment of its own with the pinned libraries that math code uses.

Invariants:
- A runtime folder that bears its final name is whole: it is built in a sibling, tried, and then renamed into place.
- Its name carries a hash of the pins, so changed pins make a new one beside the old.
- Only `bin/python` in it is used. The other scripts hold the path they were built under.
- pip and setuptools are gone from it; what it has, the code inside the jail can import.
- What every command takes is `find`; only where there is none, `best_python` says with which Python to make it.

`$RSTAR_RUNTIME` names the folder itself; otherwise it lies under `$XDG_DATA_HOME/rstar-sandbox`.
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
from pathlib import Path

from sandbox.errors import ConfigError, SandboxError

REQUIREMENTS = (
    "antlr4-python3-runtime==4.13.2",
    "latex2sympy2_extended==1.11.0",
    "math-verify==0.9.0",
    "mpmath==1.3.0",
    "networkx==3.6.1",
    "numpy==2.4.6",
    "pandas==3.1.1",
    "python-dateutil==4.0.0",
    "scipy==1.17.1",
    "sympy==1.14.0",
    "tzdata==2026.6",
)
MIN_PYTHON = (3, 11)
"""The oldest that the pins have wheels for."""

PREFERRED_PYTHONS = ((3, 13), (3, 12))
"""Tried in this order before the server's own."""

SIZE_MB = 350
"""What it takes on the disk."""

_MARKER = "rstar-runtime.json"
_SMOKE_TEST = "import math_verify, mpmath, networkx, numpy, pandas, scipy.optimize, sympy; assert sympy.sqrt(4) == 2"
_VERSION_QUERY = "import sys; print(sys.version_info[0], sys.version_info[1])"


class RuntimeBuildError(SandboxError):
    """A runtime could not be made: no network, no room on the disk, a Python without venv."""


Log = Callable[[str], None]


def log_to_stderr(line: str) -> None:
    print(f"rstar-sandbox: {line}", file=sys.stderr, flush=True)


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the runtime that every command takes: the one of the newest Python, if any has been made."""
    own = default_dir(sys.version_info[:2], environ)
    if "RSTAR_RUNTIME" in environ:
        made = [own]
    else:
        names = glob.glob(f"runtime-*-{_pins_hash()}", root_dir=own.parent)
        made = sorted((own.parent / name for name in names), key=_version_in_name, reverse=True)
    return next(filter(is_complete, made), None)


def default_python(environ: Mapping[str, str] = os.environ) -> Path:
    """The interpreter of the runtime that `find` finds. Raises `ConfigError` for none, naming what would be made."""
    if (folder := find(environ)) is not None:
        return folder / "bin" / "python"
    folder = default_dir(best_python(environ)[1], environ)
    raise ConfigError(
        f"no Python for the calls at {folder}; run `rstar-sandbox runtime` first, or name one with --python"
    )


def ensure_python(log: Log = log_to_stderr, environ: Mapping[str, str] = os.environ) -> Path:
    """`default_python`, made now where there is none. Raises as `make` does."""
    if (folder := find(environ)) is not None:
        return folder / "bin" / "python"
    python, version = best_python(environ)
    return build(python, default_dir(version, environ), log=log)


def default_dir(version: tuple[int, int], environ: Mapping[str, str] = os.environ) -> Path:
    """Where the runtime for a Python of `version` belongs. Raises `ConfigError` where the environment does not say."""
    if "RSTAR_RUNTIME" in environ:
        return Path(environ["RSTAR_RUNTIME"]).absolute()
    data = environ.get("XDG_DATA_HOME") or _home(environ) / ".local" / "share"
    return Path(data) / "rstar-sandbox" / f"runtime-{version[0]}.{version[1]}-{_pins_hash()}"


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home directory for the Python that runs the calls; name a directory for it "
            "with RSTAR_RUNTIME=DIR"
        ) from None


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a finished runtime with today's pins whose base interpreter is still there."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return bool(marker.get("requirements") == list(REQUIREMENTS)) and (folder / "bin" / "python").exists()
    except (OSError, ValueError):
        return False


def build(python: Path, folder: Path, *, force: bool = False, log: Log = log_to_stderr) -> Path:
    """A whole runtime at `folder`, made with `python` unless it is there; its interpreter's path.

    Raises `ConfigError` where `folder` is something else, `RuntimeBuildError` where building fails.
    """
    if is_complete(folder) and not force:
        return folder / "bin" / "python"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, log):
            if force or not is_complete(folder):  # another may have made it while we waited
                _check_replaceable(folder)
                log(f"making the Python that runs the calls, once, with {python}: {folder} (about {SIZE_MB} MB)")
                _build_and_swap(python, folder)
    except OSError as why:
        raise RuntimeBuildError(
            f"the Python for the calls cannot be made at {folder}: {why.strerror or why}, {why.filename or folder}; "
            "set RSTAR_RUNTIME to a directory that this user can make, for this command and all others"
        ) from why
    return folder / "bin" / "python"


def best_python(environ: Mapping[str, str] = os.environ) -> tuple[Path, tuple[int, int]]:
    """The Python to make a runtime with: the newest tried one on PATH or among pyenv's, else the one that runs this.

    From 3.12 on an interpreter can leave objects uncounted (guest/fork_refcounts.py), so a call copies fewer pages:
    `print` gains a fifth, `sympy.solve` a half.
    """
    pyenv = environ.get("PYENV_ROOT") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".pyenv")
    for version in PREFERRED_PYTHONS:
        name = f"python{version[0]}.{version[1]}"
        if sys.version_info[:2] == version:
            return Path(sys.executable), version
        on_path = shutil.which(name, path=environ.get("PATH"))
        of_pyenv = sorted(glob.glob(f"{glob.escape(pyenv)}/versions/*/bin/{name}"), reverse=True)
        for found in map(Path, [on_path, *of_pyenv] if on_path else of_pyenv):
            if _can_make_environments(found, version):
                return found, version
    return Path(sys.executable), sys.version_info[:2]


def _can_make_environments(python: Path, version: tuple[int, int]) -> bool:
    """Whether it is what its name says, CPython with its lock, and has venv; a pyenv shim may be none of it."""
    report = "import ensurepip, sys, venv; print(sys.implementation.name, *sys.version_info[:2], sys.abiflags)"
    try:
        done = subprocess.run([python, "-I", "-c", report], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.stdout.split() == ["cpython", str(version[0]), str(version[1])]


def version_of(python: Path) -> tuple[int, int]:
    """The version of an interpreter. Raises `ConfigError` if it is none, or too old for the pins."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _VERSION_QUERY], capture_output=True, text=True, check=True, timeout=30
        )
        major, minor = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError) as why:
        raise ConfigError(f"--python {python}: expected a Python interpreter ({why})") from None
    if (major, minor) < MIN_PYTHON:
        raise ConfigError(f"--python {python}: expected Python 3.11 or later, got {major}.{minor}")
    return major, minor


def _version_in_name(folder: Path) -> tuple[int, ...]:
    numbers = folder.name.split("-")[1].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


def _pins_hash() -> str:
    return hashlib.sha256("\n".join(REQUIREMENTS).encode()).hexdigest()[:10]


def _check_replaceable(folder: Path) -> None:
    """We replace what we made or an empty folder, and nothing else."""
    if folder.is_dir() and ((folder / _MARKER).exists() or not any(folder.iterdir())):
        return
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder}: is there and is no runtime of ours; name another folder, or remove it")


@contextmanager
def _locked(folder: Path, log: Log) -> Iterator[None]:
    """Only one builder per folder; the lock ends with its process, and its file with the lock."""
    path = folder.parent / f".{folder.name}.lock"
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log(f"waiting for another process that is making {folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_at(lock.fileno(), path):  # its last holder has removed it
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


def _build_and_swap(python: Path, folder: Path) -> None:
    for left_behind in folder.parent.glob(f".{folder.name}.new-*"):  # ours alone to remove: we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    try:
        _build(python, new, folder)
        if folder.exists():
            folder.rename(new / "old")
            # A rename cannot put a folder in the place of a full one; for this moment there is none, never a half.
        (new / "venv").rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _build(python: Path, new: Path, folder: Path) -> None:
    if (free := shutil.disk_usage(new).free >> 20) < SIZE_MB:
        raise RuntimeBuildError(
            f"the Python for the calls needs {SIZE_MB} MB at {folder}, where {free} MB are free; set "
            "RSTAR_RUNTIME to a directory with more, for this command and all others"
        )
    venv = new / "venv"
    inside = str(venv / "bin" / "python")
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    compile_all = ["-m", "compileall", "-q", "-j", "0", "-x", r"/tests?/", "-s", str(venv), "-p", str(folder)]
    steps = {
        "making the environment": [str(python), "-m", "venv", str(venv)],
        "installing the libraries": [*pip, "install", "--quiet", "--only-binary=:all:", "--no-compile", *REQUIREMENTS],
        "removing pip": [*pip, "uninstall", "--quiet", "--yes", "pip", "setuptools"],
        "compiling": [inside, *compile_all, str(venv / "lib")],
        "trying it": [inside, "-I", "-B", "-c", _SMOKE_TEST],
    }
    with _progress(len(steps)) as show:
        for what, command in steps.items():
            show(what)
            _step(what, command)
    (venv / _MARKER).write_text(json.dumps({"requirements": REQUIREMENTS, "python": str(python)}) + "\n")
    _make_readable(venv)


def _step(what: str, command: Sequence[str]) -> None:
    # -I would hide pip's own settings (indexes, proxies), so only what changes a Python's imports is dropped.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # In a session of its own it gets no Ctrl-C, so that we can end it with all that it has started.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        said = (err.strip() or out.strip())[-2000:]
        errors = [line for line in said.splitlines() if line.startswith("ERROR")]  # pip warns of each retry before
        raise RuntimeBuildError(
            f"{what} failed (exit {process.returncode}){_advice(said)}\n" + ("\n".join(errors) or said)
        )


def _advice(said: str) -> str:
    if "ensurepip is not available" in said or "No module named venv" in said:
        return "; this Python has no venv: on Debian, `apt install python3-venv`"
    if "No matching distribution" in said or "connection" in said.lower():
        return (
            "; pip found no wheel: is a package index reachable from here? PIP_INDEX_URL names another; --python of "
            "`serve` and `run` a Python that has the libraries"
        )
    return ""


def _make_readable(venv: Path) -> None:
    """Calls run under a uid of their own, whatever umask made these files."""
    venv.chmod(0o755)
    for path in venv.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


@contextmanager
def _progress(steps: int) -> Iterator[Log]:
    """On a terminal, a bar with the step that is under way and the time that all have taken; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), MofNCompleteColumn(), BarColumn(16), TimeElapsedColumn()
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda what: bar.update(task, advance=1 if bar.tasks[0].description else 0, description=what)
