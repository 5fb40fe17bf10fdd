"""Tests of how a call ends: by exits, signals and exit handlers, and which output is still written at the end."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from sandbox.types import Status
from tests.executor.calling import Caller, call, executor, wait_gone


@pytest.mark.parametrize(
    ("argument", "exit_code", "stderr"),
    [
        *[("", 0, ""), ("None", 0, ""), ("0", 0, ""), ("False", 0, ""), ("True", 1, ""), ("3", 3, ""), ("-1", 255, "")],
        *[("300", 44, ""), ("'text'", 1, "text\n"), ("[1, 2]", 1, "[1, 2]\n"), ("2.0", 1, "2.0\n"), ("''", 1, "\n")],
    ],
)
def test_sys_exit_has_the_exit_code_and_output_that_python_gives_it(
    guest: Caller, argument: str, exit_code: int, stderr: str
) -> None:
    result = guest.run(f"import sys\nprint('before')\nsys.exit({argument})\nprint('after')")
    assert (result.status, result.exit_code) == (Status.ERROR if exit_code else Status.OK, exit_code)
    assert (result.stdout, result.stderr) == ("before\n", stderr)
    assert (result.error and result.error.type) == ("SystemExit" if exit_code else None)


def test_a_call_that_exits_has_no_value(guest: Caller) -> None:
    assert guest.run("import sys\nsys.exit(0)").value is None


def test_os_exit_ends_at_once_and_loses_no_output(guest: Caller) -> None:
    result = guest.run("import os, atexit\natexit.register(print, 'never')\nprint('before', end='')\nos._exit(3)")
    assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 3, "before")
    assert result.error is not None
    assert (result.error.type, result.error.message) == ("SystemExit", "3")
    assert guest.run("import os\nos._exit(0)").status is Status.OK


@pytest.mark.parametrize(
    ("code", "signum"),
    [
        ("import ctypes\nctypes.string_at(0)", signal.SIGSEGV),
        # PID 1 ignores SIGABRT, so abort(3) then executes an invalid instruction.
        ("import os\nos.abort()", signal.SIGSEGV),
    ],
)
def test_a_crash_is_reported_as_killed_by_its_signal(guest: Caller, code: str, signum: signal.Signals) -> None:
    result = guest.run("print('before')\n" + code)
    assert (result.status, result.signal, result.exit_code) == (Status.KILLED, signum, None)
    assert result.stdout == "before\n"
    assert result.error is not None
    assert result.error.type == signum.name


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSTOP", "SIGHUP", "SIGSEGV"])
def test_a_call_cannot_kill_itself_by_a_signal_because_it_is_pid_1(guest: Caller, name: str) -> None:
    """From inside its namespace, PID 1 receives only signals for which it has a handler (pid_namespaces(7))."""
    result = guest.run(f"import os, signal\nos.kill(os.getpid(), signal.{name})\nprint('alive')")
    assert (result.status, result.stdout) == (Status.OK, "alive\n")


def test_a_signal_with_a_handler_is_delivered(guest: Caller) -> None:
    code = "import os, signal\nsignal.signal(15, lambda *_: print('caught'))\nos.kill(os.getpid(), 15)"
    assert guest.run(code).stdout == "caught\n"
    interrupted = guest.run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(5)")
    assert interrupted.error is not None
    assert (interrupted.error.type, interrupted.exit_code) == ("KeyboardInterrupt", 130)


def test_an_alarm_interrupts_the_code(guest: Caller) -> None:
    code = """
import signal, time
def late(*_):
    raise TimeoutError("own alarm")
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.02)
time.sleep(30)
"""
    result = guest.run(code)
    assert result.error is not None
    assert (result.status, result.error.type) == (Status.ERROR, "TimeoutError")


def test_exit_handlers_run_in_their_order(guest: Caller) -> None:
    result = guest.run("import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')\nprint('end')")
    assert result.stdout == "end\nsecond\nfirst\n"


def test_exit_handlers_run_after_an_error_too(guest: Caller) -> None:
    result = guest.run("import atexit\natexit.register(print, 'handler')\n1/0")
    assert (result.status, result.stdout) == (Status.ERROR, "handler\n")
    assert result.error is not None
    assert result.error.type == "ZeroDivisionError"


@pytest.mark.parametrize("profile", ["bare", "scientific"])
def test_buffered_log_records_are_written_last(guest_python: Path, profile: str) -> None:
    """The zygote of profile `scientific` has imported `logging`. The zygote of profile `bare` has not."""
    code = """
import atexit, logging.handlers, sys
buffer = logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout))
logging.getLogger().addHandler(buffer)
atexit.register(logging.warning, "at exit")
logging.warning("buffered")
print("end")
"""
    with executor(guest_python, profiles=(profile,)) as caller:
        is_imported = caller.run("import sys\n'logging' in sys.modules", profile=profile).value
        assert is_imported == str(profile == "scientific")
        assert caller.run(code, profile=profile).stdout == "end\nbuffered\nat exit\n"
        assert caller.run("print('quiet')", profile=profile).stderr == ""


def test_an_exit_handler_that_raises_changes_nothing(guest: Caller) -> None:
    result = guest.run("import atexit\natexit.register(lambda: 1/0)\natexit.register(print, 'other')\n5")
    assert (result.status, result.value, result.stdout) == (Status.OK, "5", "other\n")
    assert "ZeroDivisionError" in result.stderr


def test_globals_are_deleted_so_finalizers_run(guest: Caller) -> None:
    code = "class Finalized:\n    def __del__(self):\n        print('gone')\nx = Finalized()\nprint('end')"
    assert guest.run(code).stdout == "end\ngone\n"


def test_a_file_that_was_never_closed_is_complete(guest: Caller) -> None:
    result = guest.run("f = open('out.txt', 'w')\nf.write('kept')\nNone", return_files=("out.txt",))
    assert result.files == {"out.txt": b"kept"}


def test_output_and_errors_survive_a_closed_or_replaced_stream(guest: Caller) -> None:
    assert guest.run("import sys\nprint(1)\nsys.stdout.close()").stdout == "1\n"
    assert guest.run("import os\nprint(1)\nos.close(1)\nos.close(2)").status is Status.OK
    assert guest.run("import sys\nsys.stdout = None\nsys.stderr = None\nprint(2)\n3").value == "3"
    broken = guest.run("import sys\nclass Bad:\n    def write(self, text): raise OSError\nsys.stderr = Bad()\n1/0")
    assert broken.error is not None
    assert broken.error.type == "ZeroDivisionError"
    assert "ZeroDivisionError" in broken.stderr


def test_redirected_output_goes_where_it_was_sent(guest: Caller) -> None:
    code = (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as s: print('in')\nprint(s.getvalue())"
    )
    assert guest.run(code).stdout == "in\n\n"


def test_closing_the_report_loses_only_value_and_error(guest: Caller) -> None:
    result = guest.run("import os\nos.closerange(3, 10)\nraise ValueError('x')")
    assert result.status is Status.ERROR
    assert "ValueError: x" in result.stderr


def test_a_forged_report_does_not_change_the_status(guest: Caller) -> None:
    # A report with a value of 3 bytes, no error and no line. The flag 8 is MemoryError (`guest/runner.py`).
    forged = "import os, struct\nos.write(3, struct.pack('<6i', 3, -1, 0, 0, -1, 8) + b'yes')\n"
    assert guest.run(forged + "os._exit(1)").status is Status.MEMORY_LIMIT, "the code only worsens its own status"
    result = guest.run(forged + "os._exit(7)")
    assert (result.exit_code, result.value) == (7, None)
    for junk in ("b'\\xff' * 1000", "struct.pack('<6i', 2**31 - 1, 2**31 - 1, -5, 9, 9, 255)", "b''"):
        result = guest.run(f"import os, struct\nos.write(3, {junk})\nos._exit(1)")
        assert result.status is Status.ERROR
        assert result.error is not None
        assert (result.error.type, result.error.message) == ("SystemExit", "1")


def test_without_a_jail_no_temporary_directory_outlives_the_executor(tmp_path: Path) -> None:
    told = tmp_path / "cwd"
    with executor(isolation="none") as caller:
        caller.submit(call(f"import os, time\nos.symlink(os.getcwd(), {str(told)!r})\ntime.sleep(600)"))
        caller.until(told.is_symlink)
        directory = os.open(told, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # without a lock, the launcher of another jail would remove the directory
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(directory)
        pids = caller.processes()
    wait_gone(pids)
    assert not told.exists()
