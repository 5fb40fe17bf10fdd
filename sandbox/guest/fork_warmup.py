"""A zygote runs a few calls in itself before it serves, so that no call has to warm what all of them inherit.

The interpreter rewrites its bytecode and fills its caches as it goes (PEP 659). What only calls run would stay cold for
ever: each would warm it anew, in memory that it must first copy. So here goes the very code that a call goes through,
from the order to the answer, all but what cannot be undone: a stand-in of the same kind takes that one's place.
"""

from __future__ import annotations

import _operator
import atexit
import contextlib
import ctypes
import functools
import gc
import linecache
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any

import confine
import descriptors
import fork_batch
import frames
import runner

_SCRIPTS = (
    b"print(1 + 1)",
    b"import math\ndef f(n):\n    return n * 2\n\nfor i in range(3):\n    print(f'{f(i)}', math.sqrt(i))\n",
    b"x = [1, 2, 3]\nsum(x)",
    b"1 / 0",
    b"x = (",
)
_SLOT = -1  # and so is the uid, which leaves ids alone
_FIRST_WRITES = struct.pack("<3Q", 2, 0, 0)  # bytes of output, of error output, of report
_IRREVOCABLE = (
    *((confine, name, confine._libc.sched_yield) for name in ("_capset", "_prctl", "_syscall")),
    (confine, "_fork", confine._libc.sched_yield),  # it returns 0: what follows is the child
    (descriptors, "_syscall", confine._libc.sched_yield),
    (os, "setpgid", _operator.is_),
    (os, "_exit", os.WEXITSTATUS),
    (gc, "freeze", gc.isenabled),
    (gc, "enable", gc.isenabled),
    (atexit, "_run_exitfuncs", gc.isenabled),
)
"""What a call does for good, and what stands in for it: called the same way, and without effect on such arguments."""


def play(zygote: Any, times: int) -> None:
    """Have the scripts run, so often. Raises `RuntimeError` if they do not run as in a call."""
    limits = {name: resource.getrlimit(what)[1] for name, what in confine._BOUNDED.items()}
    call = {
        "op": "call",
        "run_id": 0,
        "slot": _SLOT,
        "timeout_s": 1.0,
        "output_bytes": 1024,
        "disk_bytes": 0,
        "return_bytes": 0,
    }
    with _apart(zygote):
        for _ in range(times):
            said = [_run(zygote, {**call, **limits, "echo": True, "return_count": 0}, bytearray(s)) for s in _SCRIPTS]
            if said[0][-len(_FIRST_WRITES) :] != _FIRST_WRITES:
                raise RuntimeError(f"rehearsing {_SCRIPTS[0]!r}: expected to hear {_FIRST_WRITES!r}, got {said[0]!r}")


def _run(zygote: Any, call: dict, script: bytearray) -> bytes:
    """One call; returns the header that the zygote would have answered with."""
    names, path = dict(runner._main.__dict__), sys.path[0]
    zygote.marks, zygote.outbox = mmap.mmap(-1, mmap.PAGESIZE), frames.Outbox(zygote.frames.sock)
    zygote._do_call({**call, "blobs": [len(script), 0, 0]}, memoryview(script))
    zygote._launch()
    zygote.marks = mmap.mmap(-1, mmap.PAGESIZE)  # the call has closed its own, once it had marked it
    zygote.marks[call["slot"]] = 1
    for running in zygote.running.values():
        zygote._answer(running, 0, resource.getrusage(resource.RUSAGE_CHILDREN))
    zygote.running.clear()
    zygote.deadlines.clear()
    linecache.cache.pop(runner.SCRIPT, None)
    runner._main.__dict__.update(names)
    sys.path[0] = path  # not the folder that this runs in
    room = zygote.outbox._room
    return bytes(room[8 : 8 + frames._LENGTHS.unpack_from(room)[0]])


@contextlib.contextmanager
def _apart(zygote: Any) -> Iterator[None]:
    """With stand-ins in place, and then everything as it was."""
    layers = zygote.layers
    kept = [(where, name, getattr(where, name)) for where, name, _ in _IRREVOCABLE]
    kept += [(zygote, name, getattr(zygote, name)) for name in ("marks", "outbox")]
    kept += [(layers, name, getattr(layers, name)) for name in ("ground", "address_space", "_uid_base")]
    if zygote.burst is not None:
        kept.append((zygote.burst, "_run", zygote.burst._run))
        zygote.burst._run = functools.partial(_pretend, zygote.burst)
    fds, folder = [os.dup(fd) for fd in range(runner.REPORT_FD + 1)], os.getcwd()
    layers.doors[_SLOT] = [os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)]
    layers.address_space, layers.ground = 0, layers.ground and _NoGround()
    layers._uid_base = layers._uid_base and 0
    try:
        for where, name, stand_in in _IRREVOCABLE:
            setattr(where, name, stand_in)
        yield
    finally:
        for where, name, value in kept:
            setattr(where, name, value)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))  # as the zygote has it
        os.chdir(folder)
        os.close(layers.doors.pop(_SLOT)[0])
        for fd, original in enumerate(fds):
            os.dup2(original, fd, inheritable=fd == 2)
            os.close(original)


def _pretend(jobs: Any, listed: int, _count: int) -> int:
    """In the place of the machine code: as in the child of the first job, of whose steps only files are of interest."""
    _result, source, target, size, zeros, *steps = jobs.words[fork_batch.MOST : fork_batch.MOST + fork_batch.ROOM]
    ctypes.memmove(target, source, size)
    ctypes.memset(target + size, 0, zeros)
    for at in range(0, steps.index(fork_batch._LAST), fork_batch.STEP):
        if steps[at] == confine._SYS_DUP2:
            os.dup2(*steps[at + 1 : at + 3])
    return listed


class _NoGround:
    """In the place of `landlock.Ground`."""

    def prepare(self, slot: int) -> None: ...

    restrict = enter = prepare

    def leave(self) -> None: ...
