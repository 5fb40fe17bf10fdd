"""Runs each code block of the tutorials and how-to pages, in order, and compares what it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sandbox.local import local_service
from tests.docs.page_blocks import Command, WrittenFile, read_blocks
from trainer.rollout.loop_thread import LoopThread

CONTINUES = re.compile(r"It continues\s+\[[^]]+\]\(([^)]+)\)")
DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [*TUTORIALS, *sorted((DOCS / "howto").glob("*.md"))]
CONTINUED = {page: page.with_name(match[1]) for page in PAGES if (match := CONTINUES.search(page.read_text()))}
"""The page that a page continues."""
ADDRESS = "127.0.0.1:8642"


@pytest.fixture(scope="module")
def server(guest_python: object, needs_isolation: None) -> Iterator[str]:
    """The URL of the server that all pages share which start one without arguments."""
    with LoopThread() as loop_thread:
        yield loop_thread.enter(local_service(["--zygote-pools", "1"]))


@pytest.fixture
def folder() -> Iterator[Path]:
    """The reader's working directory. Calls run as other users, who could not enter the directories of `tmp_path`."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in CONTINUED.values()], ids=lambda path: path.stem)
def test_every_block_of_a_page_runs_and_prints_what_is_shown(page: Path, folder: Path, server: str) -> None:
    (folder / "configs").symlink_to(DOCS.parent / "configs")
    written: dict[str, str] = {}
    with LoopThread() as loop_thread:
        for block in [block for part in (CONTINUED.get(page), page) if part for block in read_blocks(part)]:
            address = server.removeprefix("http://")
            if isinstance(block, WrittenFile):
                written[block.name] = block.text
                (folder / block.name).write_text(block.text, encoding="utf-8")
            elif (arguments := block.server_arguments) is not None:
                if arguments:
                    in_page = [str(folder / word) if (folder / word).exists() else word for word in arguments]
                    server = loop_thread.enter(local_service(in_page))
            else:
                for name, text in written.items():
                    (folder / name).write_text(text.replace(ADDRESS, address), encoding="utf-8")
                block.check(folder, {"localhost:8642": address}, timeout_s=300)


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
def test_output_is_compared_with_what_the_page_shows(expected_output: str, output: str, is_equal: bool) -> None:
    assert Command("command", expected_output).prints(output) is is_equal
