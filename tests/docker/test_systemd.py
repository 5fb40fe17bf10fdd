"""Tests of the systemd unit in docker/. It is checked by systemd's own parser, and by rules of this project."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.gateway.calls.executor_handle import STOP_TIMEOUT_S
from sandbox.gateway.server import CLOSE_TIMEOUT_S
from sandbox.settings.server import ServeConfig

UNIT = Path(__file__).parents[2] / "docker/rstar-sandbox.service"
TEXT = UNIT.read_text(encoding="utf-8")
OPTIONS = dict(re.findall(r"^(\w+)=(.*)$", TEXT, re.MULTILINE))


def _verify(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Check a unit. The program of the server is replaced, because the checker looks for it on this machine."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (package systemd)")
    file = directory / UNIT.name
    file.write_text(text.replace("/opt/rstar-sandbox/bin/rstar-sandbox serve", "/bin/true serve"), encoding="utf-8")
    return subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)


def test_systemd_accepts_every_line_of_the_unit(tmp_path: Path) -> None:
    done = _verify(tmp_path, TEXT)
    assert UNIT.name not in done.stderr and done.returncode == 0, done.stderr


def test_a_misspelt_option_is_found(tmp_path: Path) -> None:
    assert "Unknown key" in _verify(tmp_path, TEXT.replace("Delegate=", "Delegates=")).stderr


def test_the_server_may_create_cgroups_and_has_time_to_drain() -> None:
    assert OPTIONS["Delegate"] == "yes"
    assert float(OPTIONS["TimeoutStopSec"]) >= ServeConfig().drain_s + CLOSE_TIMEOUT_S + STOP_TIMEOUT_S


def test_a_call_that_is_killed_for_its_memory_does_not_stop_the_server() -> None:
    """The default of systemd is `stop`, and the kernel kills calls in cgroups below the unit."""
    assert OPTIONS["OOMPolicy"] == "continue"


@pytest.mark.parametrize(
    "option",
    [
        "PrivateUsers", "ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelTunables",
        "ProtectProc", "RestrictNamespaces", "SystemCallFilter",
    ],
)  # fmt: skip
def test_no_option_keeps_the_server_from_building_jails(option: str) -> None:
    assert option not in OPTIONS
