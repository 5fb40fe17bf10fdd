"""The guest's end of the frames gets what the executor sent, wherever the stream was cut."""

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

GUEST = Path(__file__).resolve().parents[2] / "sandbox" / "guest"
NAMES = ("wiped_memory", "frames")


@pytest.fixture(scope="module")
def guest() -> Iterator[Any]:
    """The guest's modules, imported as it does: by bare name, from beside each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(GUEST))
        yield SimpleNamespace(**{name: __import__(name) for name in NAMES})
        for name in NAMES:
            del sys.modules[name]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.binary(max_size=40), max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(1, 500), max_size=8),
)
def test_frames_survive_any_cut(guest: Any, sent: list[list[bytes]], places: list[int]) -> None:
    stream = b"".join(zygote_frames.pack({"op": "call", "n": n}, blobs) for n, blobs in enumerate(sent))
    ends = sorted({0, *(min(place, len(stream)) for place in places), len(stream)})
    ours, theirs = socket.socketpair()
    got = []
    with ours, theirs:
        incoming = guest.frames.Frames(theirs)
        for start, end in itertools.pairwise(ends):
            ours.sendall(stream[start:end])
            for header, body in incoming.receive():
                got.append((header["n"], [bytes(blob) for blob in guest.frames.cut(body, header["blobs"])]))
    assert got == list(enumerate(sent))
