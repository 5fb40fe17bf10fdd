"""The navigation names each page once. Pages quote messages, and name tests, as the code has them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from sandbox.types import UnavailableReason

ROOT = Path(__file__).parents[2]


def test_the_navigation_names_each_page_once() -> None:
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    entries = [entry for section in navigation for entry in section.values()]
    pages = [page for entry in entries for page in ([entry] if isinstance(entry, str) else entry)]
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted(written)


def test_each_message_in_troubleshooting_is_in_the_code() -> None:
    sources = [
        path.read_text(encoding="utf-8") for name in ("sandbox", "trainer") for path in (ROOT / name).rglob("*.py")
    ]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # a message that spans several literals
    page = (ROOT / "docs/howto/troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message \|.*?(?=\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    messages = [message for table in tables for message in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)]
    assert len(messages) > 10
    parts = [part.strip() for message in messages for part in message.split("...") if part.strip()]
    assert [part for part in parts if part not in joined] == []


def test_each_reason_of_unavailable_is_in_troubleshooting() -> None:
    page = (ROOT / "docs/howto/troubleshooting.md").read_text(encoding="utf-8")
    assert [reason.value for reason in UnavailableReason if f"| `{reason.value}` |" not in page] == []


def test_each_test_that_isolation_names_exists() -> None:
    page = (ROOT / "docs/isolation.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert len(names) > 20
    assert [name for name in names if f"def {name}(" not in tests] == []
    assert [path for path in re.findall(r"`(tests/[\w/.]+)`", page) if not (ROOT / path).exists()] == []
