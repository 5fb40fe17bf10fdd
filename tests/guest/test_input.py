"""Tests that a call gets its environment variables, arguments and standard input, and that no other call gets them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from sandbox.types import Call, Status
from tests.executor.calling import OWN_PYTHON, Caller
from tests.guest.test_script import stdout_of

UNUSUAL_TEXTS = ["", " a b ", "π=東京", "line\nline", "-x", "\udcff\udc80", "🐍" * 1000]


def test_environment_variables_are_set_for_the_code_and_its_programs(guest: Caller) -> None:
    code = (
        "import os, subprocess, sys\n"
        "print(os.environ['MODE'], os.getenv('_n1'), os.environb[b'MODE'])\n"
        "print(subprocess.run(['/bin/echo'], check=False).returncode if 0 else '')\n"
        "print(subprocess.check_output([sys.executable, '-Sc', 'import os; print(os.environ[\"MODE\"])'], text=True))"
    )
    assert stdout_of(guest.run(code, env={"MODE": "fast", "_n1": "2"})).split() == ["fast", "2", "b'fast'", "fast"]


def test_an_environment_variable_replaces_one_of_the_guest_for_one_call(guest: Caller) -> None:
    code = "import os\nprint(os.environ['USER'], os.environ.get('ONLY_HERE'), len(os.environ))"
    usual = stdout_of(guest.run(code))
    assert stdout_of(guest.run(code, env={"USER": "me", "ONLY_HERE": "x"})).split()[:2] == ["me", "x"]
    assert stdout_of(guest.run(code)) == usual


def test_variables_and_arguments_have_any_text(guest: Caller) -> None:
    env = {f"V{index}": text for index, text in enumerate(UNUSUAL_TEXTS)}
    code = "import os, sys\nprint(ascii(sys.argv[1:]), ascii([os.environ[f'V{i}'] for i in range(len(sys.argv) - 1)]))"
    shown = ascii(UNUSUAL_TEXTS)
    assert stdout_of(guest.run(code, env=env, argv=UNUSUAL_TEXTS)) == f"{shown} {shown}\n"


def test_arguments_follow_the_name_of_the_script_for_one_call(guest: Caller) -> None:
    code = "import sys\nprint(sys.argv)"
    assert stdout_of(guest.run(code, argv=("-n", "3", "a b"))) == "['main.py', '-n', '3', 'a b']\n"
    assert stdout_of(guest.run(code)) == "['main.py']\n"


def test_argparse_reads_the_arguments(guest: Caller) -> None:
    code = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--n', type=int)\n"
        "parser.add_argument('file')\nprint(vars(parser.parse_args()))"
    )
    assert stdout_of(guest.run(code, argv=["--n", "3", "x"])) == "{'n': 3, 'file': 'x'}\n"


def test_a_time_zone_applies_to_the_call(guest: Caller) -> None:
    code = "import time\nprint(time.localtime(0).tm_hour, time.tzname[0])"
    assert stdout_of(guest.run(code, env={"TZ": "ABC-5"})) == "5 ABC\n"
    assert stdout_of(guest.run(code)).split()[0] == "0"


def test_variables_that_are_read_at_the_start_of_a_program_change_nothing_in_the_call(guest: Caller) -> None:
    """The call is a fork of a running program, the zygote, which has read these variables before."""
    env = {"PYTHONOPTIMIZE": "2", "PYTHONSTARTUP": "x.py", "LD_PRELOAD": "/lib/none.so", "PYTHONHASHSEED": "7"}
    code = "import sys\nprint(sys.flags.optimize, hash('a'))"
    usual = stdout_of(guest.run(code))
    assert stdout_of(guest.run(code, env=env)) == usual


SHOWN = {
    "PYTHONINTMAXSTRDIGITS=0": "len(str(10**9999))",
    "PYTHONINTMAXSTRDIGITS=640": "sys.get_int_max_str_digits()",
    "PYTHONWARNINGS=error": "warnings.filters[0][0], sys.warnoptions",
    "PYTHONWARNINGS=ignore::UserWarning,error::FutureWarning": "[f[0] for f in warnings.filters[:2]]",
    "PYTHONPATH=lib:/elsewhere": "[os.path.relpath(p) for p in sys.path[1:2]], sys.path[2]",
    "PYTHONIOENCODING=latin-1": "[(s.encoding, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)]",
    "PYTHONIOENCODING=:replace": "[s.errors for s in (sys.stdin, sys.stdout, sys.stderr)]",
    "PYTHONIOENCODING=ascii:ignore": "[(s.encoding, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)]",
    "PYTHONDONTWRITEBYTECODE=1": "sys.dont_write_bytecode",
    "PYTHONPYCACHEPREFIX=/tmp/x": "sys.pycache_prefix",
    "PYTHONFAULTHANDLER=1": "__import__('faulthandler').is_enabled()",
    "PYTHONTRACEMALLOC=3": "__import__('tracemalloc').get_traceback_limit()",
    "PYTHONINTMAXSTRDIGITS=": "sys.get_int_max_str_digits()",
}
"""By variable and value: an expression whose value shows the effect of the variable."""
SHOWN_NAMES = {variable.partition("=")[0] for variable in SHOWN}


@pytest.mark.parametrize("variable", SHOWN)
def test_an_environment_variable_of_python_has_the_same_effect_as_in_a_fresh_interpreter(
    guest: Caller, variable: str
) -> None:
    name, _, value = variable.partition("=")
    code = f"import os, sys, warnings\nprint({SHOWN[variable]})"
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "main.py")
        script.write_text(code)
        env = {"PYTHONUTF8": "1", name: value}
        expected = subprocess.run([OWN_PYTHON, script], env=env, cwd=directory, capture_output=True, text=True)
    assert expected.returncode == 0, expected.stderr
    assert stdout_of(guest.run(code, stdin="x", env={name: value})) == expected.stdout


@pytest.mark.parametrize("variable", ["PYTHONINTMAXSTRDIGITS=5", "PYTHONTRACEMALLOC=x", "PYTHONIOENCODING=none"])
def test_a_malformed_variable_of_the_interpreter_is_an_error_that_names_it(guest: Caller, variable: str) -> None:
    name, _, value = variable.partition("=")
    result = guest.run("print(1)", env={name: value})
    assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 1, "")
    assert result.error is not None
    assert result.error.type == "ValueError"
    assert result.error.message.startswith(f"{name}={value!r}: ")


def test_the_document_names_all_variables_of_the_interpreter() -> None:
    text = (Path(__file__).parents[2] / "docs/python.md").read_text()
    documented = set(re.findall(r"`(PYTHON\w+)`", text))
    honoured, ignored = (
        set(re.findall(r"`(PYTHON\w+)`", part)) for part in text.split("The other variables have no effect")
    )
    help_text = subprocess.run([OWN_PYTHON, "--help-env"], capture_output=True, text=True, check=False).stdout
    assert set(re.findall(r"\bPYTHON[A-Z0-9_]+\b", help_text)) <= documented
    assert {*SHOWN_NAMES} <= honoured
    assert not honoured & ignored


@pytest.mark.parametrize("data", [b"\0\xff\xfe\n", bytes(range(256)) * 300, b"plain"])
def test_bytes_on_standard_input_arrive_unchanged(guest: Caller, data: bytes) -> None:
    code = "import sys, hashlib\ndata = sys.stdin.buffer.read()\nprint(len(data), hashlib.sha256(data).hexdigest())"
    expected = f"{len(data)} {__import__('hashlib').sha256(data).hexdigest()}\n"
    result = guest.run_all([Call(code, stdin=data)])[0]
    assert stdout_of(result) == expected


def test_no_call_has_the_variables_or_arguments_of_another(guest: Caller) -> None:
    """The calls are submitted together, so machine code forks them one after another from the same memory."""
    code = "import os, sys\nprint(os.environ.get('WHO'), sys.argv[1:])"
    with_input = [Call(code, env={"WHO": str(n)}, argv=(str(n),)) for n in range(20)]
    calls = [call for pair in zip(with_input, [Call(code)] * 20, strict=True) for call in pair]
    outputs = [stdout_of(result) for result in guest.run_all(calls)]
    assert outputs == [text for n in range(20) for text in (f"{n} ['{n}']\n", "None []\n")]
