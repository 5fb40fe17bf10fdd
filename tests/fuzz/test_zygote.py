"""A zygote may answer with any bytes at all: its calls are tried again, others get their own answers, nothing hangs."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from sandbox.types import Status
from tests.executor.zygotes import Driven, Fleet, Peer, answer, done, driven, frame

SCALARS = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4)
FIELDS = st.dictionaries(
    st.sampled_from(
        (
            "op",
            "exit_code",
            "signal",
            "wall_ms",
            "cpu_ms",
            "peak_kb",
            "stdout_truncated",
            "reason",
            "modules",
            "blobs",
            "python",
        )
    ),
    SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=2), SCALARS, max_size=2),
    max_size=5,
)
NO_TICKETS = st.sampled_from((-1, 0, 1 << 60, 2**70, True, 1.0, "1", None, [1]))
"""A zygote that gives one of its calls the answer to another cannot be told from one that does not."""
OPS = st.sampled_from(("ended", "start_failed", "still_running", "ready", "spawn", "call", ""))


@st.composite
def says(draw: st.DrawFn) -> dict[str, Any]:
    """What a zygote says instead of an answer: bytes, a frame of its own making, or a true one that was damaged."""
    return {
        "raw": draw(st.binary(max_size=40)).hex(),
        "op": draw(OPS),
        "fields": draw(FIELDS) | draw(st.just({}) | st.builds(dict, run_id=NO_TICKETS)),
        "kind": draw(st.sampled_from(("raw", "made", "damaged", "twice"))),
        "at": draw(st.integers(0, 150)),
        "binary": draw(st.booleans()),
        "gone": draw(st.integers(0, 4)),
        "fds": draw(st.integers(0, 2)),
    }


def _fuzzed(what: dict[str, Any], ticket: int) -> bytes:
    raw = bytes.fromhex(what["raw"])
    header = {"op": what["op"], "run_id": ticket, **what["fields"]}
    match what["kind"]:
        case "made":
            return frame(json.dumps({"blobs": [len(raw)], **header}), raw)
        case "damaged":
            true = (answer if what["binary"] else done)(ticket, b"damaged")
            return true[: what["at"]] + raw + true[what["at"] + what["gone"] :]
        case "twice":
            return done(ticket, b"damaged") + frame(json.dumps({"blobs": [0], **header}), b"")
    return raw


def _behave(fleet: Fleet, peer: Peer, ticket: int, code: str) -> None:
    """The first time a call comes it is met with what it says; then it is answered. Silence ends in death."""
    fleet.started[code] += 1
    what = json.loads(code)
    if what is None or fleet.started[code] > 1:
        peer.ok(ticket)
        return
    with open(os.devnull) as null:
        peer.say(_fuzzed(what, ticket), (null.fileno(),) * what["fds"])
    fleet._nursery.start_soon(_die_later, peer)


async def _die_later(peer: Peer) -> None:
    await trio.sleep(1)
    peer.end()


@settings(max_examples=120)
@given(st.lists(says(), min_size=1, max_size=4))
def test_any_bytes_cost_no_more_than_a_retry(fuzzed: list[dict[str, Any]]) -> None:
    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fleet, "behave", _behave)
            async with driven(patch, attempts=100) as driver:
                await _live_through(driver, fuzzed)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def _live_through(driver: Driven, fuzzed: list[dict[str, Any]]) -> None:
    codes = [json.dumps(what) for what in fuzzed]
    seqs = driver.submit(*codes)
    plain = driver.submit(*["null"] * 4)
    await driver.all_of([*seqs, *plain])
    for seq in plain:
        assert (driver.answers[seq].status, driver.answers[seq].stdout) == (Status.OK, "null")
    for seq, code in zip(seqs, codes, strict=True):
        result = driver.answers[seq]
        assert result.attempts == 1 or result.stdout == code, "the answer is its own"
        assert result.status is not Status.UNAVAILABLE
    assert (await driver.run("null"))[0].status is Status.OK
    driver.check_at_rest()
