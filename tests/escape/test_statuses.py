"""Attacks on the status: code that tries to get a better status than its behaviour deserves, or no status.

Status `unavailable` means that the server failed. Such a call is retried, or gets no reward, so no code may cause this
status.
"""

from __future__ import annotations

import struct

import pytest

from sandbox.types import Status
from tests.escape.targets import Target
from tests.executor.calling import call

FORGED_SUCCESS = struct.pack("<6i", 5, -1, 0, 0, -1, 0) + b"'win'"
"""A report (`guest/runner.py`) of a value of five characters and no error."""
MALFORMED_REPORT = struct.pack("<6i", 2**31 - 1, 2**31 - 1, -(2**31), 2**31 - 1, 2**31 - 1, -1)
"""A report with impossible lengths, line and flags, and without any text."""

# By behaviour: the code, and the statuses that the call may get. Descriptor 3 is the report of the call, and descriptor
# 4 takes its returned files.
STATUS_TRICKS: dict[str, tuple[str, str]] = {
    "ends at once": ("os._exit(3)", "error"),
    "ends with every bit": ("os._exit(-1)", "error"),
    "ends with the exit status of a failed runner": ("os._exit(70)", "error"),
    "kills itself": ("os.kill(os.getpid(), 9); os._exit(3)", "error killed"),
    "kills itself from a child": (
        "if os.fork() == 0: os.kill(1, 9); os.kill(os.getppid(), 9); os._exit(0)\nos.wait()\n1/0",
        "error killed",
    ),
    "crashes": ("ctypes.string_at(0)", "killed"),
    "aborts": ("os.abort()", "killed error"),
    "exceeds a CPU limit that it sets itself": (
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
        "killed",
    ),
    "is ended by a timer": ("signal.setitimer(signal.ITIMER_REAL, .01); time.sleep(60)\n1/0", "killed error timeout"),
    "is ended by a real-time signal": ("signal.raise_signal(40); os._exit(3)", "killed error"),
    "enters the kernel by x32": ("if libc.syscall(0x40000027) == -1: 1/0", "error"),  # getpid(2)
    "closes every descriptor": ("os.closerange(0, 4096)\n1/0", "error"),
    "closes every descriptor and ends well": ("os.closerange(0, 4096)", "ok error"),
    "replaces its descriptors": (
        "for fd in range(5): os.dup2(os.open('/dev/null', os.O_RDWR), fd)\n1/0",
        "error",
    ),
    "moves the offsets of its output": (
        "for fd in range(1, 5): attempt(os.lseek, fd, 2**62, os.SEEK_SET)\n1/0",
        "error",
    ),
    "moves the offsets back": ("for fd in range(1, 5): attempt(os.lseek, fd, 0, os.SEEK_SET)\n1/0", "error"),
    "shrinks its output": ("for fd in range(1, 5): attempt(os.ftruncate, fd, 0)\n1/0", "error"),
    "grows its output": ("for fd in range(1, 5): attempt(os.ftruncate, fd, 2**40)\n1/0", "error"),
    "punches holes into its output": (
        "for fd in range(1, 5): raw('fallocate', fd, 3, 0, 4096)  # FALLOC_FL_PUNCH_HOLE\n1/0",
        "error",
    ),
    "seals its output": ("for fd in range(1, 5): attempt(fcntl.fcntl, fd, fcntl.F_ADD_SEALS, 15)\n1/0", "error"),
    "makes its output slow to read": (
        "for fd in range(1, 5): attempt(fcntl.fcntl, fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT | os.O_APPEND)\n1/0",
        "error",
    ),
    "locks its output": ("for fd in range(1, 5): attempt(fcntl.lockf, fd, fcntl.LOCK_EX)\n1/0", "error"),
    "fills the report": ("attempt(os.write, 3, b'\\xff' * (1 << 20))\nos._exit(3)", "error"),
    "reports nonsense": (f"os.write(3, {MALFORMED_REPORT!r})\nos._exit(3)", "error"),
    "reports a success and fails": (f"os.write(3, {FORGED_SUCCESS!r})\nos._exit(3)", "error"),
    "fills the report and raises": ("attempt(os.write, 3, bytes(1 << 20))\n1/0", "error"),
    "raises an error whose text exits": (
        "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E",
        "ok error",
    ),
    "raises an error whose text ends the process": (
        "class E(Exception):\n    def __str__(self): os._exit(3)\nraise E",
        "error",
    ),
    "raises an error whose text raises KeyboardInterrupt": (
        "class E(BaseException):\n    def __str__(self): raise KeyboardInterrupt\nraise E",
        "error",
    ),
    "raises an endless chain": (
        "error = None\nfor n in range(10_000):\n    new = ValueError(n); new.__cause__ = error; error = new\nraise error",
        "error output_limit",
    ),
    "raises a cycle": ("a, b = ValueError(1), ValueError(2)\na.__cause__, b.__cause__ = b, a\nraise a", "error"),
    "raises a type of an evil name": (
        "raise type('\\ud800\\x00' * 1000, (Exception,), {'__qualname__': 'x' * 10**6})('\\udcff' * 10**5)",
        "error",
    ),
    "raises in the hook": ("def hook(*_): raise SystemExit(0)\nsys.excepthook = hook\n1/0", "error"),
    "ends in the hook": ("sys.excepthook = lambda *_: os._exit(3)\n1/0", "error"),
    "loops in the hook": ("def hook(*_):\n    while True: pass\nsys.excepthook = hook\n1/0", "timeout"),
    "exits with something unprintable": (
        "class C:\n    def __str__(self): raise ValueError\nraise SystemExit(C())",
        "error",
    ),
    "exits with a huge number": ("raise SystemExit(2**80 + 3)", "error"),
    "exits with a code of 256": ("raise SystemExit(2**70 + 256)", "ok error"),
    "takes away the modules of the runner": ("for name in list(sys.modules): sys.modules[name] = None\n1/0", "error"),
    "takes away the builtins": (
        "import builtins\nfor name in dir(builtins): delattr(builtins, name)\nundefined",
        "error",
    ),
    "rewrites the runner": (
        "frame = sys._getframe()\nwhile frame:\n    for name in list(frame.f_globals):\n"
        "        if not name.startswith('__'): frame.f_globals[name] = None\n    frame = frame.f_back\n",
        "ok error",
    ),
    "rewrites the report": (
        "frame = sys._getframe()\nwhile frame and 'report' not in frame.f_locals: frame = frame.f_back\n"
        "if frame: frame.f_locals['report'].value = object(); frame.f_locals['report'].error = 1\n1/0",
        "error",
    ),
    "leaves its scratch directory": ("os.chdir('/')\n1/0", "error"),
    "makes its scratch directory inaccessible": ("os.chmod('.', 0)\n1/0", "error"),
    "leaves threads that print for ever": (
        "def talk():\n    while True: print('x' * 100)\nthreading.Thread(target=talk).start()\n1/0",
        "output_limit error",
    ),
    "prints what is not UTF-8": ("os.write(1, bytes(range(256))); os.write(2, b'\\xff' * 100)\n1/0", "error"),
    "kills all processes it can": ("os.kill(-1, 9)\n1/0", "error killed"),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)\n1/0", "error timeout"),
    "executes another program": ("os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(3)'])", "error"),
    "uses up its memory while its error is formatted": (
        "class E(Exception):\n    def __str__(self): return 'x' * 2**33\nraise E",
        "error memory_limit",
    ),
    "sleeps in an atexit handler": ("import atexit\natexit.register(time.sleep, 1000)\n1/0", "timeout"),
    "exits in a destructor": ("class C:\n    def __del__(self, os=os): os._exit(3)\nc = C()", "error"),
}


@pytest.mark.parametrize("behaviour", STATUS_TRICKS)
def test_code_gets_the_status_it_deserves_if_it(behaviour: str, target: Target) -> None:
    code, statuses = STATUS_TRICKS[behaviour]
    result = target.run(code, timeout_s=2.0, memory_mb=256, processes=16)
    assert result.status in statuses.split(), result
    assert result.attempts == 1
    target.check_healthy()


@pytest.mark.parametrize(
    ("body", "statuses"), [("raise SystemExit(0)", "ok error"), ("os._exit(3)", "error"), ("return 5", "error")]
)
def test_a_call_whose_value_has_an_evil_repr_is_not_retried(body: str, statuses: str, target: Target) -> None:
    result = target.caller.run(f"import os\nclass C:\n    def __repr__(self): {body}\nC()", timeout_s=2.0)
    assert result.status in statuses.split(), result
    assert result.attempts == 1


def test_forged_files_that_were_not_requested_are_dropped(target: Target) -> None:
    """In the stream of returned files, each file is preceded by its index among the requested files and its length."""
    stream = struct.pack("<IQ", 0, 3) + b"abc" + struct.pack("<IQ", 7, 3) + b"abc" + struct.pack("<IQ", 1, 2**63)
    result = target.run(f"os.write(4, {stream!r}); os._exit(0)", return_files=("a", "b"))
    assert (result.status, dict(result.files)) == (Status.OK, {"a": b"abc"})


def test_returned_files_contain_no_file_of_the_host(target: Target) -> None:
    code = """
os.symlink(HOST["file"], "link"); os.mkfifo("pipe"); os.mkdir("directory"); os.symlink(HOST["directory"], "host")
with open("sparse", "wb") as file: file.truncate(1 << 24)
os.symlink("/dev/zero", "zero"); os.symlink("loop", "loop")
"""
    names = ("link", "pipe", "directory", "host/secret", "sparse", "zero", "loop")
    result = target.run(code, return_files=names, timeout_s=5.0)
    assert result.status is Status.OK, result
    assert target.host.secret.encode() not in b"".join(result.files.values())
    assert sum(map(len, result.files.values())) <= 1 << 24  # no more than the sparse file


def test_each_call_gets_its_own_result(target: Target) -> None:
    codes = ("print({n})", "print({n}, flush=True); 1/0", "import os; os.write(1, b'{n}\\n'); os._exit(0)")
    calls = [call(codes[n % 3].format(n=n)) for n in range(60)]
    assert [result.stdout for result in target.caller.run_all(calls)] == [f"{n}\n" for n in range(60)]
