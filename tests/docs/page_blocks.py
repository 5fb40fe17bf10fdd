"""Reads the code blocks of a page: files that the reader writes, and commands with what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A block with a title: the reader writes it to a file of this name."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a console block that begins with `$ `, and the lines below it. `...` in them stands for any text."""

    line: str
    expected_output: str

    @property
    def server_arguments(self) -> list[str] | None:
        """The arguments of `rstar-sandbox serve ... &`, or None for another command."""
        match = re.fullmatch(r"rstar-sandbox serve(.*) &", self.line)
        return shlex.split(match[1]) if match else None

    @property
    def shows_an_error(self) -> bool:
        """Whether the page shows an error message of one of the two commands, whose exit code is then not 0."""
        return re.search(r"^rstar-(sandbox|train): ", self.expected_output, re.MULTILINE) is not None

    def check(self, folder: Path, address: Mapping[str, str], timeout_s: float) -> None:
        """Run the command in a folder, and assert that it prints what the page shows. `address` maps an address on the
        page to the one that the test uses instead."""
        line = self.line
        for shown, used in address.items():
            line = line.replace(shown, used)
        done = subprocess.run(
            ["bash", "-c", f"exec 2>&1; {line}"],
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0 or self.shows_an_error, f"$ {line}\n{done.stdout}"
        assert self.prints(done.stdout), f"$ {line} printed\n{done.stdout}\ninstead of\n{self.expected_output}"

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start a command that ends with ` &` in a folder."""
        return subprocess.Popen(["bash", "-c", f"exec {self.line.removesuffix(' &')}"], cwd=folder, env=_environment())

    def prints(self, output: str) -> bool:
        """Whether the command's output is as the page shows it."""
        pattern = ".*".join(re.escape(part) for part in self.expected_output.rstrip("\n").split("..."))
        return re.fullmatch(pattern, output.rstrip("\n"), re.DOTALL) is not None


def _environment() -> dict[str, str]:
    """Return the environment of a reader in whose shell the two commands are found."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def read_blocks(page: Path) -> list[WrittenFile | Command]:
    """Return the files and commands in their order. Raises `ValueError` for a block that no test could run."""
    blocks: list[WrittenFile | Command] = []
    for language, title, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if title:
            blocks.append(WrittenFile(title, text))
        elif language == "console":
            for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, output = command.partition("\n")
                blocks.append(Command(line, output))
        else:
            raise ValueError(f"{page.name}: expected a title or the language console, got ```{language}\n{text}")
    return blocks
