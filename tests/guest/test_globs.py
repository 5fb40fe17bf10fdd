"""Tests of patterns in `return_files`: the matching files of the call's working directory are returned, and the search
takes bounded work."""

from __future__ import annotations

import pytest

from sandbox.types import Status
from tests.executor.calling import Caller

TREE = {
    "a.png": b"1",
    "b.png": b"2",
    "b.txt": b"3",
    ".hidden.png": b"4",
    "out/c.png": b"5",
    "out/deep/er/d.png": b"6",
    "out/.x/e.png": b"7",
    "ü/東 [1].png": b"8",
    "[x].png": b"9",
}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.png", "a.png b.png [x].png"),
        ("?.png", "a.png b.png"),
        ("[!a].*", "b.png b.txt"),
        ("out/*", "out/c.png"),
        ("out/**", "out/c.png out/deep/er/d.png"),
        ("out/**/*.png", "out/c.png out/deep/er/d.png"),
        ("*/d*/**/d.png", "out/deep/er/d.png"),
        ("**/c.png", "out/c.png"),
        (".*", ".hidden.png"),
        ("out/.x/*", "out/.x/e.png"),
        ("out/**/.x/e.png", "out/.x/e.png"),
        ("ü/*", "ü/東 [1].png"),
        ("[[]x].png", "[x].png"),
        ("out/[d]eep/er/d.png", "out/deep/er/d.png"),
    ],
)
def test_a_pattern_returns_the_files_that_match(guest: Caller, pattern: str, expected: str) -> None:
    result = guest.run("pass", files=TREE, return_files=(pattern,))
    paths = [expected] if expected in TREE else expected.split()
    assert (result.files, result.missing_files) == ({path: TREE[path] for path in paths}, ())
    assert result.truncated == ()


def test_each_path_and_pattern_without_a_file_is_listed_as_missing(guest: Caller) -> None:
    requested = ("a.png", "*.png", "b.*", "*.csv", "none", "out", "ou*", "**/d.png", "none")
    result = guest.run("pass", files=TREE, return_files=requested)
    assert set(result.files) == {"a.png", "b.png", "[x].png", "b.txt", "out/deep/er/d.png"}
    assert result.missing_files == ("*.csv", "none", "out", "ou*")


def test_a_pattern_whose_matches_are_returned_for_another_is_not_missing(guest: Caller) -> None:
    result = guest.run("pass", files=TREE, return_files=("a.png", "a.*", "*.txt", "b.t*"))
    assert (set(result.files), result.missing_files) == ({"a.png", "b.txt"}, ())


def test_files_that_the_code_makes_are_matched_in_the_initial_directory(guest: Caller) -> None:
    code = "import os\nos.makedirs('d/e')\nopen('d/e/f.txt', 'w').write('x')\nos.chdir('d')\n1/0"
    result = guest.run(code, return_files=("**/*.txt",))
    assert (result.status, result.files) == (Status.ERROR, {"d/e/f.txt": b"x"})


def test_patterns_match_regular_files_only_and_follow_no_links(guest: Caller) -> None:
    code = (
        "import os\nos.mkfifo('fifo.x')\nos.mkdir('dir.x')\nos.symlink('/etc/passwd', 'link.x')\n"
        "os.symlink('real.x', 'link2.x')\nopen('real.x', 'w').write('x')\nos.symlink('/', 'root')\n"
        "os.symlink('.', 'self')\nNone"
    )
    requested = ("*.x", "root/*/*", "root/etc/pass*", "self/*", "self/real.[x]", "**/passwd")
    result = guest.run(code, return_files=requested)
    assert (result.status, result.files, result.missing_files) == (Status.OK, {"real.x": b"x"}, requested[1:])
    assert result.truncated == ()


def test_more_files_than_a_call_may_return_are_reported(guest: Caller) -> None:
    code = "for i in range(300): open(f'{i:03}', 'w').write(str(i))\nNone"
    result = guest.run(code, return_files=("*",))
    assert (list(result.files), result.truncated) == ([f"{i:03}" for i in range(256)], ("files",))


def test_matches_that_do_not_fit_are_reported_and_others_are_returned(guest: Caller) -> None:
    code = "for name in ('a.bin', 'b.bin', 'c.bin'): open(name, 'wb').truncate(7 << 20)\nopen('d.bin', 'w')\nNone"
    result = guest.run(code, return_files=("*.bin",))
    assert (set(result.files), result.truncated) == ({"a.bin", "b.bin", "d.bin"}, ("files",))


@pytest.mark.parametrize(
    "name",
    ["b'\\xff.x'", "'line\\n.x'", "'\\u202e.x'", "'\\x00'.strip(chr(0)) + '\\x7f.x'"],
    ids=["bytes", "nl", "rtl", "del"],
)
def test_a_name_that_cannot_be_returned_is_reported(guest: Caller, name: str) -> None:
    result = guest.run(f"open({name}, 'w')\nopen('fine.x', 'w')\nNone", return_files=("*.x",))
    assert (set(result.files), result.truncated) == ({"fine.x"}, ("files",))


def test_a_wide_tree_is_searched_up_to_a_bound(guest: Caller) -> None:
    code = "import os\nfor i in range(60):\n os.mkdir(f'd{i}')\n for j in range(60): os.link('seed', f'd{i}/{j}')\nNone"
    result = guest.run(code, files={"seed": b""}, return_files=("**/59",) * 20 + ("*/0",))
    assert result.status is Status.OK
    assert set(result.files) == {f"d{i}/59" for i in range(60)}
    assert (result.truncated, result.missing_files[-1]) == (("files",), "*/0")


def test_a_deep_tree_is_searched_as_far_as_names_can_be_returned(guest: Caller) -> None:
    code = (
        "import os\nfor i in range(700):\n os.mkdir('d')\n os.chdir('d')\n"
        " if i in (2, 400, 600): open('f.x', 'w').write(str(i))\nNone"
    )
    result = guest.run(code, return_files=("**/*.x",))
    assert (result.status, list(result.files.values()), result.truncated) == (Status.OK, [b"2", b"400"], ("files",))


def test_hostile_names_do_not_slow_the_search_down(guest: Caller) -> None:
    code = "for i in range(1000): open('a' * 250 + f'{i:04}', 'w')\nNone"
    result = guest.run(code, return_files=("*a" * 120 + "b",), timeout_s=5)
    assert (result.status, result.files) == (Status.OK, {})


def test_files_are_found_after_the_code_has_replaced_what_the_search_uses(guest: Caller) -> None:
    code = "import os, fnmatch\nopen('f', 'w')\nos.scandir = os.lstat = None\n5"
    result = guest.run(code, return_files=("*",))
    assert (result.status, result.value, result.files, result.missing_files) == (Status.OK, "5", {"f": b""}, ())
    assert guest.run("open('f', 'w')\nNone", return_files=("*",)).files == {"f": b""}


@pytest.mark.parametrize(
    "entry",
    [
        b"../up.x\0abc",
        b"/etc/a.x\0abc",
        b"a/../b.x\0abc",
        b"a//b.x\0abc",
        b"./a.x\0abc",
        b".x\0abc",
        b"a.y\0abc",
        b"a\nb.x\0abc",
        b"\xff.x\0abc",
        b"a.x",
        b"\0abc",
        b"",
        b"x" * 252 + b"/" + b"y" * 252 + b"/" + b"z" * 252 + b"/" + b"w" * 252 + b"/" + b"v" * 20 + b".x\0abc",
        b"n" * 256 + b".x\0abc",
    ],
)
def test_forged_names_are_checked(guest: Caller, entry: bytes) -> None:
    """The code writes an entry to descriptor 4 itself. For each file of a pattern, this descriptor takes the index of
    the pattern, a length, a path, NUL and a content."""
    code = (
        f"import os, struct\nentry = {entry!r}\nfine = b'fine.x' + bytes(1) + b'1'\n"
        "for data in (entry, fine): os.write(4, struct.pack('<IQ', 0, len(data)) + data)\nos._exit(0)"
    )
    result = guest.run(code, return_files=("**/*.x",))
    assert (result.status, result.files, result.missing_files) == (Status.OK, {"fine.x": b"1"}, ())


def test_a_forged_entry_is_not_accepted_for_a_pattern_that_it_does_not_match(guest: Caller) -> None:
    code = (
        "import os, struct\n"
        "for index, data in ((1, b'a.png' + bytes(1) + b'1'), (0, b'b.csv' + bytes(1) + b'2')):\n"
        "    os.write(4, struct.pack('<IQ', index, len(data)) + data)\nos._exit(0)"
    )
    result = guest.run(code, return_files=("*.png", "*.csv"))
    assert (result.files, result.missing_files) == ({}, ("*.png", "*.csv"))


def test_no_more_files_than_allowed_come_from_forged_entries(guest: Caller) -> None:
    code = (
        "import os, struct\n"
        "for i in range(1000):\n"
        "    data = b'%d.x' % i + bytes(1)\n"
        "    os.write(4, struct.pack('<IQ', 0, len(data)) + data)\nos._exit(0)"
    )
    assert len(guest.run(code, return_files=("*.x",)).files) == 256
