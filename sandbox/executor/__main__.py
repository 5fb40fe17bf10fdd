"""`python -m sandbox.executor --fd N`: started by a gateway, with one end of a socket pair as descriptor N."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys

import trio

from sandbox.executor.connection import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandbox.executor", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to the gateway")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle; it closes the socket
    return trio.run(serve, socket.socket(fileno=args.fd))


if __name__ == "__main__":
    sys.exit(main())
