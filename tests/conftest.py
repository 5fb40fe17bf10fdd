"""What tests share: the guest's Python, and no settings from the machine they run on."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sandbox.config import ENV_PREFIX
from sandbox.errors import ConfigError
from sandbox.runtime import default_python

# The examples are the same on every machine and in every run; a slow machine is no failure.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--isolation", metavar="LEVEL", help="run tests/escape at this level of isolation only")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by reason, so that no capability is missing without a word."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} {reason}")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def guest_python() -> Path:
    """The interpreter of the guest runtime; tests that ask for it skip where there is none."""
    try:
        return default_python()
    except ConfigError as why:
        pytest.skip(f"needs the guest runtime: {why}")
