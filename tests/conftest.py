"""Fixtures for all tests. They find the guest runtime, and remove settings of the server from the environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bench import pretrained
from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import choose_level
from sandbox.runtime.build import default_python
from sandbox.settings.server import ENV_PREFIX

# torch reads this when it is loaded. Two threads that wait for each other are a hundred times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hypothesis uses the same examples on every machine and in every run, and has no deadline.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


AS_ROOT_TOO = re.compile(
    r"chaos/test_(bad_machines|exhaustion)|commands/test_(doctor|machine_checks)|docker/test_profiles|escape/|jail/|"
    r"settings/test_mounts|test_token|bench/test_cluster\.|"
    r"guest/test_desc|executor/time/test_(cpu_prio|process_tree)|"
    r"executor/test_(cgroups|connection|landlock|long_calls|memory|shared_uid|slot|zygote_pool)"
)
"""The tests with the marker `root`. Root has uids for the calls, cgroups, CPU priorities and mounts that other users do
not have, so that these tests show something else when root runs them."""
NEEDS_ROOT = re.compile(r"needs (root|CAP_)")


def pytest_itemcollected(item: pytest.Item) -> None:
    if AS_ROOT_TOO.match(item.path.relative_to(Path(__file__).parent).as_posix()):
        item.add_marker(pytest.mark.root)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that only root could run and that `.ci/run` does not run as root."""
    report = yield
    if report.skipped and NEEDS_ROOT.search(str(report.longrepr)) and "root" not in item.keywords:
        report.outcome, report.longrepr = "failed", f"add this test to AS_ROOT_TOO: {report.longrepr}"
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--isolation", metavar="LEVEL", help="run tests/escape at this level of isolation only")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by reason, so that missing capabilities of the machine are visible."""
    skipped = terminalreporter.stats.get("skipped", [])
    texts = (str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    reasons = Counter(re.sub(r"/rstar-sandbox-[\w-]+", "/CGROUP", text) for text in texts)
    if reasons:
        terminalreporter.section("skipped tests by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files with slow tests first. `make test` gives the next file to a process that is free. With a long file
    at the end, the other processes would be idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _without_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def needs_isolation() -> None:
    """Skip the test on a machine that cannot isolate calls."""
    try:
        choose_level("auto")
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def guest_python() -> Path:
    """The interpreter of the guest runtime. Tests that need it are skipped if it is missing."""
    try:
        return default_python()
    except ConfigError as error:
        pytest.skip(f"needs the guest runtime: {error}")


@pytest.fixture(scope="session")
def pretrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2-135M-Instruct. Tests that need it are skipped without the packages that have it."""
    try:
        gguf = pretrained.packaged_gguf()
    except pretrained.PackageMissing as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("pretrained")
    pretrained.convert(gguf, folder)
    return folder
