"""Tests that a pattern matches, in bounded time, the paths that Python's `glob` finds for the same pattern."""

from __future__ import annotations

import glob
import time
from pathlib import Path

import pytest

from sandbox.path_patterns import is_pattern, matches

TREE = (
    *("a.png", "b.txt", ".hidden.png", "plot[1].png", "out/a.png", "out/b.csv", "out/.x/c.png", "out/sub/d.png"),
    *("out/sub/deep/e.png", "x/out/f.png", "x/y/z/a.png", "ü/東.png", "-a.png", "ab.png"),
)
PATTERNS = (
    *("*", "*.png", "?.png", "[ab].png", "[!a].*", ".*", "*/*", "out/*", "out/**", "**", "**/*.png", "**/a.png"),
    *("out/**/*.png", "out/sub/**/deep/*", "*/out/*", "x/**/z/*", "**/.x/*", "plot[[]1].png", "ü/*", "[a", "*b*"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_glob_finds(pattern: str, tmp_path: Path) -> None:
    for path in TREE:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    expected = {path for path in found if (tmp_path / path).is_file()}
    assert is_pattern(pattern)
    assert {path for path in TREE if matches(path, pattern)} == expected


def test_a_path_without_wildcards_is_no_pattern() -> None:
    assert not any(map(is_pattern, ("a", "a/b.csv", "a b", "{a,b}", "!a", "a]")))


@pytest.mark.parametrize("pattern", ["*a" * 127, "a*" * 127, "*" * 255, "*" + "a" * 120 + "b*" + "a" * 120 + "b"])
def test_a_match_takes_bounded_time(pattern: str) -> None:
    started = time.process_time()
    assert not matches("a" * 254 + "c", pattern) or pattern.endswith("*")
    assert time.process_time() - started < 0.5
