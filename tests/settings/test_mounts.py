"""Tests of the directories that an operator lets calls read. tests/escape/test_data.py attacks them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.client import AsyncClient
from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import Level, check_mounts, choose_level
from sandbox.local import local_service
from sandbox.settings.server import ExecutorConfig, load
from tests.executor.calling import OWN_PYTHON


def load_toml(text: str, directory: Path) -> ExecutorConfig:
    file = directory / "serve.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, {}, {})


def test_paths_are_relative_to_the_file_and_reach_the_executors(tmp_path: Path) -> None:
    config = load_toml('[mounts]\n"/data" = "sets/a"\n"/srv/more-1" = "/var/b"', tmp_path)
    assert config.mounts == (("/data", f"{tmp_path}/sets/a"), ("/srv/more-1", "/var/b"))
    assert ExecutorConfig.decode(json.loads(json.dumps(config.encode()))).mounts == config.mounts


@pytest.mark.parametrize("path", ["/", "data", "/data/", "/a/../b", "/a//b", "/./a", "/a\\nb", "/é", ""])
def test_a_path_that_is_not_plain_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mounts.*expected an absolute path of letters"):
        load_toml(f'[mounts]\n"{path}" = "."', tmp_path)


@pytest.mark.parametrize(
    "path", ["/python", "/proc", "/tmp", "/tmp/data", "/dev", "/etc/x", "/usr/lib", "/lib64", "/guest"]
)
def test_a_path_that_the_jail_needs_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a path outside /bin, /dev, .*, which the jail needs"):
        load_toml(f'[mounts]\n"{path}" = "."', tmp_path)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('mounts = ["/data"]', "mounts: expected a table of paths"),
        ('[mounts]\n"/data" = 1', "mounts.'/data': expected the path of a directory on the host, got 1"),
        ('[mounts]\n"/data" = ""', "mounts.'/data': expected the path of a directory on the host, got ''"),
        (
            '[mounts]\n"/data" = "."\n"/data/x" = "."',
            "mounts.'/data/x': expected a path that is not below another mount",
        ),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_entry(toml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_toml(toml, tmp_path)


@pytest.mark.parametrize(("name", "found"), [("file", "a file"), ("nowhere", "nothing")])
def test_the_source_has_to_be_a_directory(name: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"mounts: /data = .*expected a directory on this machine, found {found}"):
        check_mounts([("/data", f"{tmp_path}/{name}")], Level.NAMESPACES, has_uids=False)


@pytest.mark.parametrize("level", [Level.LANDLOCK, Level.NONE])
def test_levels_without_a_root_of_their_own_need_equal_paths(level: Level, tmp_path: Path) -> None:
    check_mounts([(str(tmp_path), str(tmp_path))], level, has_uids=False)
    with pytest.raises(ConfigError, match=f"at isolation level {level} calls see the paths of the host"):
        check_mounts([("/data", str(tmp_path))], level, has_uids=False)


@pytest.mark.parametrize("level", [Level.LANDLOCK, Level.NAMESPACES, Level.NSJAIL])
@pytest.mark.parametrize("mode", [0o700, 0o711, 0o754])
def test_a_directory_that_the_users_of_calls_cannot_read_is_refused(level: Level, mode: int, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(mode)
    mounts = [(str(closed), str(closed))]
    with pytest.raises(ConfigError, match=f"calls run as other users, who cannot read {closed}; chmod o\\+rx {closed}"):
        check_mounts(mounts, level, has_uids=True)
    check_mounts(mounts, level, has_uids=False)


def test_a_directory_above_that_the_users_of_calls_cannot_enter_is_refused_at_level_landlock(tmp_path: Path) -> None:
    data = tmp_path / "closed" / "data"
    data.mkdir(parents=True)
    data.parent.chmod(0o700)
    mounts = [(str(data), str(data))]
    with pytest.raises(ConfigError, match="calls run as other users, who cannot enter"):
        check_mounts(mounts, Level.LANDLOCK, has_uids=True)
    check_mounts(mounts, Level.NAMESPACES, has_uids=True)  # the jail mounts the directory itself


@pytest.mark.usefixtures("needs_isolation")
def test_a_server_whose_directory_is_missing_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('[mounts]\n"/data" = "nowhere"')
    arguments = ("--config", str(tmp_path / "serve.toml"), "--python", OWN_PYTHON, "--profiles", "bare", "--port", "0")
    command = [sys.executable, "-m", "sandbox", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"mounts: /data = {tmp_path}/nowhere: expected a directory on this machine, found nothing" in done.stderr


TOML = """
[mounts]
"/data" = "sets"

[profiles.counted]
imports = ["wave"]
warm = "warm.py"
"""
WARM = "import wave\nwave.total = sum(map(int, open('/data/numbers').read().split()))"


def test_calls_over_http_use_a_mount_and_a_profile_of_the_toml_file(tmp_path: Path) -> None:
    try:
        choose_level("namespaces")
    except IsolationError as error:
        pytest.skip(str(error))
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "numbers").write_text("1 2 39")
    (tmp_path / "warm.py").write_text(WARM)
    (tmp_path / "serve.toml").write_text(TOML)
    arguments = ("--config", str(tmp_path / "serve.toml"), "--python", OWN_PYTHON, "--isolation", "namespaces")

    async def main() -> None:
        async with local_service((*arguments, "--profiles", "bare")) as url, AsyncClient(url) as client:
            read = await client.execute("open('/data/numbers').read()")
            assert (read.value, read.stderr) == ("'1 2 39'", "")
            assert (await client.execute("import sys\nsys.modules['wave'].total", profile="counted")).value == "42"
            written = await client.execute("open('/data/numbers', 'w')")
            assert written.error is not None
            assert written.error.message == "[Errno 30] Read-only file system: '/data/numbers'"

    asyncio.run(main())
    assert (tmp_path / "sets" / "numbers").read_text() == "1 2 39"
