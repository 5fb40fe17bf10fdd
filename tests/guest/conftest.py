"""Fixtures: an executor with real zygotes in a real jail, one per test module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.calling import Caller, executor


@pytest.fixture(scope="module")
def guest() -> Iterator[Caller]:
    with executor() as caller:
        yield caller


@pytest.fixture(scope="module")
def guest_with_numpy(guest_python: Path) -> Iterator[Caller]:
    """An executor with the Python of the guest runtime, whose zygotes have imported numpy."""
    with executor(guest_python, profiles=("numeric",)) as caller:
        yield caller
