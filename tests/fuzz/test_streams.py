"""Damaged streams of frames: the frames before the damage are decoded, and damage raises `ProtocolError` only.

The result does not depend on how the stream is split into reads.
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
from tests.executor.fake_zygotes import ended_binary, frame

Codec = tuple[Callable[[Any], bytes], Callable[[], Any]]
"""A function that packs a text into a frame, and one that returns a new unpacker for the frames."""


def _zygote_unpacker() -> zygote_frames.Unpacker:
    unpacker = zygote_frames.Unpacker()
    unpacker.max_body_bytes = 1000
    return unpacker


CODECS: dict[str, Codec] = {
    "wire": (lambda text: wire.pack(["results", [[1, text]]]), lambda: wire.Unpacker(max_frame_bytes=1000)),
    "zygote": (lambda text: frame({"op": "ended", "run_id": 1}, text.encode(), b""), _zygote_unpacker),
    "zygote, ended": (lambda text: ended_binary(1, text.encode()), _zygote_unpacker),
}


def decode(unpacker: Any, pieces: list[bytes]) -> tuple[list[Any], str]:
    """Feed the pieces to an unpacker. Return the decoded frames, and the text of the error or "" if there was none."""
    frames: list[Any] = []
    try:
        for piece in pieces:
            unpacker.feed(piece)
            for received in unpacker:
                frames.append(received)
    except ProtocolError as error:
        assert len(str(error)) < 500
        return frames, str(error)
    return frames, ""


def split(stream: bytes, positions: list[int]) -> list[bytes]:
    """Split a stream at these positions."""
    bounds = [0, *sorted(min(position, len(stream)) for position in positions), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("codec", CODECS)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=10), min_size=1, max_size=4),
    damage_at=st.integers(0, 400),
    removed_bytes=st.integers(0, 9),
    inserted=st.binary(max_size=9),
    positions=st.lists(st.integers(0, 400), max_size=6),
)
def test_frames_before_the_damage_are_decoded(
    codec: str, texts: list[str], damage_at: int, removed_bytes: int, inserted: bytes, positions: list[int]
) -> None:
    pack, new_unpacker = CODECS[codec]
    packed = [pack(text) for text in texts]
    stream = b"".join(packed)
    damaged = stream[:damage_at] + inserted + stream[damage_at + removed_bytes :]
    all_frames, _ = decode(new_unpacker(), [stream])
    frames, error = decode(new_unpacker(), [damaged])
    intact = sum(end <= damage_at for end in itertools.accumulate(map(len, packed)))
    assert len(all_frames) == len(texts)
    assert frames[:intact] == all_frames[:intact]
    assert decode(new_unpacker(), split(damaged, positions)) == (frames, error)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=60), positions=st.lists(st.integers(0, 60), max_size=4))
def test_any_bytes_are_decoded_the_same_however_split(codec: str, data: bytes, positions: list[int]) -> None:
    _, new_unpacker = CODECS[codec]
    assert decode(new_unpacker(), split(data, positions)) == decode(new_unpacker(), [data])
