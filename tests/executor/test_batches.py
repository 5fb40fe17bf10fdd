"""Results are sent to the gateway in frames of bounded size, and none is lost for being too large."""

from __future__ import annotations

import pytest

from sandbox import wire
from sandbox.executor.connection import _encode_results, _split_into_frames
from sandbox.types import EncodedResult, Result, Status
from sandbox.wire import MAX_FRAME_CALLS, TARGET_FRAME_BYTES


def results(*sizes: int) -> list[tuple[int, EncodedResult]]:
    """Return results of these sizes in bytes. Half of the bytes are in stdout, and half are in a file. The seq of a
    result is its index."""
    contents = [("x" * (size // 2), b"x" * (size - size // 2)) for size in sizes]
    decoded = [Result("", Status.OK, stdout=text, files={"f": data}) for text, data in contents]
    return [(seq, result.encode(binary=True)) for seq, result in enumerate(decoded)]


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0] * (3 * MAX_FRAME_CALLS + 8),
        [TARGET_FRAME_BYTES + 1] * 3,
        [1, TARGET_FRAME_BYTES, 1],
        [TARGET_FRAME_BYTES // 3] * 10,
    ],
    ids=["no result", "too many", "each too large", "one fills a frame", "three fill a frame"],
)
def test_frames_are_bounded_and_keep_all_results_in_order(sizes: list[int]) -> None:
    unsplit = results(*sizes)
    frames = _split_into_frames(unsplit)
    assert [numbered_result for frame in frames for numbered_result in frame] == unsplit
    assert all(1 <= len(frame) <= MAX_FRAME_CALLS for frame in frames)
    frame_bytes = [sum(sizes[seq] for seq, _ in frame) for frame in frames]
    assert all(size <= TARGET_FRAME_BYTES or len(frame) == 1 for size, frame in zip(frame_bytes, frames, strict=True))


def test_a_result_larger_than_a_frame_becomes_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10_000)
    unpacker = wire.Unpacker()
    unpacker.feed(_encode_results(results(20_000)))
    (frame,) = list(unpacker)
    kind, ((seq, encoded),) = frame
    result = Result.decode(encoded)
    assert (kind, seq, result.status) == ("results", 0, Status.UNAVAILABLE)
    assert result.error is not None
    assert result.error.type == "ResultTooLarge"
