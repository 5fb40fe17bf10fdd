"""The driver process of Ray. A gateway starts it and passes one end of a socket pair as descriptor N."""

from __future__ import annotations

import argparse
import logging
import socket
import sys

from sandbox import logs
from sandbox.cluster.ray_nodes import drive


def main() -> int:
    parser = argparse.ArgumentParser(prog="sandbox.cluster", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the gateway")
    args = parser.parse_args()
    logs.configure(level=logging.WARNING)
    return drive(socket.socket(fileno=args.fd))


if __name__ == "__main__":
    sys.exit(main())
