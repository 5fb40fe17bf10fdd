"""Streams of frames that were damaged on the way: what came before is given, and then there is one kind of error.

Where the stream is cut makes no difference to what comes out of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import wire
from sandbox.errors import ProtocolError
from sandbox.executor import zygote_frames
from tests.executor.zygotes import ended_binary, frame

Codec = tuple[Callable[[Any], bytes], Callable[[], Any]]


def _zygote_unpacker() -> zygote_frames.Unpacker:
    made = zygote_frames.Unpacker()
    made.max_body_bytes = 1000
    return made


CODECS: dict[str, Codec] = {
    "wire": (lambda text: wire.pack(["results", [[1, text]]]), lambda: wire.Unpacker(max_frame_bytes=1000)),
    "zygote": (lambda text: frame({"op": "ended", "run_id": 1}, text.encode(), b""), _zygote_unpacker),
    "zygote's answers": (lambda text: ended_binary(1, text.encode()), _zygote_unpacker),
}


def read(made: Any, pieces: list[bytes]) -> tuple[list[Any], str]:
    """The frames that came out, and what ended them."""
    received: list[Any] = []
    try:
        for piece in pieces:
            made.feed(piece)
            for whole in made:
                received.append(whole)
    except ProtocolError as why:
        assert len(str(why)) < 500
        return received, str(why)
    return received, ""


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(min(place, len(stream)) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("codec", CODECS)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=10), min_size=1, max_size=4),
    at=st.integers(0, 400),
    gone=st.integers(0, 9),
    put=st.binary(max_size=9),
    places=st.lists(st.integers(0, 400), max_size=6),
)
def test_damage_is_found_no_earlier_than_it_is_there(
    codec: str, texts: list[str], at: int, gone: int, put: bytes, places: list[int]
) -> None:
    pack, unpacker = CODECS[codec]
    parts = [pack(text) for text in texts]
    stream = b"".join(parts)
    damaged = stream[:at] + put + stream[at + gone :]
    whole, _ = read(unpacker(), [stream])
    received, error = read(unpacker(), [damaged])
    ends = itertools.accumulate(map(len, parts))
    before = sum(end <= at for end in ends)
    assert len(whole) == len(texts)
    assert received[:before] == whole[:before]
    assert read(unpacker(), cut(damaged, places)) == (received, error)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=60), places=st.lists(st.integers(0, 60), max_size=4))
def test_any_bytes_come_out_the_same_however_cut(codec: str, data: bytes, places: list[int]) -> None:
    _, unpacker = CODECS[codec]
    assert read(unpacker(), cut(data, places)) == read(unpacker(), [data])
