"""Level `none`: a program that runs the guest as an ordinary child process, which sees what the server's user sees.

The guest still dies with the launcher and the launcher with the server; it has a clean environment, inherits no
descriptors and dumps no core. The guest itself sets the rlimits of each call.

A killed guest leaves the working directories of its calls behind. The next launcher removes them.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import sys
from contextlib import suppress
from typing import NoReturn

from sandbox.guest.protocol import CALL_DIR_PREFIX
from sandbox.jail import launcher
from sandbox.jail.spec import JailSpec


def main() -> NoReturn:
    spec, socket_fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    server_pidfd = launcher.leave_server_session()
    _remove_left_directories()
    guest = os.fork()
    if guest == 0:
        launcher.exec_guest(spec, socket_fd)
    os.close(socket_fd)
    os._exit(launcher.wait_or_kill(server_pidfd, guest))


def _remove_left_directories() -> None:
    """Remove the working directories of calls that no zygote holds a lock on."""
    for path in glob.glob(f"/tmp/{CALL_DIR_PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or is in use
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(directory)


if __name__ == "__main__":
    main()
