"""Level `none`: a program that runs the guest as an ordinary child process, which sees what the server's user sees.

The guest still dies with the launcher and the launcher with the server; it has a clean environment, inherits no
descriptors and dumps no core. The guest itself sets the rlimits of each call.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from sandbox.jail import launcher
from sandbox.jail.spec import JailSpec


def main() -> NoReturn:
    spec, socket_fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    server_pidfd = launcher.leave_server_session()
    guest = os.fork()
    if guest == 0:
        launcher.exec_guest(spec, socket_fd)
    os.close(socket_fd)
    os._exit(launcher.wait_or_kill(server_pidfd, guest))


if __name__ == "__main__":
    main()
