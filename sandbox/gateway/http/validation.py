"""Builds a `Batch` from a decoded body: checks fields, applies defaults, ids and the operator's maximum limits.

A malformed call gets the result `invalid` and does not affect the other calls of its batch. A malformed batch raises
`InvalidCall`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sandbox import verify
from sandbox.config import ServeConfig
from sandbox.errors import InvalidCall, RequestRefused
from sandbox.fields import MAX_LABEL_CHARS, check_names, check_number
from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.http.codec import Json
from sandbox.own_profiles import check_profile
from sandbox.tenants import Tenant
from sandbox.types import DEADLINE, Call, Limits, Profile, invalid_result

BATCH_FIELDS: dict[str, str] = {
    "calls": "the calls; results are in the same order",
    "defaults": "values for fields that a call omits",
    "queue_timeout_s": "seconds that a call may wait for a slot, at most the server's --queue-timeout-s",
    "deadline_s": f"{DEADLINE.doc}; of this and the call's own deadline_s the earlier one counts",
}
VERIFY_FIELDS: dict[str, str] = {
    "pairs": "the pairs of a right answer and an answer to check; verdicts are in the same order",
    **verify.OPTION_FIELDS,
    **verify.VERIFY_CALL_FIELDS,
    "queue_timeout_s": BATCH_FIELDS["queue_timeout_s"],
}
PAIR_FIELDS: dict[str, str] = {
    "gold": "the right answer as LaTeX or plain text, or a solution that ends with it",
    "answer": "the answer to check, or a whole completion that has it; at most 1048576 characters",
}
CALLS_PER_YIELD = 256
"""Calls validated before the task yields to the event loop, about 1 ms."""


class ParsedBatch(NamedTuple):
    """A batch that is ready for admission, and the number of its calls that are malformed."""

    batch: Batch
    malformed: int


async def parse_call(raw: Json, config: ServeConfig) -> ParsedBatch:
    """Parse the body of /v1/execute as a batch of one call. Raises `InvalidCall`."""
    timeout_s = config.queue_timeout_s
    if isinstance(raw, dict) and "queue_timeout_s" in raw:
        timeout_s = check_queue_timeout(raw.pop("queue_timeout_s"), "call", timeout_s)
    return batch_of_one(_decode_call(raw, None, "call", config), config, timeout_s)


def batch_of_one(call: Call, config: ServeConfig, queue_timeout_s: float | None = None) -> ParsedBatch:
    """Return a batch of one call. Without `queue_timeout_s` it may wait as long as the server allows."""
    batch = Batch(1, config.queue_timeout_s if queue_timeout_s is None else queue_timeout_s)
    _add(batch, 0, call, call.id, config.max_limits)
    return ParsedBatch(batch, 0)


async def parse_batch(raw: Json, config: ServeConfig, owner: Tenant | None = None) -> ParsedBatch:
    """Parse the body of /v1/batch. A call that names another tenant than `owner`, the tenant of the request's token, is
    malformed. Raises `InvalidCall` or `RequestRefused`."""
    check_fields(raw, BATCH_FIELDS, "batch", "calls")
    calls = check_items(raw.get("calls"), "batch.calls", "call", config.batch_calls)
    defaults = Call.decode_defaults(raw.get("defaults"))
    timeout_s = check_queue_timeout(raw.get("queue_timeout_s"), "batch", config.queue_timeout_s)
    deadline_s = check_number(raw["deadline_s"], "batch.deadline_s", DEADLINE) if "deadline_s" in raw else math.inf
    return await _parse_all(
        calls,
        lambda item, index: _decode_call(item, defaults, f"calls[{index}]", config, owner),
        timeout_s,
        config,
        deadline_s,
    )


async def parse_pairs(raw: Json, config: ServeConfig) -> ParsedBatch:
    """Parse the body of /v1/verify as calls that check its pairs. Raises `InvalidCall` or `RequestRefused`."""
    check_fields(raw, VERIFY_FIELDS, "verify", "pairs")
    pairs = check_items(raw.get("pairs"), "verify.pairs", "pair", config.batch_calls)
    shared = {name: value for name, value in raw.items() if name not in ("pairs", "queue_timeout_s")}
    template = verify.check_template(shared)
    timeout_s = check_queue_timeout(raw.get("queue_timeout_s"), "verify", config.queue_timeout_s)
    return await _parse_all(
        pairs,
        lambda item, index: verify.build_check(*verify.decode_pair(item, f"pairs[{index}]"), template),
        timeout_s,
        config,
    )


async def set_tenant(batch: Batch, tenant: Tenant) -> None:
    """Give a parsed batch the owner of the request's token, whose bounds then apply to each call. Raises `InvalidCall`
    if a call names another tenant."""
    batch.tenant = tenant
    for n, call in enumerate(batch.calls):
        if n % CALLS_PER_YIELD == CALLS_PER_YIELD - 1:
            await asyncio.sleep(0)
        call.set_tenant(tenant)


async def _parse_all(
    items: list[Json],
    decode: Callable[[Json, int], Call],
    timeout_s: float,
    config: ServeConfig,
    deadline_s: float = math.inf,
) -> ParsedBatch:
    batch = Batch(len(items), timeout_s, deadline_s)
    malformed = 0
    for index, item in enumerate(items):
        if index % CALLS_PER_YIELD == CALLS_PER_YIELD - 1:
            await asyncio.sleep(0)
        try:
            call = decode(item, index)
        except InvalidCall as error:
            malformed += 1
            batch.set_result(index, invalid_result(id_of(item, index), str(error)).encode(binary=True))
        else:
            _add(batch, index, call, call.id or str(index), config.max_limits)
    return ParsedBatch(batch, malformed)


def _decode_call(
    raw: Json, defaults: Call | None, where: str, config: ServeConfig, owner: Tenant | None = None
) -> Call:
    call = Call.decode(raw, defaults, where)
    if call.profile.__class__ is not Profile:
        check_profile(call.profile, config.own_profiles, where)
    if owner is not None:
        owner.check_owner(call.tenant, where)
    return call


def check_fields(raw: Json, fields: Mapping[str, str], where: str, required: str) -> None:
    """Raises `InvalidCall` if `raw` is no object, or has other fields."""
    if not isinstance(raw, Mapping):
        raise InvalidCall(f"{where}: expected an object with {required}, got {type(raw).__name__}")
    check_names(raw, fields, where)


def check_items(items: Json, where: str, noun: str, max_items: int) -> list[Json]:
    """Return the items of a batch. Raises `InvalidCall` or `RequestRefused`."""
    if not isinstance(items, list) or not items:
        received = "an empty list" if items == [] else type(items).__name__
        raise InvalidCall(f"{where}: expected a list of at least one {noun}, got {received}")
    if len(items) > max_items:
        raise RequestRefused(
            f"{where}: expected at most {max_items} {noun}s, got {len(items)}; "
            "send several batches, or start the server with a larger --batch-calls"
        )
    return items


def check_queue_timeout(value: Json, where: str, max_s: float) -> float:
    """Return the seconds that a call may wait for a slot. Raises `InvalidCall`."""
    if value is None:
        return max_s
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidCall(f"{where}.queue_timeout_s: expected seconds above 0, got {value!r:.80}")
    return float(min(value, max_s))  # in this order, because no float represents the largest integers


def id_of(raw: Json, index: int) -> str:
    """Return the id of a malformed call, or its index if the id is malformed too."""
    call_id = raw.get("id") if isinstance(raw, Mapping) else None
    return call_id if isinstance(call_id, str) and 0 < len(call_id) <= MAX_LABEL_CHARS else str(index)


def _add(batch: Batch, index: int, call: Call, call_id: str, max_limits: Limits) -> None:
    limits, clamped = call.limits.clamped(max_limits)
    batch.add(index, call.with_limits(limits) if clamped else call, call_id, clamped)
