"""Tests of tenants files: what a tenant gets, and one line of advice for each mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.settings.tenants import Tenants, load_tenants
from sandbox.types import LIMIT_FIELDS


def _load(directory: Path, text: str, server_token: str | None = None) -> Tenants:
    file = directory / "tenants.toml"
    file.write_text(text, encoding="utf-8")
    return load_tenants(file, server_token)


def test_a_token_finds_its_tenant_with_its_bounds(tmp_path: Path) -> None:
    (tmp_path / "b.token").write_text("from a file\n", encoding="utf-8")
    tenants = _load(
        tmp_path,
        '[tenants.a]\ntoken = "t0"\n'
        '[tenants.b]\ntoken_file = "b.token"\nqueue_share = 0.5\nmax_running = 3\nmax_timeout_s = 2\npriority = -5\n',
    )
    a, b = tenants.find("t0"), tenants.find("from a file")
    assert a is not None and (a.name, a.queue_share, a.max_running, a.priority) == ("a", None, None, 0)
    assert b is not None and (b.name, b.queue_share, b.max_running, b.priority) == ("b", 0.5, 3, -5)
    assert b.max_limits.timeout_s == 2 and b.max_limits.memory_mb == a.max_limits.memory_mb
    assert [tenants.find(token) for token in ("", "t", "t00", "b.token")] == [None] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.a]\n", "tenant 'a': expected token or token_file, got neither; set one of them"),
        ('[tenants.a]\ntoken = "s3cret"\ntoken_file = "x"\n', "tenant 'a': expected token or token_file, got both"),
        ('[tenants.a]\ntoken = " "\n', "tenant 'a': token: expected text that is not empty; set it"),
        ("[tenants.a]\ntoken = 5\n", "tenant 'a': token: expected text that is not empty; set it"),
        ('[tenants.a]\ntoken_file = "gone"\n', "tenant 'a': token_file: expected a file with a token, but"),
        (
            '[tenants.a]\ntoken = "s3cret"\n[tenants.b]\ntoken = " s3cret"\n',
            "tenant 'b': has the token of tenant 'a'; give each tenant a token of its own",
        ),
        ('[tenants.a]\ntoken = "server"\n', "tenant 'a': has the token of the server; give the tenant a token"),
        ('[tenants.a]\ntoken = "s3cret"\nmax_runing = 1\n', "unknown field 'max_runing'; the fields are token"),
        (
            '[tenants."a.b c"]\ntoken = "s3cret"\nmax_timeout = 1\n',
            f"max_{', max_'.join(LIMIT_FIELDS)}; did you mean max_timeout_s?\n",
        ),
        ('[tenants.a]\ntoken = "s3cret"\nmax_running = 0\n', "max_running: expected a whole number from 1 to"),
        ('[tenants.a]\ntoken = "s3cret"\nmax_timeout_s = true\n', "tenant 'a': max_timeout_s: expected a number"),
        ('[tenants.""]\ntoken = "s3cret"\n', "tenant '': the name is empty"),
        ('[tenant.a]\ntoken = "s3cret"\n', "unknown key 'tenant'; a tenant is a table [tenants.NAME]"),
        ('[tenants]\ntoken = "s3cret"\n', "expected a table [tenants.NAME] for each tenant"),
        ("", "expected a table [tenants.NAME] for each tenant"),
        ('token = "s3cret', "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("a = " + "9" * 5000, "is not TOML"),
        ("#" * (1 << 20), "expected a table [tenants.NAME] for each tenant"),
        ("#" * ((1 << 20) + 1), "expected a tenants file of at most 1048576 bytes"),
        ('[tenants.a]\ntoken_file = "/dev/zero"\n', "token_file: expected a regular file, but /dev/zero is a pipe or"),
        (
            '[tenants.a]\ntoken_file = "/"\n',
            "tenant 'a': token_file: expected a file with a token, but / cannot be read",
        ),
        ('[tenants.a]\ntoken_file = "a\\u0000"\n', "tenant 'a': token_file: expected a file with a token, but"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_file_and_the_advice(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text, "server")
    received = str(caught.value)
    assert received.startswith(str(tmp_path / "tenants.toml")) and message in f"{received}\n"
    assert "\n" not in received and "s3cret" not in received


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_file_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "tenants.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tenants\.toml: (the tenants file cannot be read|is not UTF-8)"):
        load_tenants(file)


def test_a_pipe_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: expected a regular file"):
        load_tenants(tmp_path / "pipe")


def test_no_repr_contains_a_token(tmp_path: Path) -> None:
    tenants = _load(tmp_path, '[tenants.a]\ntoken = "s3cret"\n')
    assert repr(tenants) == "Tenants(a)" and "s3cret" not in repr(vars(tenants)) + repr(tenants.find("s3cret"))
