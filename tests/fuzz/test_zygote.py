"""Tests of zygotes (the interpreters that fork once per call) that send any bytes. Their calls are retried, other calls
get their own results, and nothing hangs."""

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
from tests.executor.fake_zygotes import (
    ExecutorDriver,
    FakeZygote,
    Fleet,
    driven_executor,
    ended_binary,
    ended_json,
    frame,
)

SCALARS = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4)
ENDED_FIELDS = ("exit_code", "signal", "wall_ms", "cpu_ms", "peak_kb", "stdout_truncated")
FIELDS = st.dictionaries(
    st.sampled_from((*ENDED_FIELDS, "op", "reason", "modules", "blobs", "python")),
    SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=2), SCALARS, max_size=2),
    max_size=5,
)
INVALID_RUN_IDS = st.sampled_from((-1, 0, 1 << 60, 2**70, True, 1.0, "1", None, [1]))
"""Run ids that no running call has. The ids of other running calls are left out, since the executor cannot notice that
a zygote has swapped the results of two of its calls."""
OPS = st.sampled_from(("ended", "start_failed", "still_running", "ready", "spawn", "call", ""))


@st.composite
def replies(draw: st.DrawFn) -> dict[str, Any]:
    """Describe what a zygote sends in place of a result (`_encode_reply`): raw bytes, an invented frame, a damaged
    result, or a result and another frame."""
    return {
        "raw": draw(st.binary(max_size=40)).hex(),
        "op": draw(OPS),
        "fields": draw(FIELDS) | draw(st.just({}) | st.builds(dict, run_id=INVALID_RUN_IDS)),
        "kind": draw(st.sampled_from(("raw", "invented", "damaged", "twice"))),
        "damage_at": draw(st.integers(0, 150)),
        "is_binary": draw(st.booleans()),
        "removed_bytes": draw(st.integers(0, 4)),
        "fds": draw(st.integers(0, 2)),
    }


def _encode_reply(reply: dict[str, Any], run_id: int) -> bytes:
    raw = bytes.fromhex(reply["raw"])
    header = {"op": reply["op"], "run_id": run_id, **reply["fields"]}
    match reply["kind"]:
        case "invented":
            return frame(json.dumps({"blobs": [len(raw)], **header}), raw)
        case "damaged":
            valid = (ended_binary if reply["is_binary"] else ended_json)(run_id, b"damaged")
            start = reply["damage_at"]
            return valid[:start] + raw + valid[start + reply["removed_bytes"] :]
        case "twice":
            return ended_json(run_id, b"damaged") + frame(json.dumps({"blobs": [0], **header}), b"")
    return raw


def _behave(fleet: Fleet, zygote: FakeZygote, run_id: int, code: str) -> None:
    """Replace `Fleet.behave`. The code of a call is a reply as JSON.

    When the call starts for the first time, send the reply. At a retry, or if the reply is null, send a result. A
    zygote that has sent a reply dies a second later, since the executor may wait for the rest of a frame.
    """
    fleet.started[code] += 1
    reply = json.loads(code)
    if reply is None or fleet.started[code] > 1:
        zygote.ok(run_id)
        return
    with open(os.devnull) as null:
        zygote.send(_encode_reply(reply, run_id), (null.fileno(),) * reply["fds"])
    fleet._nursery.start_soon(_die_later, zygote)


async def _die_later(zygote: FakeZygote) -> None:
    await trio.sleep(1)
    zygote.end()


@settings(max_examples=120)
@given(st.lists(replies(), min_size=1, max_size=4))
def test_any_reply_of_a_zygote_costs_at_most_retries(zygote_replies: list[dict[str, Any]]) -> None:
    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fleet, "behave", _behave)
            async with driven_executor(patch, attempts=100) as driver:
                await _check_results(driver, zygote_replies)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def _check_results(driver: ExecutorDriver, zygote_replies: list[dict[str, Any]]) -> None:
    codes = [json.dumps(reply) for reply in zygote_replies]
    seqs = driver.submit(*codes)
    undisturbed = driver.submit(*["null"] * 4)
    await driver.wait_for([*seqs, *undisturbed])
    for seq in undisturbed:
        assert (driver.results[seq].status, driver.results[seq].stdout) == (Status.OK, "null")
    for seq, code in zip(seqs, codes, strict=True):
        result = driver.results[seq]
        assert result.attempts == 1 or result.stdout == code, "a retried call has the output of its own code"
        assert result.status is not Status.UNAVAILABLE
    assert (await driver.run("null"))[0].status is Status.OK
    driver.check_idle()
