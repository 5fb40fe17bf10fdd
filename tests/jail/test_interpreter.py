"""Tests of `Interpreter.find`, which locates the files of a Python, or raises an error that says what is wrong with
this Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.jail import Interpreter, shared_libraries


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


def test_the_loader_of_a_program_is_read_from_the_program() -> None:
    loader = shared_libraries.loader_of(str(Path(sys.executable).resolve()))
    assert loader is not None
    assert os.access(loader, os.X_OK)


def test_a_loader_that_fails_is_an_error_with_its_message() -> None:
    loader = shared_libraries.loader_of(os.path.realpath(sys.executable))
    assert loader is not None
    with pytest.raises(ConfigError, match=r"/missing/program: expected a list of libraries, got .*cannot open"):
        shared_libraries._list_libraries(loader, "/missing/program", "/")
    with pytest.raises(ConfigError, match=r"expected a list of libraries, got .*No such file"):
        shared_libraries._list_libraries("/missing/ld.so", sys.executable, "/")


def compile_library(path: Path, *options: str, soname: str = "") -> str:
    """Compile a shared library that needs the libraries which `options` name. Return its path."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = ["-x", "c", "-", "-o", str(path), f"-Wl,-soname,{soname or path.name}", "-Wl,--no-as-needed"]
    subprocess.run(["gcc", "-shared", "-fPIC", *source, "-x", "none", *options], input=b"", check=True)
    return str(path)


def needs(library: str, runpath: str = "") -> list[str]:
    """Return the options of gcc for a module that needs a library, and searches it in `runpath`."""
    search = [f"-Wl,-rpath,{runpath}"] if runpath else []
    return [f"-L{os.path.dirname(library)}", f"-l:{os.path.basename(library)}", *search]


def libraries_of(*modules: str, top: Path) -> dict[str, str]:
    """Return the libraries that modules below `top` need and the interpreter does not."""
    program = os.path.realpath(sys.executable)
    _, without = shared_libraries.library_closure(program, [], [str(top)])
    _, libraries = shared_libraries.library_closure(program, modules, [str(top)])
    return {name: path for name, path in libraries.items() if name not in without}


@pytest.mark.parametrize("top_name", ["packages", "my packages"])
def test_a_library_is_left_out_only_if_origin_finds_it_in_a_mounted_directory(tmp_path: Path, top_name: str) -> None:
    top = tmp_path / top_name
    beside = compile_library(top / "pack.libs" / "libbeside.so.1")
    absolute = compile_library(top / "pack" / "libs" / "libabsolute.so.1")
    outside = str(tmp_path / "lib" / "liboutside.so.1")
    os.symlink(compile_library(tmp_path / "lib" / "liboutside.so.1.2", soname="liboutside.so.1"), outside)
    module = compile_library(
        top / "pack" / "sub" / "module.so",
        *needs(beside, "$ORIGIN/../../pack.libs"),
        *needs(absolute, os.path.dirname(absolute)),
        *needs(outside, "$ORIGIN/../../../lib"),
    )
    assert libraries_of(module, beside, top=top) == {"libabsolute.so.1": absolute, "liboutside.so.1": outside}


def test_libraries_that_a_library_needs_are_found_too(tmp_path: Path) -> None:
    third = compile_library(tmp_path / "lib" / "libthird.so")
    second = compile_library(tmp_path / "lib" / "libsecond.so", *needs(third, "$ORIGIN"))
    module = compile_library(tmp_path / "top" / "pack" / "module.so", *needs(second, f"{tmp_path}/lib"))
    assert libraries_of(module, top=tmp_path / "top") == {"libsecond.so": second, "libthird.so": third}


def test_a_library_of_one_package_does_not_hide_the_library_of_the_same_name_that_another_needs(tmp_path: Path) -> None:
    own = compile_library(tmp_path / "top" / "first" / "libsame.so.1")
    systems = compile_library(tmp_path / "lib" / "libsame.so.1")
    first = compile_library(tmp_path / "top" / "first" / "module.so", *needs(own, "$ORIGIN"))
    second = compile_library(tmp_path / "top" / "second" / "module.so", *needs(systems, f"{tmp_path}/lib"))
    assert libraries_of(first, own, second, top=tmp_path / "top") == {"libsame.so.1": systems}


def test_a_missing_library_and_a_file_that_is_no_library_are_left_out(tmp_path: Path) -> None:
    present = compile_library(tmp_path / "lib" / "libpresent.so")
    absent = compile_library(tmp_path / "lib" / "libabsent.so")
    top = tmp_path / "top"
    module = compile_library(top / "pack" / "module.so", *needs(absent), *needs(present, f"{tmp_path}/lib"))
    os.unlink(absent)
    text = top / "pack" / "text.so"
    text.write_text("INPUT(libc.so.6)")
    assert libraries_of(str(text), module, top=top) == {"libpresent.so": present}


def test_a_truncated_module_is_left_out_and_the_others_of_its_package_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loader that reads beyond the end of a file is killed by the kernel."""
    library = compile_library(tmp_path / "lib" / "liba.so")
    top = tmp_path / "top"
    module = compile_library(top / "pack" / "module.so", *needs(library, f"{tmp_path}/lib"))
    truncated = top / "pack" / "truncated.so"
    truncated.write_bytes(Path(module).read_bytes()[:2000])
    with caplog.at_level("INFO"):
        assert libraries_of(str(truncated), module, top=top) == {"liba.so": library}
    assert f"{truncated} is left out" in caplog.records[-1].message


def test_a_command_name_is_looked_up_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert Interpreter.find(Path(sys.executable).name).executable == sys.executable
