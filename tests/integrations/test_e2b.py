"""Tests of `Sandbox` and `AsyncSandbox`, which have the methods and fields of E2B. Variables and files outlive a call.
An outage of the service raises an error."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from sandbox.errors import InvalidCall, ServiceError
from sandbox.integrations import e2b
from sandbox.integrations.e2b import AsyncSandbox, Sandbox
from sandbox.types import Limits, Result, Status
from tests.integrations.examples import load_example


@pytest.mark.runtime
def test_the_example_runs(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    load_example("e2b_sandbox").main()
    assert capsys.readouterr().out.splitlines() == [
        "['2 rows\\n'] 14",
        "IndexError - list index out of range",
        "['data', 'total.txt'] 14",
    ]


@pytest.mark.runtime
def test_output_and_errors_of_earlier_code_are_not_repeated(server_url: str) -> None:
    with Sandbox.create() as sandbox:
        assert sandbox.run_code("print('first')\nx = 1").logs.stdout == ["first\n"]
        failed = sandbox.run_code("y = 2\nprint('second')\n1/0")
        assert failed.error is not None
        assert (failed.error.name, failed.logs.stdout) == ("ZeroDivisionError", ["second\n"])
        assert 'File "main.py", line 3' in failed.error.traceback
        last = sandbox.run_code("(x, 'y' in globals())")
        assert (last.text, last.logs.stdout, last.error, last.execution_count) == ("(1, False)", [], None, 3)


@pytest.mark.runtime
def test_a_time_limit_is_an_error_of_the_execution(server_url: str) -> None:
    execution = Sandbox.create(envs={"MODE": "fast"}).run_code("import os\nprint(os.environ['MODE'])", timeout=5)
    assert execution.logs.stdout == ["fast\n"]
    endless = Sandbox.create().run_code("while True: pass", timeout=0.2)
    assert endless.error is not None
    assert endless.error.name == "Timeout"


@pytest.mark.runtime
def test_files_written_later_replace_those_of_earlier_code(server_url: str) -> None:
    with Sandbox.create() as sandbox:
        sandbox.run_code("open('a.bin', 'wb').write(b'\\x00\\xff')")
        assert sandbox.files.read("a.bin", format="bytes") == b"\x00\xff"
        sandbox.files.write("a.bin", "new")
        assert sandbox.files.read("a.bin") == "new"
        with pytest.raises(FileNotFoundError, match=r"b\.bin"):
            sandbox.files.read("b.bin")
        with pytest.raises(FileNotFoundError, match="No such file"):
            sandbox.files.list("absent")
        with pytest.raises(InvalidCall, match="passwd"):
            sandbox.files.write("/etc/passwd", "")


@pytest.mark.runtime
def test_a_traceback_is_in_the_error_only(server_url: str) -> None:
    execution = Sandbox.create().run_code("import sys\nsys.stderr.write('warned\\n')\n1/0")
    assert execution.logs.stderr == ["warned\n"]
    assert execution.error is not None
    assert execution.error.traceback.startswith("Traceback")


@pytest.mark.runtime
def test_paths_that_are_listed_can_be_read(server_url: str) -> None:
    with Sandbox.create() as sandbox:
        for path in ("a[1].txt", "./b.txt", "data//*?.txt"):
            sandbox.files.write(path, path)
        assert [entry.path for entry in sandbox.files.list()] == ["a[1].txt", "b.txt", "data"]
        assert [entry.path for entry in sandbox.files.list("./data/")] == ["data/*?.txt"]
        paths = ["a[1].txt", "./b.txt", "data/*?.txt"]
        assert [sandbox.files.read(path) for path in paths] == ["a[1].txt", "./b.txt", "data//*?.txt"]


@pytest.mark.runtime
def test_a_listing_can_be_long_and_does_not_depend_on_the_session(server_url: str) -> None:
    with Sandbox.create() as sandbox:
        sandbox.run_code("for number in range(3000):\n    open(f'{number:0100}', 'w').close()")
        sandbox.run_code("import os\nos.symlink('absent', 'link')\nos.mkdir('d')\nos.chdir('d')\nopen = os = None")
        entries = sandbox.files.list()
        assert len(entries) == 3002
        assert [(entry.name, entry.type) for entry in entries[-2:]] == [("d", "dir"), ("link", "file")]


@pytest.mark.runtime
@pytest.mark.parametrize("text", ["[" * 100_000, "[[1]]", "[[1, 2, Infinity]]", "\xff", "{", "3"])
def test_a_forged_listing_is_an_error(server_url: str, text: str) -> None:
    with Sandbox.create() as sandbox:
        sandbox.run_code(f"import json\njson.dump = lambda value, file: file.buffer.write({text!r}.encode('latin-1'))")
        with pytest.raises(OSError, match="no list of files"):
            sandbox.files.list()


@pytest.mark.runtime
def test_a_file_that_cannot_be_returned_is_not_reported_as_absent(server_url: str) -> None:
    with Sandbox.create(limits=Limits(timeout_s=0.5)) as sandbox:
        sandbox.run_code("open('binary', 'wb').write(b'a\\xff')\nopen('large', 'wb').write(bytes(17 << 20))")
        assert sandbox.files.read("binary") == "a\ufffd"
        with pytest.raises(OSError, match="too large"):
            sandbox.files.read("large")
        sandbox.run_code("import os\nwhile os.path.exists('block'): pass")
        sandbox._sandbox._session._steps.insert(0, {"path": "block", "data": ""})
        for use in (sandbox.files.read, sandbox.files.list):
            with pytest.raises(OSError, match="Timeout"):
                use("binary")


@pytest.mark.runtime
@pytest.mark.asyncio
async def test_async_sandboxes_are_isolated_from_each_other(server_url: str) -> None:
    async with await AsyncSandbox.create() as first, await AsyncSandbox.create() as second:
        await first.run_code("x = 1")
        assert (await first.run_code("x")).text == "1"
        error = (await second.run_code("x")).error
        assert error is not None
        assert error.name == "NameError"


def test_a_killed_sandbox_runs_nothing() -> None:
    sandbox = Sandbox.create("http://127.0.0.1:9")
    assert [sandbox.kill(), sandbox.kill()] == [True, False]
    with pytest.raises(RuntimeError, match="was killed"):
        sandbox.run_code("1")


def test_an_outage_raises_and_is_no_execution(outage_url: str) -> None:
    with pytest.raises(ServiceError, match="QueueTimeout: no slot was free"):
        Sandbox.create(outage_url).run_code("1")


def test_a_returned_figure_is_a_result_with_a_png_in_base64() -> None:
    result = Result("", Status.OK, value="None", files={"figure-1.png": b"png", "other.png": b"no figure"})
    execution = e2b.Execution.of(result, 1)
    assert [(shown.text, shown.png) for shown in execution.results] == [("None", None), (None, "cG5n")]


@pytest.mark.parametrize("name", ["Execution", "ExecutionError", "Logs", "Result"])
def test_results_have_fields_of_e2b(name: str) -> None:
    real = pytest.importorskip("e2b_code_interpreter", reason="needs the package e2b-code-interpreter")
    ours = {field.name for field in dataclasses.fields(getattr(e2b, name))}
    assert ours <= {field.name for field in dataclasses.fields(getattr(real, name))}


@pytest.mark.parametrize("name", ["Sandbox", "AsyncSandbox"])
def test_sandboxes_have_methods_of_e2b(name: str) -> None:
    pytest.importorskip("e2b_code_interpreter", reason="needs the package e2b-code-interpreter")
    real = getattr(importlib.import_module("e2b_code_interpreter"), name)
    ours = {method for method in vars(getattr(e2b, name)) if not method.startswith("_")}
    assert {"create", "run_code", "kill"} <= ours <= set(dir(real))
