"""The program that decodes and checks large bodies: `python -m sandbox.gateway.http.body_worker --fd N`.

A decoder holds the interpreter's lock while it runs. The lock is also held while the decoded values are freed. For a
body of 60 MB this takes seconds, in which a gateway that decoded the body itself would serve no other request. The
worker handles one body at a time and sends the gateway only the items that passed the checks (`body_frames`).
"""

from __future__ import annotations

import argparse
import gc
import socket
import traceback
from collections.abc import Iterable
from itertools import chain
from typing import Any

from sandbox.errors import InvalidCall, RequestRefused
from sandbox.gateway import heap
from sandbox.gateway.http import body_frames, codec
from sandbox.gateway.http.body_frames import BLOB, BLOB_BYTES, DONE, ERROR, FRAME_BYTES, HEADER, ITEMS, LARGE
from sandbox.gateway.http.errors import BodyError
from sandbox.gateway.http.validation import Form
from sandbox.settings.server import ServeConfig
from sandbox.settings.tenants import Tenant


def handle_body(connection: socket.socket, config: ServeConfig, request: list[Any], body: bytearray) -> None:
    """Decode and check one body, and send its items or the reason why it is refused."""
    name, content_type, owner = request
    try:
        form: Form = body_frames.find_by_name(name)(config, None if owner is None else Tenant(owner))
        raw = codec.decode(body, content_type, form.max_calls(config), form.max_keys)
        _send_items(connection, chain.from_iterable(map(form.encode, form.check(raw))))
    except (BodyError, InvalidCall, RequestRefused) as error:
        _send(connection, ERROR, body_frames.pack([f"{type(error).__module__}:{type(error).__name__}", error.args]))
    except MemoryError:
        raise
    except Exception:  # a bug of the server: the gateway logs it, and answers with 500
        _send(connection, ERROR, body_frames.pack(["builtins:RuntimeError", [traceback.format_exc()]]))
    else:
        _send(connection, DONE, b"")


def _send_items(connection: socket.socket, items: Iterable[Any]) -> None:
    """Send encoded items."""
    parts: list[bytes] = []
    size = 0
    for encoded in items:
        packed = body_frames.pack(encoded)
        if len(packed) < BLOB_BYTES:
            parts.append(packed)
            size += len(packed)
        if parts and (size >= FRAME_BYTES or len(packed) >= BLOB_BYTES):
            _send(connection, ITEMS, body_frames.array_header(len(parts)) + b"".join(parts))
            parts, size = [], 0
        if len(packed) >= BLOB_BYTES:
            blobs: list[bytes] = []
            _send(connection, LARGE, body_frames.pack(body_frames.detach(encoded, blobs)))
            for blob in blobs:
                _send(connection, BLOB, blob)
    _send(connection, ITEMS, body_frames.array_header(len(parts)) + b"".join(parts))


def _send(connection: socket.socket, kind: int, payload: bytes) -> None:
    connection.sendall(HEADER.pack(kind, len(payload)))
    connection.sendall(payload)


def _receive(connection: socket.socket, size: int) -> bytearray:
    """Return the next `size` bytes. Raises `EOFError` at the end of the connection."""
    received = bytearray(size)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return received


def _receive_frame(connection: socket.socket) -> Any:
    _, size = HEADER.unpack(_receive(connection, HEADER.size))
    return body_frames.unpack(bytes(_receive(connection, size)))


def main() -> None:
    """Handle bodies until the gateway closes the connection."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_args().fd)
    heap.use_one_arena()
    gc.freeze()
    gc.disable()  # a decoded body has no cycles, and the collector would scan its millions of objects again and again
    with connection:
        try:
            config = body_frames.decode_config(_receive_frame(connection))
            while True:
                *request, size = _receive_frame(connection)
                handle_body(connection, config, request, _receive(connection, size))
                gc.collect()
                heap.trim()
        except (EOFError, ConnectionError):  # the gateway has ended, or ends the worker because a client has gone
            pass


if __name__ == "__main__":
    main()
