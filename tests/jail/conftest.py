"""Fixtures of jails at the levels nsjail and namespaces. There is one for each kind of uids and each kind of user who
starts the jail."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import Interpreter, JailSpec, Level, choose_level, host_uids
from sandbox.runtime.build import default_python
from tests.jail import jails

find_interpreter = cache(Interpreter.find)


GUEST_EXIT_STATUS = 3
"""Exit status of the guest that `guest_dir` contains."""


@dataclass(frozen=True)
class JailSetup:
    name: str
    spec: JailSpec
    as_nobody: bool
    """Whether user nobody starts the jail, instead of the user who runs the tests."""

    def run(self, code: str) -> Any:
        """Run `code` in a jail and return its first message."""
        return jails.run(self.spec, code, as_nobody=self.as_nobody)

    def running(self, code: str) -> AbstractContextManager[jails.RunningJail]:
        return jails.running(self.spec, code, as_nobody=self.as_nobody)


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skip if this machine supports no isolation level."""
    try:
        choose_level("auto")
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def python() -> Interpreter:
    """The Python of the guest runtime, or the Python of the tests if no runtime is built."""
    try:
        return find_interpreter(str(default_python()))
    except ConfigError:
        return find_interpreter(sys.executable)


@pytest.fixture
def guest_dir() -> Iterator[Path]:
    """A directory that all users can read, with a guest that exits at once."""
    with jails.dir_for_all_users() as directory:
        guest = directory / "guest"
        guest.mkdir()
        (guest / "zygote.py").write_text(f"raise SystemExit({GUEST_EXIT_STATUS})")
        shutil.copy(jails.REPOSITORY / "sandbox/guest/init.py", guest)
        yield guest


SETUPS = ("root with a range of uids", "root with one uid", "ordinary user")


@pytest.fixture(scope="session")
def nsjail_available(isolation: None) -> None:
    try:
        choose_level("nsjail")
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[*SETUPS, *(f"nsjail, {name}" for name in SETUPS)])
def jail_setup(request: pytest.FixtureRequest, isolation: None, python: Interpreter, guest_dir: Path) -> JailSetup:
    name: str = request.param
    level = Level.NAMESPACES
    if name.startswith("nsjail"):
        request.getfixturevalue("nsjail_available")
        level = Level.NSJAIL
    if name.endswith("ordinary user"):
        system = jails.system_python()
        if os.geteuid() != 0:
            return JailSetup(name, jails.make_spec(python, (None, 0), guest_dir, level), as_nobody=False)
        if system is None:
            pytest.skip("ordinary user: needs a Python 3.11 in /usr/bin or /usr/local/bin")
        return JailSetup(name, jails.make_spec(find_interpreter(system), (None, 0), guest_dir, level), as_nobody=True)
    if os.geteuid() != 0:
        pytest.skip(f"{name}: needs root")
    uids = host_uids(jail_number=7, slots=10) if "range" in name else (None, 0)  # any jail number and enough slots
    if "range" in name and uids[0] is None:
        pytest.skip("range of uids: this container has too few")
    return JailSetup(name, jails.make_spec(python, uids, guest_dir, level), as_nobody=False)
