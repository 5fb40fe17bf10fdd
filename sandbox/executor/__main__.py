"""The executor process. A gateway starts it and passes one end of a socket pair as descriptor N."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys

import trio

from sandbox.config import LOG_FORMAT
from sandbox.executor.connection import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandbox.executor", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the gateway")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the gateway stops gracefully, then closes the socket
    return trio.run(serve, socket.socket(fileno=args.fd))


if __name__ == "__main__":
    sys.exit(main())
