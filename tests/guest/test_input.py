"""A call gets its environment variables, its arguments and its standard input, and no other call gets them."""

from __future__ import annotations

import pytest

from sandbox.types import Call
from tests.executor.calling import Caller
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


def test_variables_of_the_interpreter_and_of_the_loader_change_nothing_in_the_call(guest: Caller) -> None:
    """They are read at the start of a program, and the call is a fork of a running one."""
    env = {"PYTHONPATH": "/elsewhere", "PYTHONSTARTUP": "x.py", "LD_PRELOAD": "/lib/none.so", "PYTHONHASHSEED": "7"}
    code = "import os, sys\nprint('/elsewhere' in sys.path, hash('a'))"
    usual = stdout_of(guest.run(code))
    assert stdout_of(guest.run(code, env=env)) == usual


@pytest.mark.parametrize("data", [b"\0\xff\xfe\n", bytes(range(256)) * 300, b"plain"])
def test_bytes_on_standard_input_arrive_unchanged(guest: Caller, data: bytes) -> None:
    code = "import sys, hashlib\ndata = sys.stdin.buffer.read()\nprint(len(data), hashlib.sha256(data).hexdigest())"
    expected = f"{len(data)} {__import__('hashlib').sha256(data).hexdigest()}\n"
    result = guest.run_all([Call(code, stdin=data)])[0]
    assert stdout_of(result) == expected


def test_no_call_has_the_variables_or_arguments_of_another(guest: Caller) -> None:
    """Calls that arrive together are forked one after another by machine code."""
    code = "import os, sys\nprint(os.environ.get('WHO'), sys.argv[1:])"
    with_input = [Call(code, env={"WHO": str(n)}, argv=(str(n),)) for n in range(20)]
    calls = [call for pair in zip(with_input, [Call(code)] * 20, strict=True) for call in pair]
    outputs = [stdout_of(result) for result in guest.run_all(calls)]
    assert outputs == [text for n in range(20) for text in (f"{n} ['{n}']\n", "None []\n")]
