"""Results on their way to the gateway: in frames of a sane size, and none lost for being too large."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox import wire
from sandbox.executor.connection import _batches, _packed
from sandbox.types import Result, Status
from sandbox.wire import MAX_FRAME_CALLS, TARGET_FRAME_BYTES


def results(*sizes: int) -> list[tuple[int, dict[str, Any]]]:
    made = [Result("", Status.OK, stdout="x" * (size // 2), files={"f": b"x" * (size - size // 2)}) for size in sizes]
    return [(seq, result.encode(binary=True)) for seq, result in enumerate(made)]


@pytest.mark.parametrize(
    "sizes", [[], [0] * 200, [TARGET_FRAME_BYTES + 1] * 3, [1, TARGET_FRAME_BYTES, 1], [TARGET_FRAME_BYTES // 3] * 10]
)
def test_batches_are_bounded_and_keep_all_in_order(sizes: list[int]) -> None:
    made = results(*sizes)
    batches = _batches(made)
    assert [pair for batch in batches for pair in batch] == made
    assert all(1 <= len(batch) <= MAX_FRAME_CALLS for batch in batches)
    weights = [sum(sizes[seq] for seq, _ in batch) for batch in batches]
    assert all(weight <= TARGET_FRAME_BYTES or len(batch) == 1 for weight, batch in zip(weights, batches, strict=True))


def test_a_result_that_no_frame_takes_is_answered_without_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10_000)
    unpacker = wire.Unpacker()
    unpacker.feed(_packed(results(20_000)))
    (frame,) = list(unpacker)
    kind, ((seq, raw),) = frame
    result = Result.decode(raw)
    assert (kind, seq, result.status) == ("results", 0, Status.UNAVAILABLE)
    assert result.error is not None
    assert result.error.type == "ResultTooLarge"
