"""Level `none`: the guest as an ordinary child process. It sees what the server's user sees.

What is left is its lifetime (it dies with the launcher, the launcher with the server), a clean environment, no core
dumps, no inherited descriptors; the rlimits of each call are the guest's to set.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from sandbox.jail import launcher
from sandbox.jail.spec import JailSpec


def main() -> NoReturn:
    spec, fd = JailSpec.decode(sys.argv[1]), int(sys.argv[2])
    parent = launcher.detach_from_server()
    guest = os.fork()
    if guest == 0:
        launcher.exec_guest(spec, fd)
    os.close(fd)
    os._exit(launcher.wait_or_kill(parent, guest))


if __name__ == "__main__":
    main()
