"""The targets as a fixture: each attack is made on each target, or on one level with `--isolation LEVEL`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.escape import expected, targets
from tests.escape.targets import Host, Target

ATTACKS_WITH_SHARED_UID = ("test_descriptors", "test_kernel", "test_messages", "test_processes", "test_secrets")
"""Modules whose attacks depend on whether calls share a uid. Without `--isolation`, only these modules are also run as
user nobody."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    level = metafunc.config.getoption("--isolation")
    names = [name for name in targets.NAMES if level in (None, name.partition(" ")[0])]
    if level is None and metafunc.module.__name__.rpartition(".")[2] not in ATTACKS_WITH_SHARED_UID:
        names = [name for name in names if " as " not in name]
    metafunc.parametrize("target", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    if not targets.SYSTEM_CALLS:
        pytest.skip("attacks are written for machines with a seccomp policy")
    with targets.make_host() as host:
        yield host


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, host: Host) -> Iterator[Target]:
    with targets.target(request.param, host) as target:
        yield target


@pytest.fixture(autouse=True)
def _expect_listed_breaches(request: pytest.FixtureRequest) -> None:
    """Mark the attacks in `expected` as tests that must fail."""
    if "target" in request.fixturenames:
        name = request.node.callspec.params["target"]
        attack = request.node.name.replace(f"{name}-", "").replace(f"[{name}]", "")
        if reason := expected.reason(name, attack):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError))
