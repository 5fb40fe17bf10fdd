"""Attacks through returned files: patterns that leave the working directory, links out of it, and forged names."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.errors import InvalidCall
from sandbox.types import Call
from tests.escape.targets import PRELUDE, Host, Target

LINKS = """
secret = HOST["file"]
for name, target in (("file.x", secret), ("directory", os.path.dirname(secret)), ("root", "/"), ("up", "..")):
    os.symlink(target, name)
os.mkdir("d")
os.symlink(os.path.dirname(secret), "d/link")
os.symlink(secret, "d/file.x")
"""
PATTERNS = ("*", "*.x", "d/*", "**", "**/*", "directory/*", "root/*/*", "up/*", "d/link/*", "d/link/**", "**/up/*")
FORGED_NAMES = (
    "../up.x",
    "/etc/up.x",
    "d/../../up.x",
    "./a.x",
    "d//a.x",
    "a.y",
    "d/a.x",
    ".a.x",
    "a\n.x",
    "\u202ea.x",
    "",
)
FORGING = """
for name in NAMES:
    data = name.encode("utf-8", "surrogateescape") + b"\\0forged"
    os.write(4, struct.pack("<IQ", 0, len(data)) + data)
os.write(4, struct.pack("<IQ", 0, 5) + b"a.x\\0b")
os._exit(0)
"""


@pytest.mark.parametrize("pattern", ["../*", "/etc/*", "d/../../*", "**/..", "d//*", "./*"])
def test_no_pattern_names_a_path_outside_the_directory(pattern: str) -> None:
    with pytest.raises(InvalidCall, match="expected a relative path without empty"):
        Call("1", return_files=(pattern,))


def test_no_pattern_follows_a_link(target: Target) -> None:
    result = target.resists(LINKS, return_files=PATTERNS)
    assert (result.files, result.missing_files) == ({}, PATTERNS)


def test_the_links_lead_to_files_without_a_jail(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the control: Python's own `glob` follows the links."""
    import glob

    monkeypatch.chdir(tmp_path)
    exec(f"HOST = {host.facts!r}\n{PRELUDE}\n{LINKS}", {})
    found = {pattern for pattern in PATTERNS if any(Path(path).is_file() for path in glob.glob(pattern))}
    assert {"*", "*.x", "d/*", "directory/*", "root/*/*", "d/link/*"} <= found


def test_no_forged_name_comes_back(target: Target) -> None:
    names = (*FORGED_NAMES, "\udcff.x", "n" * 256 + ".x", "deep/" * 250 + "a.x")
    result = target.run(f"NAMES = {names!r}\n{FORGING}", return_files=("*.x",))
    assert result.files == {"a.x": b"b"}


def test_no_file_or_figure_comes_back_unrequested(target: Target) -> None:
    forging = 'for index in (0, 1, 2**32 - 1): os.write(4, struct.pack("<IQ", index, 1) + b"x")\nos._exit(0)'
    assert target.run(forging, return_files=("one",)).files == {"one": b"x"}
    assert target.run(forging, figures=True).files == {}
    assert target.run(forging).files == {}


def test_other_calls_return_their_files_beside_a_hostile_tree(target: Target) -> None:
    tree = """
for i in range(1000):
    if not works(os.mkdir, "d"): break
    os.chdir("d")
    for j in range(3): attempt(lambda: open("n" * 250 + str(j), "w"))
"""
    hostile = target.build_call(tree, return_files=("**/" + "*n" * 100, "**/*") + ("**/x",) * 100)
    other = target.build_call("open('f', 'w').write('1')", return_files=("*",))
    results = target.caller.run_all([hostile, other, hostile, other])
    assert [result.files for result in results[1::2]] == [{"f": b"1"}] * 2
    assert all(len(result.files) <= 256 for result in results)
