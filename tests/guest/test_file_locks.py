"""Tests of file locks in a call. A lock that succeeds excludes other users of the file. Any other lock fails with an
error."""

from __future__ import annotations

import pytest

from tests.executor.calling import Caller
from tests.guest.test_script import stdout_of

PRELUDE = """
import errno, fcntl, os, sqlite3, struct, threading, time
EX, SH, NB, UN = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB, fcntl.LOCK_UN
def attempt(action, *arguments):
    try: return action(*arguments)
    except OSError as error: return errno.errorcode[error.errno]
def run_child(action):
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    os.waitpid(pid, 0)
one, two = open("file", "w+"), open("file", "r")
"""
SITUATIONS = {
    "two open files exclude each other": (
        "print(attempt(fcntl.flock, one, EX), attempt(fcntl.flock, two, EX | NB), attempt(fcntl.flock, two, SH | NB))",
        "None EAGAIN EAGAIN",
    ),
    "two open files share a lock": (
        "print(attempt(fcntl.flock, one, SH), attempt(fcntl.flock, two, SH), attempt(fcntl.flock, two, EX | NB))",
        "None None EAGAIN",
    ),
    "unlocking and closing release a lock": (
        "fcntl.flock(one, EX); fcntl.flock(one, UN); fcntl.flock(two, EX | NB); two.close()\n"
        "print(attempt(fcntl.flock, one, EX | NB))",
        "None",
    ),
    "a duplicate has the same lock": (
        "fcntl.flock(one, EX); print(attempt(fcntl.flock, os.dup(one.fileno()), EX | NB))",
        "None",
    ),
    "a thread waits for a lock": (
        "fcntl.flock(one, EX); order = []\n"
        "waiting = threading.Thread(target=lambda: (fcntl.flock(two, EX), order.append('locked')))\n"
        "waiting.start(); order.append('unlocked'); fcntl.flock(one, UN); waiting.join(); print(*order)",
        "unlocked locked",
    ),
    "a process locks parts of a file": (
        "print(attempt(fcntl.lockf, one, EX | NB, 10, 5), attempt(fcntl.lockf, one, UN))",
        "None None",
    ),
    "a closed descriptor and a wrong operation are errors": (
        "print(attempt(fcntl.flock, 99, EX), attempt(fcntl.flock, one, 64))",
        "EBADF EINVAL",
    ),
    "sqlite works in one process": (
        "db = sqlite3.connect('db'); db.execute('create table t as select 7 as n'); db.commit()\n"
        "print(sqlite3.connect('db').execute('select n from t').fetchone()[0])",
        "7",
    ),
}
RECORD = "struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)"
BETWEEN_PROCESSES = {
    "flock": "fcntl.flock, one, EX",
    "flock without waiting": "fcntl.flock, one, SH | NB",
    "lockf": "fcntl.lockf, one, EX",
    "a record lock": f"fcntl.fcntl, one, fcntl.F_SETLK, {RECORD}",
    "an open file description lock": f"fcntl.fcntl, one, 38, {RECORD}",
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_locks_within_one_process_have_the_expected_effect(guest: Caller, situation: str) -> None:
    code, expected = SITUATIONS[situation]
    assert stdout_of(guest.run(PRELUDE + code)) == expected + "\n"


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_lock_between_processes_is_an_error(guest: Caller, kind: str) -> None:
    lock = BETWEEN_PROCESSES[kind]
    code = f"""
run_child(lambda: os.write(1, attempt({lock}).encode()))
got = attempt({lock})
print("", got if isinstance(got, str) else None)
"""
    child, parent = stdout_of(guest.run(PRELUDE + code)).split()
    assert child == ("EPERM" if "description" in kind else "ENOLCK"), "the child has a lock that excludes nobody"
    assert parent == ("EPERM" if "description" in kind else "None"), "the only process gets no lock"


def test_a_process_with_a_child_gets_no_lock(guest: Caller) -> None:
    code = """
if os.fork() == 0: time.sleep(1000)
print(attempt(fcntl.flock, one, EX), attempt(fcntl.lockf, one, EX))
"""
    assert stdout_of(guest.run(PRELUDE + code)) == "ENOLCK ENOLCK\n"


def test_a_new_interpreter_of_a_call_gets_no_lock(guest: Caller) -> None:
    code = """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "import fcntl; fcntl.flock(0, 2)"], stderr=-1).stderr)
"""
    assert "no file locks between the processes of a call" in stdout_of(guest.run(code))
