"""The navigation of the site in zensical.toml names each page of docs/ once."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_navigation_names_each_page_once() -> None:
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    entries = [entry for section in navigation for entry in section.values()]
    pages = [page for entry in entries for page in ([entry] if isinstance(entry, str) else entry)]
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted(written)
