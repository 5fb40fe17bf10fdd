"""Tests of the files of a call. Given files are written before the code runs. Requested regular files are returned when
the code has ended, each file whole or not at all."""

from __future__ import annotations

import pytest

from sandbox.types import Status
from tests.executor.calling import Caller

UNUSUAL_FILES = {
    "a b/ü 東/🐍.bin": bytes(range(256)),
    "-dash": b"1",
    "deep/" * 30 + "x": b"2",
    "x" * 255: b"3",
    "'\"$;": b"4",
}


def test_files_are_returned_unchanged(guest: Caller) -> None:
    result = guest.run("import os\nos.path.exists('deep')", files=UNUSUAL_FILES, return_files=tuple(UNUSUAL_FILES))
    assert (result.status, result.value, result.truncated) == (Status.OK, "True", ())
    assert result.files == UNUSUAL_FILES


def test_an_empty_file_is_returned(guest: Caller) -> None:
    assert guest.run("", files={"empty": b""}, return_files=("empty",)).files == {"empty": b""}


def test_changed_and_new_files_are_returned(guest: Caller) -> None:
    code = "import os\nopen('in.txt', 'a').write('+')\nos.makedirs('new/sub')\nopen('new/sub/f', 'wb').write(b'1')"
    result = guest.run(code, files={"in.txt": b"was"}, return_files=("in.txt", "new/sub/f"))
    assert result.files == {"in.txt": b"was+", "new/sub/f": b"1"}


def test_files_are_returned_after_an_error_or_exit(guest: Caller) -> None:
    for end in ("1/0", "import sys\nsys.exit(3)"):
        result = guest.run(f"f = open('f', 'w')\nf.write('kept')\n{end}", return_files=("f",))
        assert (result.status, result.files) == (Status.ERROR, {"f": b"kept"})


def test_files_are_returned_from_the_initial_working_directory(guest: Caller) -> None:
    code = "import os\nopen('f', 'w').write('1')\nos.mkdir('d')\nos.chdir('d')\nopen('f', 'w').write('2')\nNone"
    assert guest.run(code, return_files=("f",)).files == {"f": b"1"}


@pytest.mark.parametrize(
    "creation",
    [
        "pass",
        "os.mkdir('f')",
        "os.symlink('/etc/passwd', 'f')",
        "os.symlink('real', 'f')\nopen('real', 'w').write('x')",
        "os.mkfifo('f')",
        "os.symlink('f', 'f')",
        "import socket\nsocket.socket(socket.AF_UNIX).bind('f')",
        "open('f', 'w').write('x')\nos.chmod('f', 0)",
    ],
)
def test_only_readable_regular_files_are_returned(guest: Caller, creation: str) -> None:
    result = guest.run(f"import os\n{creation}\nNone", return_files=("f",))
    assert (result.files, result.missing_files) == ({}, ("f",))
    assert result.truncated == ()


def test_every_file_that_is_not_returned_is_listed_as_missing(guest: Caller) -> None:
    result = guest.run("open('a', 'w').write('1')\nNone", return_files=("a", "none", "none"))
    assert (result.files, result.missing_files, result.truncated) == ({"a": b"1"}, ("none",), ())
    stopped = guest.run("open('a', 'w').write('1')\nwhile True: pass", return_files=("a",), timeout_s=0.3)
    assert (stopped.status, stopped.files, stopped.missing_files) == (Status.TIMEOUT, {}, ("a",))


def test_a_link_within_a_path_is_followed(guest: Caller) -> None:
    """A link within a path is followed, because it leads only to files that the call could also have printed."""
    result = guest.run("import os\nos.symlink('/python', 'd')\nNone", return_files=("d/pyvenv.cfg",))
    assert result.status is Status.OK


def test_a_file_over_the_return_limit_is_reported_and_others_are_returned(guest: Caller) -> None:
    code = "open('big', 'wb').truncate(3 << 20)\nopen('small', 'w').write('x')\nNone"
    whole = guest.run(code, return_files=("big", "small"), disk_mb=4)
    assert {name: len(data) for name, data in whole.files.items()} == {"big": 3 << 20, "small": 1}
    code = "for name in 'ab': open(name, 'wb').truncate(10 << 20)\nopen('small', 'w').write('x')\nNone"
    result = guest.run(code, return_files=("a", "b", "small"))
    assert {name: len(data) for name, data in result.files.items()} == {"a": 10 << 20, "small": 1}
    assert "files" in result.truncated


def test_a_sparse_file_counts_with_its_full_size(guest: Caller) -> None:
    result = guest.run("open('big', 'wb').truncate(60 << 20)\nNone", return_files=("big",))
    assert (result.files, result.truncated, result.missing_files) == ({}, ("files",), ("big",))


def test_given_files_that_do_not_fit_the_disk_are_an_error(guest: Caller) -> None:
    result = guest.run("1", files={"big": bytes(3 << 20)}, disk_mb=1)
    assert result.status is not Status.OK
    assert result.error is not None
    assert result.error.type == "OSError"


def test_forged_files_can_only_have_the_requested_names(guest: Caller) -> None:
    # Descriptor 4 takes, for each file, its index in `return_files`, its length and its content.
    forged = "import os, struct\nos.write(4, struct.pack('<IQ', {}, {}) + b'abc')\nos._exit(0)"
    assert guest.run(forged.format(0, 3), return_files=("f",)).files == {"f": b"abc"}
    for index, size in ((1, 3), (2**32 - 1, 3), (0, 4), (0, 2**64 - 1)):
        assert guest.run(forged.format(index, size), return_files=("f",)).files == {}
