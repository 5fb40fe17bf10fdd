"""Tests of the commands in the documents about examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/examples.md", "docs/evaluation.md", "docs/environments.md")
COMMANDS = {
    command
    for name in DOCUMENTS
    for command in re.findall(r"python -m (examples\.\w+(?: [a-z]+\b)?)", (ROOT / name).read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_documented_command_exists(command: str) -> None:
    module, *subcommand = command.split()
    words = subcommand if module == "examples.gaia" else []
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
