"""PID 1 of a jail that another program has built: starts the guest, reaps orphans, and exits when the guest exits.

    init.py PIPE_FD PROGRAM [ARGUMENT ...]

Only the program that built the jail holds the write end of the pipe. If that program dies, this process receives its
parent-death signal. If that program died before the signal was set, a read from the pipe returns end of file.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CAPABILITY_HEADER = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
_EXIT_CANNOT_START = 127  # as in shells
_SYS_CLOSE_RANGE = 436  # os.closerange uses it only if Python was built with a C library that has it
_libc = ctypes.CDLL(None)


def main() -> int:
    pipe_fd, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_blocking(pipe_fd, False)
    try:
        os.read(pipe_fd, 1)  # returns at the end of the file only, because nothing is ever written
        return 1
    except BlockingIOError:
        os.close(pipe_fd)
    null = os.open(os.devnull, os.O_RDWR)  # the jail's /dev/null replaces the host's
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    guest = os.fork()
    if guest == 0:
        _clear_inheritable_capabilities()
        try:
            os.execv(argv[0], argv)
        except OSError as error:
            print(f"jail: cannot start {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_EXIT_CANNOT_START)
    if _libc.syscall(_SYS_CLOSE_RANGE, 3, 0x7FFFFFFF, 0) != 0:  # the kernel has none before Linux 5.9
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _libc.capset(_CAPABILITY_HEADER, bytes(24))  # empty sets
    while True:
        pid, status = os.wait()
        if pid == guest:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _clear_inheritable_capabilities() -> None:
    """Clear the inheritable set, which calls would keep. The guest, as uid 0, regains its capabilities by execve."""
    sets = ctypes.create_string_buffer(24)
    _libc.capget(_CAPABILITY_HEADER, sets)
    effective, permitted, _, *high = struct.unpack("<6I", sets)  # low words of the sets, then high words
    _libc.capset(_CAPABILITY_HEADER, struct.pack("<6I", effective, permitted, 0, high[0], high[1], 0))


if __name__ == "__main__":
    os._exit(main())
