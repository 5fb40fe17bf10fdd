"""Guest runtimes with an operator's packages in addition to the pinned ones: `rstar-sandbox runtime --with PACKAGE`.

- pip resolves the packages together with the pins of the default runtime, whose versions do not change.
- The directory lies beside the default runtime. Its name contains a hash of the resolved packages.
- The runtime is complete or absent, as the default one is (`runtime.build`).
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandbox.errors import ConfigError
from sandbox.runtime import build as runtime
from sandbox.runtime.build import PackageSet, RuntimeBuildError, log_to_stderr

_REQUIREMENT = re.compile(
    r"([A-Za-z0-9]|[A-Za-z0-9][\w.-]*[A-Za-z0-9])\s*(\[[\w\s,.-]*\])?\s*([<>=!~][^/@#]*)?", re.ASCII
)
"""A name of a package, its extras and versions. Paths, URLs and options of pip do not match."""


def read_requirements(file: Path) -> list[str]:
    """Return the requirements of a file: one per line, with comments after #. Raises `ConfigError`, with the line of a
    malformed one."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requirements {file}: cannot be read ({error})") from None
    requirements = []
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            _check_requirement(text, f"--requirements {file}, line {number}:")
            requirements.append(text)
    return requirements


def build_with(python: Path, version: tuple[int, int], added: Sequence[str]) -> Path:
    """Return the interpreter of a runtime that has the packages `added`, and build the runtime if there is none.

    Raises `ConfigError` if `added` is malformed, and `RuntimeBuildError` if it cannot be resolved or built.
    """
    for requirement in added:
        _check_requirement(requirement, "--with")
    packages = PackageSet(_resolve(python, added), tuple(sorted(set(added))))
    digest = hashlib.sha256("\n".join(packages.requirements).encode()).hexdigest()[:10]
    default = runtime.default_dir(version)
    directory = default.with_name(f"{default.name}-with-{digest}")
    return runtime.build(python, directory, packages=packages)


def installed_runtimes() -> Iterator[tuple[Path, str]]:
    """Yield the interpreter of each runtime beside the default one, and a text about its packages."""
    for directory in _directories():
        python = directory / "bin" / "python"
        try:
            packages = PackageSet.decode(json.loads((directory / runtime.MARKER).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if python.exists():
            text = f"with {', '.join(packages.added)}" if packages.added else "default packages"
            is_current = set(runtime.REQUIREMENTS) <= set(packages.requirements)
            yield python, text if is_current else f"{text}; pins of another version of rstar-sandbox"


def remove(name: str) -> Path:
    """Remove a runtime and return its directory. `name` is the directory's name, its path, or the interpreter's path.
    Raises `ConfigError` if there is none, and `RuntimeBuildError` if it cannot be removed."""
    directories = _directories()
    for directory in directories:
        if name in (directory.name, str(directory), str(directory / "bin" / "python")):
            try:
                runtime.remove(directory)
            except OSError as error:
                raise RuntimeBuildError(f"{directory} cannot be removed: {error}") from error
            return directory
    names = ", ".join(directory.name for directory in directories)
    expected = f"one of {names}" if names else "the name of a runtime, but there is none"
    raise ConfigError(f"runtime --remove {name}: expected {expected}")


def _directories() -> list[Path]:
    """Return the directories of all runtimes beside the default one, also of runtimes that no longer work."""
    default = runtime.default_dir((0, 0))  # only its parent is used, which is the same for all versions
    return sorted(marker.parent for marker in default.parent.glob(f"*/{runtime.MARKER}"))


def _check_requirement(text: str, where: str) -> None:
    if not _REQUIREMENT.fullmatch(text):
        raise ConfigError(f"{where} {text!r:.80}: expected a package of an index, such as scikit-learn>=1.7")


def _resolve(python: Path, added: Sequence[str]) -> tuple[str, ...]:
    """Return the pins of the default runtime and of all packages that `added` needs, sorted."""
    log_to_stderr(f"resolving {', '.join(added)} together with the packages of the default runtime")
    with tempfile.TemporaryDirectory(prefix="rstar-resolve-") as directory:
        runtime.run_step("creating the environment", [str(python), "-m", "venv", f"{directory}/venv"])
        report = f"{directory}/report.json"
        command = [f"{directory}/venv/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        command += ["--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--report", report]
        done = runtime.run_in_session([*command, *runtime.REQUIREMENTS, *added])
        if done.returncode != 0:
            raise RuntimeBuildError(f"{', '.join(added)}: {_reason(done.stderr or done.stdout)}")
        installs = json.loads(Path(report).read_text(encoding="utf-8"))["install"]
    pinned = {_normal_name(requirement.partition("==")[0]) for requirement in runtime.REQUIREMENTS}
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in installs}
    more = (f"{name}=={version}" for name, version in found.items() if _normal_name(name) not in pinned)
    return tuple(sorted([*runtime.REQUIREMENTS, *more]))


def _reason(output: str) -> str:
    """Return the reason of pip's failure in one line."""
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    first = errors[0] if errors else output.strip()[-300:].replace("\n", " ")
    if any("conflict" in error.lower() for error in errors):
        return f"conflicts with the packages of the default runtime, whose versions are fixed: {first}"
    if any("No matching distribution" in error for error in errors):
        return f"pip found no wheel; is the name right, and is a package index reachable? {first}"
    return f"pip cannot resolve it: {first}"


def _normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
