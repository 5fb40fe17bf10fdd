"""Runs some scripts inside the zygote before it serves, so that real calls inherit a warm interpreter.

A zygote is a preloaded interpreter that forks itself for each call. This module is an optimisation. When an interpreter
runs a function for the first times, it specialises the function's bytecode and fills its caches (PEP 659). The
functions that run a call's code run only in forks. Without a warm-up, each fork would specialise them again, and the
kernel would copy each page that this writes to.

The warm-up runs each script in the zygote itself, through all functions from the received frame to the result, without
a fork. Some of these functions have an effect that cannot be undone, such as `os._exit`. Stubs replace these functions
during the warm-up. A stub is of the same kind as the function that it replaces (built-in, ctypes or Python function),
because the interpreter specialises a call by the kind of the called function.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import linecache
import marshal
import mmap
import os
import resource
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import confine
import frames
import originals
import runner
import system_calls
from protocol import SCRIPT

if TYPE_CHECKING:
    from zygote import Zygote

_SCRIPTS = (
    b"print(1 + 1)",
    b"import math\ndef f(n):\n    return n * 2\n\nfor i in range(3):\n    print(f'{f(i)}', math.sqrt(i))\n",
    b"x = [1, 2, 3]\nsum(x)",
    b"1 / 0",
    b"x = (",
)
_SLOT = -1
"""Slot of the scripts. Slots of calls count from 0, so no call has this number."""
_FIRST_OUTPUT_SIZES = struct.pack("<3Q", 2, 0, 0)  # bytes of stdout, stderr and report of the first script
_STUBS = (
    (system_calls, "syscall", system_calls.do_nothing),
    (originals.own(os), "_exit", os.WEXITSTATUS),
    (originals.own(gc), "freeze", gc.isenabled),
    (originals.own(gc), "enable", gc.isenabled),
    (originals.own(atexit), "_run_exitfuncs", gc.isenabled),
)
"""Functions that must not run in the zygote: the object that has the function, the function's name, and its stub. The
stub takes the same number of arguments and has no effect. `originals.own` is the guest's own copy of a module, in which
the guest looks its functions up."""


def run_scripts(zygote: Zygote, times: int) -> None:
    """Run all scripts, `times` times. Raises `RuntimeError` if the first script does not run as it would in a call."""
    limits = dict.fromkeys(("disk_bytes", "return_bytes", *confine.RLIMITS), 0)  # 0, because nothing sets them here
    call = {"op": "call", "run_id": 0, "slot": _SLOT, "timeout_s": 1.0, "echo": True, "returns_files": False, **limits}
    call["output_bytes"] = 1024
    with _stubbed(zygote):
        for _ in range(times):
            header, *_ = [_run(zygote, call, bytearray(script)) for script in _SCRIPTS]
            if header[-len(_FIRST_OUTPUT_SIZES) :] != _FIRST_OUTPUT_SIZES:
                raise RuntimeError(
                    f"warm-up {_SCRIPTS[0]!r}: expected a header that ends in {_FIRST_OUTPUT_SIZES!r}, got {header!r}"
                )


def _run(zygote: Zygote, call: dict, script: bytearray) -> bytes:
    """Run a script. Return the header of the `ended` frame that reports its end."""
    main_names, first_path = dict(runner.main_module.__dict__), sys.path[0]
    zygote.confined_flags, zygote.writer = mmap.mmap(-1, mmap.PAGESIZE), frames.FrameWriter(zygote.reader.sock)
    header = {**call, "blobs": [len(script), 0, 0]}
    record = memoryview(bytearray(marshal.dumps(header)) + script)
    zygote.on_call(header, record[-len(script) :], record)
    zygote.fork_pending()
    # As a call does, the script has set its byte in the flags and then unmapped them. `send_ended` reads this byte.
    zygote.confined_flags = mmap.mmap(-1, mmap.PAGESIZE)
    zygote.confined_flags[_SLOT] = 1
    for running in zygote.running.values():
        zygote.send_ended(running, 0, resource.getrusage(resource.RUSAGE_CHILDREN))
    zygote.running.clear()
    zygote.deadlines.clear()
    linecache.cache.pop(SCRIPT, None)
    runner.main_module.__dict__.update(main_names)
    sys.path[0] = first_path
    return zygote.writer.first_header()


@contextlib.contextmanager
def _stubbed(zygote: Zygote) -> Iterator[None]:
    """Replace functions by stubs for the duration of the block (module docstring)."""
    confinement, batch = zygote.confinement, zygote.batch
    saved: list = [(owner, name, getattr(owner, name)) for owner, name, _ in _STUBS]
    saved += [(zygote, name, getattr(zygote, name)) for name in ("confined_flags", "writer")]
    saved.append((batch, "invoke", batch.invoke))
    saved.append((confinement, "landlock", confinement.landlock))
    confinement.landlock = confinement.landlock and _StubLandlock()  # type: ignore[assignment]
    confinement.cgroup_procs_fds[_SLOT], confinement.network_fds[_SLOT] = [-1], -1
    batch.invoke = _fake_invoke
    with _process_state_restored():
        try:
            for owner, name, stub in _STUBS:
                setattr(owner, name, stub)
            yield
        finally:
            for owner, name, value in saved:
                setattr(owner, name, value)
            del confinement.cgroup_procs_fds[_SLOT], confinement.network_fds[_SLOT]


@contextlib.contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restore the descriptors 0 to 3, the working directory and the environment after the block."""
    fds = [os.dup(fd) for fd in range(runner.REPORT_FD + 1)]
    directory, environ = os.getcwd(), dict(os.environ)
    try:
        yield
    finally:
        for fd, original in enumerate(fds):
            os.dup2(original, fd)
            os.close(original)
        os.chdir(directory)
        if os.environ != environ:
            os.environ.clear()
            os.environ.update(environ)


def _fake_invoke(number: int, *arguments: int) -> int:
    """Execute dup3 only, and skip all other system calls. The skipped fork returns 0, as a fork does in the child, so
    this process continues as the child would."""
    if number == system_calls.DUP3:
        os.dup2(arguments[0], arguments[1])
    return 0


class _StubLandlock:
    """Replaces `LandlockSlots` (`landlock_slots.py`). The methods have no effect."""

    def make_dir(self, slot: int) -> None: ...

    def ruleset(self, slot: int) -> tuple[int, int]:
        return (-1, 0)

    def exit_if_orphaned(self) -> None: ...

    def home(self, slot: int) -> str:
        return os.getcwd()
