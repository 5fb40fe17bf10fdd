"""Attacks by too many processes, too much memory, too many files, and too much output and input of parsers. Calls that
run at the same time must get their results."""

from __future__ import annotations

import pytest

from sandbox.types import Limits, Status
from tests.escape.targets import Target
from tests.executor.calling import call

# By name of the bomb: the code, and the statuses that the call may get. The limits are 16 processes, 128 MiB of memory
# and 16 MiB of disk.
BOMBS: dict[str, tuple[str, str]] = {
    "forks": (
        "pids = []\nwhile len(pids) < 1000:\n    pid = attempt(os.fork)\n    if isinstance(pid, OSError): break\n"
        "    if pid == 0: time.sleep(1000)\n    pids.append(pid)\nif len(pids) >= 16: breach(len(pids))",
        "ok",
    ),
    "forks that fork": ("while True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    "threads": (
        "count = 0\ntry:\n    while count < 1000: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); count += 1\n"
        "except RuntimeError: pass\nif count >= 16: breach(count)\nos.write(1, b'END\\n'); os._exit(0)",
        "ok",
    ),
    "memory of one process": (
        "kept = []\ntry:\n    while len(kept) < 300: kept.append(b'x' * (1 << 20))\nexcept MemoryError: kept = kept[:1]\n"
        "else: breach('300 MiB')",
        "ok memory_limit killed",
    ),
    "memory of many processes": (
        "for _ in range(8):\n    if os.fork() == 0: kept = b'x' * (60 << 20); time.sleep(1); os._exit(0)\n"
        "while True:\n    try: os.wait()\n    except ChildProcessError: break",
        "ok memory_limit killed timeout error",
    ),
    "a wide address space": (
        "import mmap\ntry: mmap.mmap(-1, 1 << 40)\nexcept (OSError, MemoryError): pass\nelse: breach('1 TiB')",
        "ok",
    ),
    "a stack": ("def f(n): return f(n + 1)\nsys.setrecursionlimit(10**9)\nf(0)", "timeout killed error memory_limit"),
    "disk in one file": (
        "got = 0\ntry:\n    with open('big', 'wb', buffering=0) as file:\n        while got < 40 << 20: got += file.write(bytes(1 << 20))\n"
        "except OSError: pass\nif got > 20 << 20: breach(got)",
        "ok killed",
    ),
    "disk in many files": (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ngot = 0\nfor n in range(100):\n"
        "    got += len(bytes(1 << 20)) if works(lambda: open(str(n), 'wb', buffering=0).write(bytes(1 << 20))) else 0\n"
        "if got > 20 << 20: breach(got)",
        "ok",
    ),
    "inodes": (
        "n = 0\nwhile n < 5000 and works(lambda: os.close(os.open(str(n), os.O_CREAT, 0o600))): n += 1\n"
        "if n >= 5000: breach(n)",
        "ok",
    ),
    "nested directories": (
        "n = 0\nwhile n < 5000 and works(lambda: (os.mkdir('x'), os.chdir('x'))): n += 1\nif n >= 5000: breach(n)",
        "ok",
    ),
    "sparse files": (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwith open('s', 'wb') as file:\n    got = attempt(file.truncate, 1 << 40)\nif got == 1 << 40: breach(got)",
        "ok",
    ),
    "descriptors": (
        "n = 0\nwhile n < 100_000 and works(os.dup, 1): n += 1\nif n > 2000: breach(n)\n",
        "ok",
    ),
    "descriptors in flight": (
        "import _socket\ndef send(ours, fds): _socket.socket.sendmsg(ours, [b'x'], [(1, 1, struct.pack(f'{len(fds)}i', *fds))])\n"
        "pairs, n = [], 0\ntry:\n    while n < 5000:\n        ours, theirs = socket.socketpair(); pairs.append((ours, theirs)); ours.setblocking(False)\n"
        "        send(ours, [1] * 200); n += 200; send(ours, [theirs.fileno()])\n"
        "except OSError: pass\nif n >= 5000: breach(n)",
        "ok",
    ),
    "pipes full of data": (
        "got = 0\ntry:\n    while got < 300 << 20:\n        r, w = os.pipe(); os.set_blocking(w, False); attempt(fcntl.fcntl, w, 1031, 1 << 20)  # F_SETPIPE_SZ\n"
        "        got += os.write(w, bytes(1 << 20))\nexcept OSError: pass\nif got > 64 << 20: breach(got)",
        "ok",
    ),
    "timers": (
        "n = 0\ntimer = ctypes.c_int()\nwhile n < 200_000 and raw('timer_create', 1, None, ctypes.byref(timer)) == 0: n += 1\nif n >= 200_000: breach(n)",
        "ok timeout memory_limit",
    ),
    "output": ("while True: os.write(1, b'x' * 65536)", "output_limit error"),
    "output to stderr": ("while True: sys.stderr.write('x' * 65536)", "output_limit"),
    "output of children": (
        "for _ in range(4):\n    if os.fork() == 0:\n        while True: os.write(1, b'x' * 4096)\nwhile True: os.wait()",
        "output_limit error",
    ),
    "a deep expression": (
        "compile('(' * 100_000 + ')' * 100_000, 'x', 'eval')",
        "error killed memory_limit output_limit",
    ),
    "a long chain of operators": ("eval('-' * 1_000_000 + '1')", "error killed memory_limit ok"),
    "a deep list": ("x = []\nfor _ in range(1_000_000): x = [x]\nos.write(1, repr(x).encode())", "error killed"),
    "a huge power": ("9 ** 9 ** 9", "timeout memory_limit error"),
    "a huge shift": ("1 << (1 << 40)", "error memory_limit"),
    "a backtracking pattern": ("re.match('(x+x+)+y', 'x' * 60)", "timeout"),
    "a huge format": ("f'{1:1000000000}'", "error memory_limit ok"),
    "billions of objects": ("x = [0]\nwhile True: x = x + x", "error memory_limit killed"),
}


@pytest.mark.parametrize("attack", BOMBS)
def test_other_calls_survive_a_bomb_of(attack: str, target: Target) -> None:
    code, statuses = BOMBS[attack]
    timeout_s = 0.3 if statuses.startswith("timeout") else 10.0  # short for code that never ends by itself
    limits = Limits(timeout_s=timeout_s, memory_mb=128, processes=16, disk_mb=16, output_kb=64)
    bomb = target.caller.submit(target.build_call(code, **{name: getattr(limits, name) for name in Limits.__slots__}))
    neighbours = [call(f"sum(range({n}))", timeout_s=30.0) for n in range(6)]
    for n, result in enumerate(target.caller.run_all(neighbours)):
        assert (result.status, result.value, result.attempts) == (Status.OK, f"{sum(range(n))}", 1), result
    result = target.caller.result_of(bomb)
    assert "BREACH" not in result.stdout, result.stdout[:1000]
    assert (result.status in statuses.split(), result.attempts) == (True, 1), result
    assert len(result.stdout) + len(result.stderr) <= 2 * (limits.output_kb << 10)
    target.check_healthy()


HOSTILE_VALUES = {
    "a list that contains itself": "x = []\nx.append(x)\nx",
    "a deep list": "x = []\nfor _ in range(100_000): x = [x]\nx",
    "a huge text": "'x' * (50 << 20)",
    "an object whose repr loops": "class C:\n    def __repr__(self):\n        while True: pass\nC()",
    "a huge number": "10 ** 5000",
    "an object whose repr is no text": "class C:\n    def __repr__(self): return 5\nC()",
    "surrogates": "'\\udcff\\x00\\ud800' * 100",
    "a class whose repr exits": "class M(type):\n    def __repr__(cls): raise SystemExit(0)\nclass C(metaclass=M): pass\nC",
}


@pytest.mark.parametrize("attack", HOSTILE_VALUES)
def test_a_hostile_returned_value_does_not_affect_other_calls(attack: str, target: Target) -> None:
    result = target.caller.run(HOSTILE_VALUES[attack], timeout_s=1.0, memory_mb=256)
    assert (result.status is not Status.UNAVAILABLE, result.attempts) == (True, 1), result
    assert len(result.value or "") <= 64 << 10  # the default of output_kb
    target.check_healthy()
