"""`Interpreter.find` locates the files of a Python, or raises an error that says what is wrong with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import ConfigError
from sandbox.jail import Interpreter, elf


def write_script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_missing_python_is_named() -> None:
    with pytest.raises(ConfigError, match=r"python='/missing/python': expected a Python that starts"):
        Interpreter.find("/missing/python")


def test_a_program_other_than_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="but it failed with 'what is -I'"):
        Interpreter.find(write_script(tmp_path / "python", "echo 'what is -I' >&2; exit 2"))


def test_a_too_old_python_is_refused_with_its_version(tmp_path: Path) -> None:
    output = """echo '{"version": [3, 8, 18], "base": "/p", "prefix": "/", "base_prefix": "/"}'"""
    with pytest.raises(ConfigError, match=r"expected Python 3\.9 or newer, got 3\.8\.18"):
        Interpreter.find(write_script(tmp_path / "python", output))


def test_query_ignores_the_environment_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "json.py").write_text("raise SystemExit('not the standard library')")
    assert Interpreter.find(sys.executable).version == sys.version_info[:3]


def test_virtual_environment_has_its_own_packages_only(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    interpreter = Interpreter.find(str(tmp_path / "env" / "bin" / "python"))
    ((source, target),) = (mount for mount in interpreter.mounts if "env" in mount[0].split("/"))
    assert source.endswith("/site-packages")
    assert target.startswith("/python/")
    assert not any(source.startswith(sys.prefix) for source, _ in interpreter.mounts)


def test_libraries_include_libc_and_the_loader() -> None:
    names = {Path(target).name for _, target in Interpreter.find(sys.executable).libraries}
    assert any("libc.so" in name or "musl" in name for name in names)
    assert any(name.startswith("ld-") for name in names)


def test_elf_reader_accepts_python_and_rejects_text(tmp_path: Path) -> None:
    python = elf.read(str(Path(sys.executable).resolve()))
    assert python is not None
    assert python.loader is not None
    assert python.needed
    (tmp_path / "text").write_text("x" * 100)
    assert elf.read(str(tmp_path / "text")) is elf.read(str(tmp_path)) is elf.read("/missing") is None


@given(st.integers(0, 5000), st.binary(max_size=16))
def test_a_damaged_elf_file_raises_no_error(offset: int, damage: bytes) -> None:
    with open(Path(sys.executable).resolve(), "rb") as python:
        beginning = python.read(16_384)
    with tempfile.NamedTemporaryFile() as file:
        file.write(beginning[:offset] + damage + beginning[offset + len(damage) :])
        file.flush()
        elf.read(file.name)


def test_a_command_name_is_looked_up_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert Interpreter.find(Path(sys.executable).name).executable == sys.executable
