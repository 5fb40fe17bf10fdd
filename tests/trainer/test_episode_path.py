"""The drawing of an episode's path in docs/trainer-architecture.md."""

from __future__ import annotations

import re
import tomllib
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILES = 15
MAX_FLOORS = 5


def drawn_path() -> list[tuple[int, str]]:
    """Return the depth and the file of each line of the drawing."""
    page = (ROOT / "docs/trainer-architecture.md").read_text(encoding="utf-8")
    drawing = page.partition("## The path of an episode")[2].partition("\n\n    ")[2]
    lines = takewhile(lambda line: line.startswith("    "), f"    {drawing}".splitlines())
    return [(len(line) - len(line.lstrip()), line.split()[0]) for line in lines]


def floor_of(file: str) -> int:
    """Return the layer of a file's package in the import contract, counted from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "trainer-layers"]
    package = f"trainer.{file.partition('/')[0]}"
    return next(number for number, layer in enumerate(layers) if package in re.split(r" \| ", layer))


def test_the_drawing_has_few_files_and_all_of_them_exist() -> None:
    files = [file for _, file in drawn_path()]
    assert 0 < len(files) <= MAX_FILES
    assert [file for file in files if not (ROOT / "trainer" / file).is_file()] == []


def test_no_drawn_file_is_called_from_a_floor_below_its_own() -> None:
    callers: list[tuple[int, str]] = []
    for depth, file in drawn_path():
        callers = [caller for caller in callers if caller[0] < depth]
        assert all(floor_of(caller) <= floor_of(file) for _, caller in callers), (
            f"{file} is above its callers {callers}"
        )
        callers.append((depth, file))
    assert len({floor_of(file) for _, file in drawn_path()}) <= MAX_FLOORS
