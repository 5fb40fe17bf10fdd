"""From a decoded body to a `Batch`: validation, defaults, ids and the operator's ceilings.

One call that is malformed fills its own slot, as `invalid`, and leaves the others alone; a malformed batch is
`InvalidCall`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sandbox import verify
from sandbox.config import ServeConfig
from sandbox.errors import InvalidCall, RequestRefused
from sandbox.gateway.calls.call_table import Batch
from sandbox.types import Call, Limits, invalid_result

BATCH_FIELDS: dict[str, str] = {
    "calls": "the calls; results come back in this order",
    "defaults": "fields for calls that leave them out",
    "queue_timeout_s": "seconds a call may wait for a slot, at most the operator's",
}
VERIFY_FIELDS: dict[str, str] = {
    "pairs": "the right answers and those to check; verdicts come back in this order",
    **verify.VERIFY_CALL_FIELDS,
    "queue_timeout_s": BATCH_FIELDS["queue_timeout_s"],
}
PAIR_FIELDS: dict[str, str] = {
    "gold": "the right answer, as LaTeX or plain text",
    "answer": "the one to check: what is in the box, or text with a \\boxed{} in it",
}
CHUNK = 256
"""Calls validated between two turns of the loop, about 1 ms."""


async def read_call(raw: Any, config: ServeConfig) -> tuple[Batch, int]:
    """The body of /v1/execute as a batch of one, none malformed. Raises `InvalidCall`."""
    timeout_s = config.queue_timeout_s
    if isinstance(raw, dict) and "queue_timeout_s" in raw:
        timeout_s = _timeout_s(raw.pop("queue_timeout_s"), "call", timeout_s)
    call = Call.decode(raw)
    batch = Batch(1, timeout_s)
    _add(batch, 0, call, call.id, config.max_limits)
    return batch, 0


async def read_batch(raw: Any, config: ServeConfig) -> tuple[Batch, int]:
    """The body of /v1/batch, and how many of its calls are malformed. Raises `InvalidCall` or `RequestRefused`."""
    _fields(raw, BATCH_FIELDS, "batch", "calls")
    calls = _listed(raw.get("calls"), "batch.calls", "call", config.batch_calls)
    defaults = Call.decode_defaults(raw.get("defaults"))
    timeout_s = _timeout_s(raw.get("queue_timeout_s"), "batch", config.queue_timeout_s)
    return await _read(calls, lambda one, index: Call.decode(one, defaults, f"calls[{index}]"), timeout_s, config)


async def read_pairs(raw: Any, config: ServeConfig) -> tuple[Batch, int]:
    """The body of /v1/verify as calls that check its pairs, and how many of those are malformed. Raises as above."""
    _fields(raw, VERIFY_FIELDS, "verify", "pairs")
    pairs = _listed(raw.get("pairs"), "verify.pairs", "pair", config.batch_calls)
    shared = verify.shared_fields({name: raw[name] for name in verify.VERIFY_CALL_FIELDS if name in raw})
    timeout_s = _timeout_s(raw.get("queue_timeout_s"), "verify", config.queue_timeout_s)
    return await _read(
        pairs,
        lambda one, index: verify.check_call(*verify.decode_pair(one, f"pairs[{index}]"), shared),
        timeout_s,
        config,
    )


async def _read(
    items: list[Any], decode: Callable[[Any, int], Call], timeout_s: float, config: ServeConfig
) -> tuple[Batch, int]:
    """A batch of what `items` decode to, and how many of them do not."""
    batch = Batch(len(items), timeout_s)
    malformed = 0
    for index, one in enumerate(items):
        if index % CHUNK == CHUNK - 1:
            await asyncio.sleep(0)
        try:
            call = decode(one, index)
        except InvalidCall as why:
            malformed += 1
            batch.fill(index, invalid_result(_id_of(one, index), str(why)).encode(binary=True))
        else:
            _add(batch, index, call, call.id or str(index), config.max_limits)
    return batch, malformed


def _fields(raw: Any, fields: Mapping[str, str], where: str, first: str) -> None:
    if not isinstance(raw, Mapping):
        raise InvalidCall(f"{where}: expected an object with {first}, got {type(raw).__name__}")
    unknown = [name for name in raw if name not in fields]
    if unknown:
        raise InvalidCall(f"{where}: unknown field {unknown[0]!r:.80}; the fields are {', '.join(fields)}")


def _listed(items: Any, where: str, kind: str, most: int) -> list[Any]:
    if not isinstance(items, list) or not items:
        came = "an empty list" if items == [] else type(items).__name__
        raise InvalidCall(f"{where}: expected a list of at least one {kind}, got {came}")
    if len(items) > most:
        raise RequestRefused(
            f"{where}: expected at most {most} {kind}s, got {len(items)}; "
            "send several batches, or start the service with a larger --batch-calls"
        )
    return items


def _timeout_s(value: Any, where: str, most: float) -> float:
    if value is None:
        return most
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidCall(f"{where}.queue_timeout_s: expected seconds above 0, got {value!r:.80}")
    return min(float(value), most)


def _id_of(raw: Any, index: int) -> str:
    call_id = raw.get("id") if isinstance(raw, Mapping) else None
    return call_id if isinstance(call_id, str) and 0 < len(call_id) <= 256 else str(index)


def _add(batch: Batch, index: int, call: Call, call_id: str, ceiling: Limits) -> None:
    limits, clamped = call.limits.clamped(ceiling)
    batch.add(index, replace(call, limits=limits) if clamped else call, call_id, clamped)
