"""Tests that each call starts from the same state, finds no traces of other calls, and has its own random numbers."""

from __future__ import annotations

import pytest

from sandbox.jail import GUEST_SOURCE_DIR
from sandbox.types import Status
from tests.executor.calling import Caller, call


@pytest.mark.parametrize(
    "code",
    [
        "import random\nrandom.random()",
        "import random\nrandom.getrandbits(64), random.gauss(0, 1)",
        "import uuid\nuuid.uuid4()",
        "import uuid\nuuid.uuid1()",
        "import tempfile\ntempfile.mktemp()",
        "import secrets\nsecrets.token_hex()",
        "import os\nos.urandom(8)",
        "import random\nrandom.Random().random()",
        "import random\nrandom.SystemRandom().random()",
        "import tempfile\nwith tempfile.NamedTemporaryFile() as f: name = f.name\nname",
    ],
)
def test_random_numbers_differ_between_calls(guest: Caller, code: str) -> None:
    results = guest.run_all([call(code)] * 4)
    assert all(result.status is Status.OK for result in results), results
    assert len({result.value for result in results}) == 4


@pytest.mark.runtime
@pytest.mark.parametrize(
    "draw",
    ["random.rand()", "random.default_rng().random()", "random.randint(1 << 60)", "random.RandomState().rand()"],
)
def test_random_numbers_of_numpy_differ_between_calls(guest_with_numpy: Caller, draw: str) -> None:
    results = guest_with_numpy.run_all([call(f"import numpy as np\nnp.{draw}")] * 4)
    assert len({result.value for result in results}) == 4


def test_a_seed_gives_the_same_number_in_each_call(guest: Caller) -> None:
    results = guest.run_all([call("import random\nrandom.seed(7)\nrandom.random()")] * 3)
    assert {result.value for result in results} == {"0.32383276483316237"}  # the same as in any Python


def test_hashes_are_the_same_in_each_call(guest: Caller) -> None:
    results = guest.run_all([call("list({'a', 'b', 'c', 'd'}), hash('x')")] * 3)
    assert len({result.value for result in results}) == 1


@pytest.mark.parametrize(
    ("change", "query"),
    [
        ("open('left', 'w').write('x')", "import os\nos.listdir('.'), os.listdir('/tmp')"),
        ("import os\nos.mkdir('/tmp/left')", "import os\nos.listdir('/tmp')"),
        ("import os\nos.environ['LEFT'] = '1'", "import os\nsorted(os.environ.items())"),
        ("import os\nos.chdir('/')", "import os\nos.getcwd()"),
        ("import sys\nsys.path.insert(0, '/left')", "import sys\nsys.path"),
        ("import sys\nsys.setrecursionlimit(77777)", "import sys\nsys.getrecursionlimit()"),
        ("import sys, types\nsys.modules['left'] = types.ModuleType('left')", "import sys\n'left' in sys.modules"),
        ("import signal\nsignal.signal(10, lambda *_: 0)", "import signal\n[signal.getsignal(n) for n in (2, 10, 17)]"),
        ("import builtins\nbuiltins.left = 1", "import builtins\nhasattr(builtins, 'left')"),
        ("import math\nmath.pi = 3", "import math\nmath.pi"),
        ("left = 1", "sorted(name for name in globals() if name != 'left') + ['left' in globals()]"),
        ("import gc\ngc.disable()", "import gc\ngc.isenabled(), gc.get_threshold()"),
        ("import os\nos.umask(0)", "import os\nos.umask(0)"),
        ("import decimal\ndecimal.getcontext().prec = 3", "import decimal\ndecimal.Decimal(1) / 3"),
        ("import warnings\nwarnings.simplefilter('error')", "import warnings\nwarnings.filters"),
        ("import sys\nsys.stdout = None", "import sys\nsys.stdout.name, sys.stdout.encoding, sys.stdout.errors"),
        ("import sys\nsys.excepthook = sys.displayhook = print", "import sys\nsys.excepthook is sys.__excepthook__"),
        ("import atexit\natexit.register(print, 'left')", "1"),
        (
            "from resource import *\nsetrlimit(RLIMIT_NOFILE, (9, 9))",
            "from resource import *\ngetrlimit(RLIMIT_NOFILE)",
        ),
        ("import time, os\nos.environ['TZ'] = 'Asia/Tokyo'\ntime.tzset()", "import time\ntime.tzname, time.timezone"),
        ("import locale\nlocale.setlocale(locale.LC_ALL, 'C')", "import locale\nlocale.setlocale(locale.LC_ALL)"),
        ("import threading\nthreading.stack_size(1 << 20)", "import threading\nthreading.stack_size()"),
        ("import sys\nsys.settrace(print)\nsys.setprofile(None)", "import sys\nsys.gettrace(), sys.getprofile()"),
        ("import linecache\nlinecache.cache.clear()", "import linecache\nlinecache.getline('main.py', 1)"),
        ("import socket\nsocket.setdefaulttimeout(1)", "import socket\nsocket.getdefaulttimeout()"),
    ],
)
def test_no_change_of_a_call_is_visible_in_the_next(guest: Caller, change: str, query: str) -> None:
    before = guest.run(query)
    assert before.status is Status.OK, before
    assert guest.run(f"{change}\nNone").status is Status.OK
    after = guest.run(query)
    assert (after.status, after.value, after.stdout) == (before.status, before.value, before.stdout)


def test_a_call_sees_its_own_changes(guest: Caller) -> None:
    """The test above shows that the next call sees no changes. That means something only if changes have an effect in
    their own call. This test shows that they have."""
    code = "import os\nos.environ['A'] = '1'\nos.chdir('/')\nos.environ['A'], os.getcwd()"
    assert guest.run(code).value == "('1', '/')"


def test_the_environment_has_only_these_names(guest: Caller) -> None:
    names = guest.run("import os\nsorted(os.environ)").value
    assert names is not None
    threads = {"MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    locale_and_user = {"HOME", "LANG", "LC_CTYPE", "LOGNAME", "PATH", "USER"}
    assert set(eval(names)) <= threads | locale_and_user | {"MPLBACKEND", "PYTHONHASHSEED", "PYTHONPATH"}


def test_the_working_directory_is_empty_private_and_writable(guest: Caller) -> None:
    code = (
        "import os\nstatus = os.stat('.')\nos.getcwd(), os.listdir(), oct(status.st_mode), status.st_uid == os.getuid()"
    )
    assert guest.run(code).value == "('/tmp', [], '0o40700', True)"


def test_a_call_sees_nothing_of_the_zygote(guest: Caller) -> None:
    names = sorted(path.stem for path in GUEST_SOURCE_DIR.glob("*.py"))
    code = f"import sys\nset({names}) & set(sys.modules)"
    assert "zygote" in names
    assert guest.run(code).value == "set()"
    assert guest.run("import sys\n'/guest' in sys.path").value == "False"
    assert guest.run("import os\nos.path.exists('/proc/self') or os.path.exists('/proc/1')").value == "False"
    assert guest.run("import os\nos.getpid(), os.getppid()").value == "(1, 0)"
    assert guest.run("import threading\nthreading.enumerate() == [threading.main_thread()]").value == "True"


def test_the_hundredth_call_has_the_same_state_as_the_first(guest: Caller) -> None:
    code = "import sys, gc\nlen(sys.modules), sys.getrecursionlimit(), len(globals())"
    results = guest.run_all([call(code)] * 100)
    assert len({result.value for result in results}) == 1
    assert {result.attempts for result in results} == {1}


def test_a_process_alone_in_its_call_gets_every_lock(guest: Caller) -> None:
    """Locks have no effect between calls: no other call can open the files of a call, and the locks of shared files
    must not carry information between calls."""
    code = """
import fcntl, os, sqlite3
for path in ("own", os.__file__):
    for lock in (fcntl.flock, fcntl.lockf):
        kind = fcntl.LOCK_EX if path == "own" or lock is fcntl.flock else fcntl.LOCK_SH
        for file in [open(path, "a" if path == "own" else "r") for _ in range(2)]:
            lock(file, kind | fcntl.LOCK_NB), lock(file, fcntl.LOCK_UN)
database = sqlite3.connect("base.db")
database.execute("create table t (n)"), database.execute("insert into t values (42)"), database.commit()
sqlite3.connect("base.db").execute("select n from t").fetchone()
"""
    assert guest.run(code).value == "(42,)"
