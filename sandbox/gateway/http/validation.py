"""Builds a `Batch` from a decoded body: checks fields, applies defaults, ids and the operator's maximum limits.

A malformed call gets the result `invalid` and does not affect the other calls of its batch. A malformed batch raises
`InvalidCall`.

A form is the body of one request. It is read in two steps. `check` reads the decoded body and yields its items: a
`BatchHead`, then a `CheckedCall` or a `MalformedCall` for each index. `add` builds the batch from the items. For a
large body, `check` runs in another process (`body_worker`). There, `encode` turns an item into plain data; in the
gateway, `receive` decodes the data and adds the item. Whatever the body contains, an item is bounded by the rules of a
call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import monotonic
from typing import Any, ClassVar, NamedTuple, Protocol

from sandbox.errors import InvalidCall, RequestRefused
from sandbox.fields import MAX_LABEL_CHARS, check_names, check_number
from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.http.codec import MAX_MAP_LEN, Json
from sandbox.judging import answers as verify
from sandbox.settings.profiles import check_profile
from sandbox.settings.server import ServeConfig
from sandbox.settings.tenants import Tenant
from sandbox.types import (
    DEADLINE_RULE,
    EncodedCall,
    Profile,
    check_call,
    check_defaults,
    clamp,
    invalid_result,
    with_defaults,
)

BATCH_FIELDS: dict[str, str] = {
    "calls": "the calls; results are in the same order",
    "defaults": "values for fields that a call omits",
    "queue_timeout_s": "seconds that a call may wait for a slot, at most the server's --queue-timeout-s",
    "deadline_s": f"{DEADLINE_RULE.doc}; of this and the call's own deadline_s the earlier one counts",
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
STEP_S = 0.005
"""Seconds of work on the items of one body after which the task yields to the event loop."""
ITEMS_PER_CLOCK_READ = 16
"""Items that are added to a form between two readings of the clock."""
NO_DEFAULTS: EncodedCall = {}


class ParsedBatch(NamedTuple):
    """A batch that is ready for admission, and the number of its calls that are malformed."""

    batch: Batch
    malformed: int


class BatchHead(NamedTuple):
    """The fields of a batch. `extra` is plain data that the route needs later, for its response."""

    size: int
    queue_timeout_s: float
    deadline_s: float = math.inf
    defaults: EncodedCall = NO_DEFAULTS
    extra: Json = None


class CheckedCall(NamedTuple):
    """A valid call without the defaults. `extra` is plain data that the route needs later, for its response."""

    call_index: int
    call: EncodedCall
    call_id: str
    extra: Json = None


class MalformedCall(NamedTuple):
    """A call that is refused, and why."""

    call_index: int
    call_id: str
    message: str


Item = BatchHead | CheckedCall | MalformedCall
_ITEM_TYPES = {item_type.__name__: item_type for item_type in (BatchHead, CheckedCall, MalformedCall)}


class Form(Protocol):
    """The body of one request. `owner` is the tenant of the request's token."""

    max_keys: ClassVar[int]
    """Maximum number of keys of one object in the body."""

    owner: Tenant | None

    def __init__(self, config: ServeConfig, owner: Tenant | None) -> None: ...
    @staticmethod
    def max_calls(config: ServeConfig) -> int:
        """Return a number of calls: a body may have as many objects as a batch of this many calls."""
        ...

    def check(self, raw: Json) -> Iterator[Any]: ...
    def encode(self, item: Any) -> Iterable[list[Json]]: ...
    def receive(self, encoded: list[Json]) -> None: ...
    def add(self, item: Any) -> None: ...


class CallsForm:
    """A form whose items are calls. Subclasses have `check`."""

    max_keys: ClassVar[int] = MAX_MAP_LEN

    def __init__(self, config: ServeConfig, owner: Tenant | None = None) -> None:
        self.config = config
        self.owner = owner
        self.head: BatchHead
        self.malformed = 0
        self.batch: Batch | None = None
        """None before the head is added."""

    @property
    def parsed(self) -> ParsedBatch:
        """The batch, once all items are added."""
        assert self.batch is not None
        return ParsedBatch(self.batch, self.malformed)

    @staticmethod
    def max_calls(config: ServeConfig) -> int:
        return config.batch_calls

    def check(self, raw: Json) -> Iterator[Item]:
        """Yield the items of a decoded body. Raises `InvalidCall` or `RequestRefused`."""
        raise NotImplementedError

    def encode(self, item: Item) -> Iterable[list[Json]]:
        """Return an item as plain data. The head comes first."""
        return [[type(item).__name__, *item]]

    def receive(self, encoded: list[Json]) -> None:
        """Add an encoded item."""
        kind, *values = encoded
        self.add(_ITEM_TYPES[kind](*values))

    def add(self, item: Item) -> None:
        """Add an item to the batch."""
        if isinstance(item, BatchHead):
            self.head = item
            self.batch = Batch(item.size, item.queue_timeout_s, item.deadline_s)
            return
        assert self.batch is not None
        if isinstance(item, CheckedCall):
            call, clamped = clamp(with_defaults(item.call, self.head.defaults), self.config.max_limits)
            self.batch.add(item.call_index, call, item.call_id, clamped)
        else:
            self.malformed += 1
            self.batch.set_result(item.call_index, invalid_result(item.call_id, item.message).encode(binary=True))

    def _check_all(self, items: list[Json], check: Callable[[Json, int], EncodedCall]) -> Iterator[Item]:
        for index, item in enumerate(items):
            try:
                call = check(item, index)
            except InvalidCall as error:
                yield MalformedCall(index, id_of(item, index), str(error))
            else:
                yield CheckedCall(index, call, call.get("id") or str(index))


class CallForm(CallsForm):
    """The body of /v1/execute: a batch of one call."""

    def check(self, raw: Json) -> Iterator[Item]:
        timeout_s = self.config.queue_timeout_s
        if isinstance(raw, dict) and "queue_timeout_s" in raw:
            timeout_s = check_queue_timeout(raw.pop("queue_timeout_s"), "call", timeout_s)
        call = _check_call(raw, "call", self.config)
        yield BatchHead(1, timeout_s)
        yield CheckedCall(0, call, call.get("id", ""))


class BatchForm(CallsForm):
    """The body of /v1/batch. A call that names another tenant than the owner is malformed."""

    def check(self, raw: Json) -> Iterator[Item]:
        config = self.config
        check_fields(raw, BATCH_FIELDS, "batch", "calls")
        calls = check_items(raw.get("calls"), "batch.calls", "call", config.batch_calls)
        defaults = check_defaults(raw.get("defaults"))
        timeout_s = check_queue_timeout(raw.get("queue_timeout_s"), "batch", config.queue_timeout_s)
        deadline_s = (
            check_number(raw["deadline_s"], "batch.deadline_s", DEADLINE_RULE) if "deadline_s" in raw else math.inf
        )
        yield BatchHead(len(calls), timeout_s, deadline_s, defaults)
        yield from self._check_all(
            calls, lambda item, index: _check_call(item, f"calls[{index}]", config, self.owner, defaults)
        )


class PairsForm(CallsForm):
    """The body of /v1/verify, as calls that check its pairs."""

    def check(self, raw: Json) -> Iterator[Item]:
        config = self.config
        check_fields(raw, VERIFY_FIELDS, "verify", "pairs")
        pairs = check_items(raw.get("pairs"), "verify.pairs", "pair", config.batch_calls)
        shared = {name: value for name, value in raw.items() if name not in ("pairs", "queue_timeout_s")}
        template = verify.check_template(shared)
        timeout_s = check_queue_timeout(raw.get("queue_timeout_s"), "verify", config.queue_timeout_s)
        yield BatchHead(len(pairs), timeout_s)
        yield from self._check_all(
            pairs,
            lambda item, index: verify.build_check(*verify.decode_pair(item, f"pairs[{index}]"), template).encode(
                binary=True
            ),
        )


async def fill(form: Form, items: Iterable[Any]) -> None:
    """Add all items to a form. Yields to the event loop after each `STEP_S` of work."""
    step_ends_at = 0.0
    for number, item in enumerate(items):
        form.add(item)
        if number % ITEMS_PER_CLOCK_READ == ITEMS_PER_CLOCK_READ - 1 and monotonic() > step_ends_at:
            await asyncio.sleep(0)
            step_ends_at = monotonic() + STEP_S


async def parse(form: CallsForm, raw: Json) -> ParsedBatch:
    """Check a decoded body, and return its batch. Raises `InvalidCall` or `RequestRefused`."""
    await fill(form, form.check(raw))
    return form.parsed


async def set_tenant(batch: Batch, tenant: Tenant) -> None:
    """Give a parsed batch the owner of the request's token, whose bounds then apply to each call. Raises `InvalidCall`
    if a call names another tenant."""
    batch.tenant = tenant
    step_ends_at = monotonic() + STEP_S
    for call in batch.calls:
        call.set_tenant(tenant)
        if monotonic() > step_ends_at:
            await asyncio.sleep(0)
            step_ends_at = monotonic() + STEP_S


def _check_call(
    raw: Json,
    where: str,
    config: ServeConfig,
    owner: Tenant | None = None,
    defaults: EncodedCall = NO_DEFAULTS,
) -> EncodedCall:
    call = check_call(raw, where)
    check_profile_and_tenant(call, where, config, owner, defaults)
    return call


def check_profile_and_tenant(
    call: EncodedCall, where: str, config: ServeConfig, owner: Tenant | None, defaults: EncodedCall = NO_DEFAULTS
) -> None:
    """Raises `InvalidCall` if the server has no profile of the call's name, or if the call names another tenant than
    the owner, which is the tenant of the request's token."""
    profile = call.get("profile", defaults.get("profile", Profile.AUTO))
    if profile.__class__ is not Profile:  # every server has the built-in profiles
        check_profile(profile, config.own_profiles, where)
    if owner is not None:
        owner.check_owner(call.get("tenant", defaults.get("tenant", "")), where)


def check_fields(raw: Json, fields: Mapping[str, str], where: str, required: str) -> None:
    """Raises `InvalidCall` if `raw` is no object, or has a field that is not in `fields`."""
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
    return float(min(value, max_s))  # `min` first: `float` raises an error for a very large integer


def id_of(raw: Json, index: int) -> str:
    """Return the id of a malformed call, or its index if the id is malformed too."""
    call_id = raw.get("id") if isinstance(raw, Mapping) else None
    return call_id if isinstance(call_id, str) and 0 < len(call_id) <= MAX_LABEL_CHARS else str(index)
