"""Attacks on directories of the operator that calls may read: a call can neither change them nor leave them."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from sandbox.types import Network, Status
from tests.escape.targets import Host, check_resisted, succeeds_without_jail
from tests.executor.calling import OWN_PYTHON, Caller, executor
from tests.jail.jails import reachable_python

LEVELS = ("nsjail", "namespaces", "landlock")
ATTACKS = {
    "writing": "if works(open, f'{DATA}/new', 'w') or works(open, f'{DATA}/file', 'a'): breach('written')",
    "truncating": "if works(os.truncate, f'{DATA}/file', 0): breach('truncated')",
    "removing": "if works(os.rename, f'{DATA}/file', f'{DATA}/moved') or works(os.unlink, f'{DATA}/file'): breach('removed')",
    "directories": "if works(os.mkdir, f'{DATA}/d') or works(os.rmdir, f'{DATA}/sub'): breach('changed')",
    "modes": "if works(os.chmod, f'{DATA}/file', 0o4777): breach('changed')",
    "times": "if works(os.utime, f'{DATA}/file'): breach('changed')",
    "hard links": """
if works(os.link, f'{DATA}/file', f'{DATA}/hard'): breach('in the directory')
if works(os.link, f'{DATA}/file', 'hard'): breach('outside')
""",
    "symbolic links": "if works(os.symlink, '/etc', f'{DATA}/etc'): breach('created')",
    "special files": "if works(os.mknod, f'{DATA}/null', 0o20666, os.makedev(1, 3)) or works(os.mkfifo, f'{DATA}/p'): breach('made')",
    "remounting": """
MS_REMOUNT, MS_BIND = 32, 4096
for flags in (MS_REMOUNT, MS_REMOUNT | MS_BIND):
    if libc.mount(b'none', DATA.encode(), None, ctypes.c_ulong(flags), None) == 0: breach('remounted')
    if works(open, f'{DATA}/new', 'w'): breach('written')
""",
    "unmounting": "if libc.umount2(DATA.encode(), 2) == 0: breach('unmounted')",
    "the directory above": """
for path in (f'{DATA}/../secret', f'{DATA}/sub/../../secret', f'{DATA}/link/secret'): scan(read(path))
fd = os.open(DATA, os.O_RDONLY)
for path in ('../secret', 'sub/../../secret'):
    opened = attempt(os.open, path, os.O_RDONLY, 0o777)
    opened = opened if isinstance(opened, OSError) else attempt(os.close, opened)
    opened = attempt(lambda: os.open(path, os.O_RDONLY, dir_fd=fd))
    if not isinstance(opened, OSError): scan(os.read(opened, 99))
""",
    "the socket of a service": "if works(socket.socket(socket.AF_UNIX).connect, f'{DATA}/socket'): breach('connected')",
    "programs": "if works(subprocess.run, [f'{DATA}/program']): breach('executed')",
}
CHANGES_NOT_TRIED_AS_ROOT = ("remounting", "unmounting")
"""Attacks without a control: without a jail they would change the mounts of this machine."""


BREACHES = {
    "landlock times": "Landlock does not restrict utimensat(2): a call can touch a file that all users may write"
}
"""Attacks that succeed, by level and name, as in `expected.py`. docs/isolation.md lists them as well."""
if os.geteuid() != 0:
    BREACHES.clear()  # if all calls have one uid, the filter refuses utimensat(2)


@contextmanager
def data_dir(host: Host) -> Iterator[str]:
    """Create a directory with files for all users beside a secret. It is not in /tmp, because calls have a /tmp of their
    own."""
    top = Path(tempfile.mkdtemp(prefix="escape-data-", dir="/var/tmp"))
    try:
        top.chmod(0o755)
        (top / "secret").write_text(host.secret)
        data = top / "data"
        (data / "sub").mkdir(parents=True)
        (data / "file").write_text("content")
        (data / "link").symlink_to(top)
        (data / "program").write_text("#!/bin/sh\nexit 0\n")
        (data / "program").chmod(0o755)
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(f"{data}/socket")
            service.listen(64)
            for path in (data, data / "sub", data / "file", data / "socket"):
                path.chmod(0o777)  # so that the mode of the files does not protect them
            yield str(data)
    finally:
        shutil.rmtree(top)


@pytest.fixture(scope="module", params=LEVELS)
def offered(request: pytest.FixtureRequest, host: Host) -> Iterator[tuple[Caller, str, Host]]:
    """An executor whose calls can read a directory, and the path of the directory."""
    level = request.param
    if request.config.getoption("--isolation") not in (None, level):
        pytest.skip("another level is selected by --isolation")
    try:
        choose_level(level)
    except IsolationError as error:
        pytest.skip(str(error))
    python = reachable_python(OWN_PYTHON) if level == "landlock" else OWN_PYTHON
    with data_dir(host) as data, executor(python, isolation=level, slots=2, mounts=((data, data),)) as caller:
        yield caller, data, Host({**host.facts, "is_jailed": True}, host.environ, host.secret)


@pytest.mark.parametrize("attack", ATTACKS)
def test_data_resists(attack: str, offered: tuple[Caller, str, Host], request: pytest.FixtureRequest) -> None:
    if reason := BREACHES.get(f"{request.node.callspec.params['offered']} {attack}"):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError))
    caller, data, host = offered
    check_resisted(caller.run(host.attack_program(f"DATA = {data!r}\n{ATTACKS[attack]}")))
    assert sorted(os.listdir(data)) == ["file", "link", "program", "socket", "sub"]
    assert Path(data, "file").read_text() == "content"


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in CHANGES_NOT_TRIED_AS_ROOT])
def test_the_attack_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    with data_dir(host) as data:
        succeeds_without_jail(host, f"DATA = {data!r}\n{ATTACKS[attack]}", tmp_path)


def test_calls_can_read_data(offered: tuple[Caller, str, Host]) -> None:
    caller, data, _ = offered
    result = caller.run(f"import os\nprint(sorted(os.listdir({data!r})), open('{data}/file').read())")
    assert (result.status, result.stdout) == (Status.OK, "['file', 'link', 'program', 'socket', 'sub'] content\n"), (
        sys.platform
    )


def test_there_is_no_loopback_beside_data(offered: tuple[Caller, str, Host]) -> None:
    result = offered[0].run("1", network=Network.LOOPBACK)
    assert result.status is Status.INVALID and result.error is not None
    assert result.error.message.startswith("network: expected none, got loopback: ")
