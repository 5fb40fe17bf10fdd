"""Runs each code block of the tutorials, in order, against a real server, and compares what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.local import local_service
from tests.docs.tutorial_blocks import Command, WrittenFile, read_blocks
from trainer.rollout.loop_thread import LoopThread

TUTORIALS = sorted((Path(__file__).parents[2] / "docs/tutorials").glob("*.md"))
URL = "http://127.0.0.1:8642"


@pytest.fixture(scope="module")
def server(guest_python: object, needs_isolation: None) -> Iterator[str]:
    with LoopThread() as loop_thread:
        yield loop_thread.enter(local_service(["--zygote-pools", "1"]))


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_every_block_of_a_tutorial_runs_and_prints_what_is_shown(tutorial: Path, tmp_path: Path, server: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block in read_blocks(tutorial):
        if isinstance(block, WrittenFile):
            (tmp_path / block.name).write_text(block.text.replace(URL, server), encoding="utf-8")
        elif block.line != "rstar-sandbox serve &":  # the fixture has started the server
            line = block.line.replace(URL, server).replace("localhost:8642", server.removeprefix("http://"))
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, f"$ {line}\n{done.stderr}"
            assert block.prints(done.stdout), f"$ {line} printed\n{done.stdout}\ninstead of\n{block.expected_output}"


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_at_most_120_lines(tutorial: Path) -> None:
    assert len(tutorial.read_text(encoding="utf-8").splitlines()) <= 120


def test_a_block_that_no_reader_could_run_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n")
    with pytest.raises(ValueError, match=r"page\.md: expected a title or the language console, got ```python"):
        read_blocks(page)


@pytest.mark.parametrize(
    ("expected_output", "output", "is_equal"),
    [("a\nb\n", "a\nb\n", True), ("a\n", "b\n", False), ("a ... c\n", "a 1 2 c\n", True), ("", "text\n", False)],
)
def test_output_is_compared_with_what_the_tutorial_shows(expected_output: str, output: str, is_equal: bool) -> None:
    assert Command("command", expected_output).prints(output) is is_equal
