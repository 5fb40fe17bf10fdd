"""The executor process. A gateway starts it and passes one end of a socket pair as descriptor N."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

import trio

from sandbox import logs
from sandbox.executor.connection import serve
from sandbox.jail import kernel


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandbox.executor", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the gateway")
    parser.add_argument("--parent", type=int, metavar="PID", help="die with the thread of this process that forked it")
    args = parser.parse_args()
    if args.parent is not None:
        kernel.set_parent_death_signal()
        if os.getppid() != args.parent:  # it has died before the line above
            return 1
    logs.configure()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the gateway stops gracefully, then closes the socket
    return trio.run(serve, socket.socket(fileno=args.fd), logs.configure)


if __name__ == "__main__":
    sys.exit(main())
