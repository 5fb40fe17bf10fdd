"""The pages of the Python API show each public name, and a name without a description is an error with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

import sandbox.client
from bench import reference
from bench.api_reference import UndocumentedName, public_names

SOURCE = '''"""A module."""
from abc import ABC

LIMIT_S = 2.0
"""Seconds of one call."""
Source = str | bytes
"""What a call runs."""


class Client(ABC):
    """Sends calls."""

    is_open: bool = False
    """Whether it may send."""

    def __init__(self, url: str, *, token: str | None = None, limit_s: float = LIMIT_S, names: list[str] = []) -> None:
        """`url` is that of a server."""

    async def run(self, *codes: Source, **fields: int) -> str:
        """Run some calls."""

    @property
    def size(self) -> int:
        """The number of calls."""

    def _send(self): ...


class Ending(StrEnum):
    """How a call ended."""

    OK = "ok", "It returned."
    LOST = "lost"
    """A bar | in a cell."""


@dataclass
class Request:
    """One call."""

    code: Annotated[Source, "its source"]
    files: dict[str, bytes] = field(default_factory=dict)
    """Its files."""
    codes: list[Source | str] = field(default_factory=list)
    """Further sources."""


class Lost(Ending): ...
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_a_class_is_shown_with_its_constructor_fields_properties_and_methods(folder: Path) -> None:
    text = public_names(folder, "module.py", ["Client"])
    assert text.splitlines()[:6] == ["### `Client`", "", "```python", "Client(", "    url: str,", "    *,"]
    assert "    limit_s: float = 2.0,\n" in text, "a default that is a constant of the module is not shown by its value"
    assert "`url` is that of a server." in text
    assert (
        "| `is_open` | `bool` | `False` | Whether it may send. |\n| `size` | `int` | property | The number of" in text
    )
    assert "#### `Client.run`\n\n```python\nasync run(*codes: Source, **fields: int) -> str\n```" in text
    assert "_send" not in text


def test_fields_and_values_have_the_descriptions_of_the_code(folder: Path) -> None:
    text = public_names(folder, "module.py", ["Ending", "Request", "Source"])
    assert r"| `ok` | It returned. |" in text
    assert "| `lost` | A bar &#124; in a cell. |" in text
    assert "| `codes` | <code>list[Source &#124; str]</code> | `[]` | Further sources. |" in text
    assert "| `code` | `Source` | required | its source |" in text
    assert "| `files` | `dict[str, bytes]` | `{}` | Its files. |" in text
    assert "```python\nSource = str | bytes\n```\n\nWhat a call runs." in text


@pytest.mark.parametrize(
    ("description", "line", "name"),
    [
        ('"""Sends calls."""', "class Client(ABC):", "Client"),
        ('"""Run some calls."""', "    async def run(self, *codes: Source, **fields: int) -> str:", "Client.run"),
        ('"""The number of calls."""', "    def size(self) -> int:", "Client.size"),
        ('"""Its files."""', "    files: dict[str, bytes] = field(default_factory=dict)", "Request.files"),
        ('"""A bar | in a cell."""', '    LOST = "lost"', "Ending.LOST"),
        ('"""What a call runs."""', "Source = str | bytes", "Source"),
    ],
)
def test_a_public_name_without_a_description_is_an_error_with_its_line(
    folder: Path, description: str, line: str, name: str
) -> None:
    (folder / "module.py").write_text(SOURCE.replace(description, "..."), encoding="utf-8")
    number = SOURCE.splitlines().index(line) + 1
    with pytest.raises(UndocumentedName, match=rf"^module\.py:{number}: expected a description of .* {name}$"):
        public_names(folder, "module.py", [name.partition(".")[0]])


def test_a_public_name_that_the_file_does_not_define_is_an_error(folder: Path) -> None:
    with pytest.raises(UndocumentedName, match=r"^module\.py:1: expected a definition of the public name Server$"):
        public_names(folder, "module.py", ["Server"])


def test_the_check_fails_with_the_line_of_a_name_without_a_description(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    page = reference.ApiPage("Title", "Text.", {"Heading": {"module.py": "Lost"}})
    monkeypatch.setattr(reference, "API_PAGES", {"page.md": page})
    monkeypatch.setattr(reference, "ROOT", folder)
    assert reference.main(["--check"]) == 1
    number = SOURCE.splitlines().index("class Lost(Ending): ...") + 1
    assert capsys.readouterr().out == f"module.py:{number}: expected a description of the public name Lost\n"


def test_each_name_that_the_client_exports_is_on_a_page() -> None:
    text = "".join(page.markdown() for page in reference.API_PAGES.values())
    assert [name for name in sandbox.client.__all__ if f"### `{name}`" not in text] == []
