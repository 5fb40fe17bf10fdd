"""PID 1 of a jail that another program made: starts the guest, reaps orphans, and ends with the guest, which ends all.

    init.py ALIVE PROGRAM [ARGUMENT ...]

The other end of the pipe ALIVE is held by the program that made the jail and by nobody else. That one's end is told by
a death signal, or, where it came too early for that, by the pipe.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CAPABILITY_HEADER = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
_CANNOT_START = 127
_SYS_CLOSE_RANGE = 436  # os.closerange makes it only if Python was built with a C library that has it
_libc = ctypes.CDLL(None)


def main() -> int:
    alive, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)  # end of file
        return 1
    except BlockingIOError:
        os.close(alive)
    null = os.open(os.devnull, os.O_RDWR)  # the jail's own, in place of the host's
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    guest = os.fork()
    if guest == 0:
        _inherit_no_capabilities()
        try:
            os.execv(argv[0], argv)
        except OSError as why:
            print(f"jail: cannot start {argv[0]}: {why.strerror}", file=sys.stderr, flush=True)
        os._exit(_CANNOT_START)
    if _libc.syscall(_SYS_CLOSE_RANGE, 3, 0x7FFFFFFF, 0) != 0:  # before Linux 5.9
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _libc.capset(_CAPABILITY_HEADER, bytes(24))
    while True:
        pid, status = os.wait()
        if pid == guest:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _inherit_no_capabilities() -> None:
    """Being uid 0 gives the guest its capabilities anew. An inheritable set would stay with calls, which are not."""
    sets = ctypes.create_string_buffer(24)
    _libc.capget(_CAPABILITY_HEADER, sets)
    effective, permitted, _, *high = struct.unpack("<6I", sets)
    _libc.capset(_CAPABILITY_HEADER, struct.pack("<6I", effective, permitted, 0, high[0], high[1], 0))


if __name__ == "__main__":
    os._exit(main())
