"""Runs each code block of the tutorials, the how-to pages and some others, in order, and compares what it prints."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sandbox import jail
from sandbox.local import local_service
from tests.docs.page_blocks import Command, WrittenFile, read_blocks
from trainer.rollout.loop_thread import LoopThread

CONTINUES = re.compile(r"It continues\s+\[[^]]+\]\(([^)]+)\)")
DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [*TUTORIALS, *sorted((DOCS / "howto").glob("*.md")), DOCS / "scheduler.md", DOCS / "sessions.md"]
CONTINUED = {page: page.with_name(match[1]) for page in PAGES if (match := CONTINUES.search(page.read_text()))}
"""The page that a page continues."""
DEFAULT_PORT = "8642"
COMMAND_S = 300


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs the blocks of a page as a reader would. Servers and other commands with `&` are jobs, counted from 1.

    - `ports`: the port of the server here, for each port that the page shows. Before a page starts a server, the
      default port is that of the server that all pages share.
    - `jobs` ends all jobs.
    """

    folder: Path
    ports: dict[str, str]
    jobs: ExitStack
    files: list[WrittenFile] = field(default_factory=list)
    started: list[ExitStack | subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, block: WrittenFile | Command) -> None:
        """Run a block, and assert that it prints what the page shows."""
        if isinstance(block, WrittenFile):
            self.files.append(block)
            self._write_files()
        elif (arguments := block.server_arguments) is not None:
            self._start_server(arguments)
        elif block.line.endswith(" &"):
            process = self.jobs.enter_context(block.start(self.folder))
            self.jobs.callback(process.kill)
            self.started.append(process)
        elif match := re.fullmatch(r"(?:kill|wait) %(\d)", block.line):
            self._end(self.started[int(match[1]) - 1])
        else:
            addresses = {f"localhost:{shown}": f"127.0.0.1:{used}" for shown, used in self.ports.items()}
            block.check(self.folder, addresses, COMMAND_S)

    def _start_server(self, arguments: list[str]) -> None:
        """Start a server on a free port. Without arguments, the shared server is used."""
        job = self.jobs.enter_context(ExitStack())
        self.started.append(job)
        if arguments:
            in_folder = [str(self.folder / word) if (self.folder / word).exists() else word for word in arguments]
            port = DEFAULT_PORT
            if in_folder[0] == "--port":
                port, in_folder = in_folder[1], in_folder[2:]
            self.ports[port] = _port(job.enter_context(LoopThread()).enter(local_service(in_folder)))
            self._write_files()

    def _write_files(self) -> None:
        """Write all files of the page, with the ports of the servers that run."""
        for file in self.files:
            text = file.text
            for shown, used in self.ports.items():
                text = text.replace(f"127.0.0.1:{shown}", f"127.0.0.1:{used}")
            (self.folder / file.name).write_text(text, encoding="utf-8")

    def _end(self, job: ExitStack | subprocess.Popen[bytes]) -> None:
        """Stop a server, or wait for another command."""
        if isinstance(job, ExitStack):
            job.close()
        else:
            assert job.wait(COMMAND_S) == 0, f"{job.args} ended with {job.returncode}"


def _port(url: str) -> str:
    return url.rpartition(":")[2]


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
    if page.stem == "sessions" and jail.choose_level("auto").level not in (jail.Level.NAMESPACES, jail.Level.NSJAIL):
        pytest.skip("sessions need level namespaces or nsjail")
    (folder / "configs").symlink_to(DOCS.parent / "configs")
    with ExitStack() as jobs:
        shell = Shell(folder, {DEFAULT_PORT: _port(server)}, jobs)
        for block in [block for part in (CONTINUED.get(page), page) if part for block in read_blocks(part)]:
            shell.run(block)


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
