"""From a decoded body to a `Batch`: validation, defaults, ids and the operator's ceilings.

One call that is malformed fills its own slot and leaves the others alone; a malformed batch is `InvalidCall`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandbox.config import ServeConfig
from sandbox.errors import InvalidCall, RequestRefused
from sandbox.gateway.admission import Batch
from sandbox.types import Call, Limits, unavailable

BATCH_FIELDS: dict[str, str] = {
    "calls": "the calls; results come back in this order",
    "defaults": "fields for calls that leave them out",
    "queue_timeout_s": "seconds a call may wait for a slot, at most the operator's",
}
CHUNK = 256
"""Calls validated between two turns of the loop, about 1 ms."""


def read_call(raw: Any, config: ServeConfig) -> Batch:
    """The body of /v1/execute as a batch of one. Raises `InvalidCall`."""
    timeout_s = config.queue_timeout_s
    if isinstance(raw, dict) and "queue_timeout_s" in raw:
        timeout_s = _timeout_s(raw.pop("queue_timeout_s"), "call", timeout_s)
    call = Call.decode(raw)
    batch = Batch(1, timeout_s)
    _add(batch, 0, call, call.id, config.max_limits)
    return batch


async def read_batch(raw: Any, config: ServeConfig) -> tuple[Batch, int]:
    """The body of /v1/batch, and how many of its calls are malformed. Raises `InvalidCall` or `RequestRefused`."""
    if not isinstance(raw, Mapping):
        raise InvalidCall(f"batch: expected an object with calls, got {type(raw).__name__}")
    unknown = [name for name in raw if name not in BATCH_FIELDS]
    if unknown:
        raise InvalidCall(f"batch: unknown field {unknown[0]!r:.80}; the fields are {', '.join(BATCH_FIELDS)}")
    calls = _calls(raw.get("calls"), config.batch_calls)
    defaults = Call.decode_defaults(raw.get("defaults"))
    batch = Batch(len(calls), _timeout_s(raw.get("queue_timeout_s"), "batch", config.queue_timeout_s))
    invalid = 0
    for index, one in enumerate(calls):
        if index % CHUNK == CHUNK - 1:
            await asyncio.sleep(0)
        try:
            call = Call.decode(one, defaults, f"calls[{index}]")
        except InvalidCall as why:
            invalid += 1
            batch.fill(index, unavailable(_id_of(one, index), "InvalidCall", str(why)).encode(binary=True))
        else:
            _add(batch, index, call, call.id or str(index), config.max_limits)
    return batch, invalid


def _calls(calls: Any, most: int) -> list[Any]:
    if not isinstance(calls, list) or not calls:
        came = "an empty list" if calls == [] else type(calls).__name__
        raise InvalidCall(f"batch.calls: expected a list of at least one call, got {came}")
    if len(calls) > most:
        raise RequestRefused(
            f"batch.calls: expected at most {most} calls, got {len(calls)}; "
            "send several batches, or start the service with a larger --batch-calls"
        )
    return calls


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
