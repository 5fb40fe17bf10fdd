"""The ways in which a jail comes to be, as fixtures: every claim about jails is tested in each."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import Interpreter, JailSpec, Level, choose_level, host_uids
from sandbox.runtime import default_python
from tests.jail import jails

find = cache(Interpreter.find)


@dataclass(frozen=True)
class Way:
    """A spec, and who starts it."""

    name: str
    spec: JailSpec
    ordinary: bool

    def ask(self, code: str) -> Any:
        return jails.ask(self.spec, code, ordinary=self.ordinary)

    def started(self, code: str) -> Any:
        return jails.started(self.spec, code, ordinary=self.ordinary)


@pytest.fixture(scope="session")
def machine() -> None:
    try:
        choose_level("auto")
    except IsolationError as why:
        pytest.skip(str(why))


@pytest.fixture(scope="session")
def python() -> Interpreter:
    """The guest runtime, or this test's own Python where that is not built."""
    try:
        return find(str(default_python()))
    except ConfigError:
        return find(sys.executable)


@pytest.fixture
def guest_dir() -> Iterator[Path]:
    """A guest that ends at once, which all users can read."""
    with jails.open_folder() as folder:
        guest = folder / "guest"
        guest.mkdir()
        (guest / "zygote.py").write_text("raise SystemExit(3)")
        shutil.copy(jails.REPOSITORY / "sandbox/guest/init.py", guest)
        yield guest


WAYS = ("root with a range of uids", "root with one uid", "ordinary user")


@pytest.fixture(scope="session")
def nsjail(machine: None) -> None:
    try:
        choose_level("nsjail")
    except IsolationError as why:
        pytest.skip(str(why))


@pytest.fixture(params=[*WAYS, *(f"nsjail, {name}" for name in WAYS)])
def way(request: pytest.FixtureRequest, machine: None, python: Interpreter, guest_dir: Path) -> Way:
    name: str = request.param
    level = Level.NAMESPACES
    if name.startswith("nsjail"):
        request.getfixturevalue("nsjail")
        level = Level.NSJAIL
    if name.endswith("ordinary user"):
        system = jails.system_python()
        if os.geteuid() != 0:
            return Way(name, jails.spec_for(python, (None, 0), guest_dir, level), ordinary=False)
        if system is None:
            pytest.skip("ordinary user: needs a Python 3.11 in /usr/bin or /usr/local/bin")
        return Way(name, jails.spec_for(find(system), (None, 0), guest_dir, level), ordinary=True)
    if os.geteuid() != 0:
        pytest.skip(f"{name}: needs root")
    uids = host_uids(7, 10) if "range" in name else (None, 0)
    if "range" in name and uids[0] is None:
        pytest.skip("range of uids: this container has too few")
    return Way(name, jails.spec_for(python, uids, guest_dir, level), ordinary=False)
