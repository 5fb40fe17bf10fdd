"""Tests that the guest decodes the frames which the executor has sent, however the stream is split into reads."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.executor import zygote_frames

GUEST_DIR = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
MODULES = ("protocol", "wiped_memory", "frames")  # `frames` imports the other two


@pytest.fixture(scope="module")
def guest() -> Iterator[Any]:
    """The guest's modules, imported by bare name from their directory, as the guest imports them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(GUEST_DIR))
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
        for name in MODULES:
            del sys.modules[name]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.binary(max_size=40), max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(1, 500), max_size=8),
)
def test_frames_arrive_whole_however_the_stream_is_split(
    guest: Any, sent: list[list[bytes]], split_positions: list[int]
) -> None:
    stream = b"".join(zygote_frames.pack({"op": "call", "n": n}, blobs) for n, blobs in enumerate(sent))
    bounds = sorted({0, *(min(position, len(stream)) for position in split_positions), len(stream)})
    executor_sock, guest_sock = socket.socketpair()
    received = []
    with executor_sock, guest_sock:
        reader = guest.frames.FrameReader(guest_sock)
        for start, end in itertools.pairwise(bounds):
            executor_sock.sendall(stream[start:end])
            for header, body, _ in reader.receive():
                blobs = guest.frames.split_blobs(body, header["blobs"])
                received.append((header["n"], [bytes(blob) for blob in blobs]))
    assert received == list(enumerate(sent))
