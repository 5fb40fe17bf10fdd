"""Clients of the server: `AsyncClient`, and `Client` for code without an event loop.

    async with AsyncClient("http://127.0.0.1:8642") as client:
        result = await client.execute("print(1)")

- Arguments are checked here, before anything is sent: malformed ones raise `TypeError` or `InvalidCall` with the
  argument's name and index.
- A call gets a `Result` of the server, or a `ServiceError` is raised. `transport` batches, sends and retries calls.
- Results arrive one by one, so a slow call does not delay the results of other calls.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sandbox.client.judge import MAX_TESTS_AT_ONCE, RawProgram, decode_all
from sandbox.client.pending_results import Submission
from sandbox.client.sessions import AsyncSession
from sandbox.client.transport import CALL_ROUTE, Transport
from sandbox.errors import InvalidCall, ServiceError
from sandbox.fields import check_label, with_encoded_texts
from sandbox.judging.answers import build_check, check_template, decode_pair, verdict_of
from sandbox.judging.programs import JudgedProgram
from sandbox.types import Call, CellResult, Result, Verdict

DEFAULT_ENDPOINT = "http://127.0.0.1:8642"
TIMEOUT_S = 120.0
"""Seconds without data from the server after which a request has failed. The server sends a heartbeat every 15 s, and
on an overloaded machine some may be late."""
RETRIES = 8
"""Maximum number of further attempts in a row for one call. With one endpoint, the back-off between them takes at least
16 s together, enough for a restart of the server."""
BATCH_CALLS = 64
"""Calls per request."""
MAX_CONNECTIONS = 256
"""Maximum number of requests at once. Each request needs a connection."""

AnyCall = str | Call | Mapping[str, Any]
"""Source, a `Call`, or a mapping as in `calls` of POST /v1/batch, except that a text in `files` is the file's text, not
base64. `Call.decode` takes a mapping from JSON."""
Pair = tuple[str, str] | Mapping[str, str]
"""`(gold, answer)`: the right answer and the answer to check; or a mapping as in `pairs` of POST /v1/verify."""
T = TypeVar("T")
U = TypeVar("U")

_NOT_OPEN = """this {name} is not open: it was never opened, or was closed. Open it around its use:
    {keyword} {name}("http://127.0.0.1:8642") as client:
        result = {wait}client.execute("print(1)")
or call its open() before and its close() afterwards."""
_EXPECTED_CALL = "Python source (str), a Call, or a mapping as in calls of POST /v1/batch"
_EXPECTED_PROGRAM = "a mapping as in programs of POST /v1/judge"
_EXPECTED_PAIR = "a pair (gold, answer), or a mapping as in pairs of POST /v1/verify"


class AsyncClient:
    """A client for one event loop, used as `async with AsyncClient(...) as client` or between `open` and `close`.

    - `endpoints`: one URL or several. A call goes to the endpoint with the fewest calls; after a failure an endpoint
      gets no calls for a while, longer after each failure in a row.
    - `token`: the server's token, if it has one.
    - `timeout_s`: maximum seconds without any data from the server, which sends a heartbeat every 15 s. Calls may take
      longer.
    - `queue_timeout_s`: seconds that a call may wait for a slot before it gets `unavailable`. The maximum and default
      is the server's `--queue-timeout-s`.
    - `retries`: how many times in a row a call is sent again after a failure. If the failed request has returned
      results of other calls, the count starts again.
    - `batch_size`: calls per request. Requests are larger, up to 1,024 calls, only if more than `max_connections` of
      this size would be needed.
    - `gather_s`: seconds that a call waits for other calls to share its request, if another request is running when it
      is submitted. Larger requests save CPU time, because a request costs as much as several calls.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        queue_timeout_s: float | None = None,
        retries: int = RETRIES,
        batch_size: int = BATCH_CALLS,
        max_connections: int = MAX_CONNECTIONS,
        gather_s: float = 0.0,
    ) -> None:
        urls = _urls(endpoints)
        if not urls or batch_size < 1 or max_connections < 1 or retries < 0:
            raise ValueError(
                "expected an endpoint, batch_size and max_connections of at least 1, and retries of at least 0"
            )
        self._transport = Transport(
            urls,
            {"Authorization": f"Bearer {token}"} if token else {},
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            retries=retries,
            batch_size=batch_size,
            max_connections=max_connections,
            gather_s=gather_s,
        )

    async def open(self) -> AsyncClient:
        """Open the client in the running event loop. Does nothing if it is open."""
        if not self._transport.is_open:
            await self._transport.open()
        return self

    async def close(self) -> None:
        """End unfinished calls with a `ServiceError` and close all connections. Does nothing if it is closed."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def execute(self, code: AnyCall, **fields: Any) -> Result:
        """Run one call: source with the fields of `Call`, or a call with some of its fields replaced.

        Raises `TypeError` or `InvalidCall` (a `ValueError`) for a malformed call, and `ServiceError` if no attempt
        returned a result.
        """
        if not isinstance(code, Call) or fields:
            code = Call.decode(_with_encoded_texts({**_wire_fields(code, "code"), **fields}))
        pending = self._opened().submit(_submission(code, ""))
        try:
            return await pending.future
        finally:
            self._transport.abandon([pending])

    async def run_batch(self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None) -> list[Result]:
        """Run all `calls` and return their results in the same order. `defaults` sets fields that a call omits.

        Raises as `execute` does; the message contains the index of the call, and `ServiceError.results` has the results
        that had arrived.
        """
        submissions, transport = _submissions(calls, defaults), self._opened()
        submitted = [transport.submit(submission) for submission in submissions]
        try:
            return await asyncio.gather(*(pending.future for pending in submitted))
        except ServiceError as error:
            raise error.with_results([_result_of(pending.future) for pending in submitted]) from None
        finally:
            transport.abandon(submitted)

    def stream(
        self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Run all `calls` and yield the index and result of each as it ends. Leaving the loop cancels the rest."""
        submissions = _submissions(calls, defaults)
        return self._opened().stream(submissions)

    async def verify(self, pairs: Sequence[Pair], **fields: Any) -> list[Verdict]:
        """Check each pair of the right answer and a given answer, and return the verdicts in the same order.

        Both may be whole completions. `fields` may be `strictness` ("strict" or "math-verify") and `rounding`, and
        `limits`, `priority`, `tenant` and `deadline_s` of `Call`. Each pair is a call of its own.
        Raises as `run_batch` does.
        """
        template = check_template(fields)
        decoded = [
            _decode_pair(pair, f"pairs[{index}]") for index, pair in enumerate(_as_list(pairs, "pairs", _EXPECTED_PAIR))
        ]
        return await _converted(self.run_batch([build_check(*pair, template) for pair in decoded]), verdict_of)

    async def cancel(self, call_id: str) -> int:
        """Cancel all unfinished calls with this id, also calls of other clients, and return their number.

        The result of each is `unavailable` with `Cancelled`. Raises `InvalidCall` for an id that no call can have, and
        `ServiceError` if no endpoint answers.
        """
        if not check_label(call_id, "call_id"):
            raise InvalidCall("call_id: expected the id of a call, got an empty text")
        return await self._opened().cancel(call_id)

    async def judge(
        self, programs: Sequence[RawProgram], defaults: Mapping[str, Any] | None = None
    ) -> list[JudgedProgram]:
        """Run programs against their tests, and return the results in the same order.

        A program is a mapping as in `programs` of POST /v1/judge. `defaults` sets fields that a program omits, such as
        `tests`. Raises as `run_batch` does.
        """
        programs, judged = _as_list(programs, "programs", _EXPECTED_PROGRAM), dict[int, JudgedProgram]()
        try:
            async for index, program in self.stream_judged(programs, defaults):
                judged[index] = program
        except ServiceError as error:
            raise error.with_results([judged.get(index) for index in range(len(programs))]) from None
        return [judged[index] for index in range(len(judged))]

    async def rewards(
        self, programs: Sequence[RawProgram], defaults: Mapping[str, Any] | None = None, *, partial: bool = False
    ) -> list[float | None]:
        """Judge programs as `judge` does, and return the reward of each program in the same order.

        - Without `partial`, the reward is 1.0 if the program passed all of its tests, else 0.0. The tests of a program
          end at its first failure, unless `defaults` or the program sets `stop_at_first_failure`.
        - With `partial`, the reward is the share of its tests that the program passed.
        - The reward is None if the program is not scorable. The result then says nothing about the program, so the
          reward must not become 0.
        """

        def reward(program: JudgedProgram) -> float | None:
            share = program.passed / program.total if program.is_scorable else None
            return share if partial or share is None else float(share == 1)

        return await _converted(
            self.judge(programs, {"stop_at_first_failure": not partial, **(defaults or {})}), reward
        )

    def stream_judged(
        self, programs: Sequence[RawProgram], defaults: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[tuple[int, JudgedProgram], None]:
        """Run programs against their tests, and yield the index and result of each as it ends. Leaving the loop cancels
        the rest."""
        submissions = decode_all(_as_list(programs, "programs", _EXPECTED_PROGRAM), defaults or {})
        return self._opened().stream(submissions, MAX_TESTS_AT_ONCE)

    def session(self, **fields: Any) -> AsyncSession:
        """Return a session to be opened by `async with`: an interpreter that keeps its variables and files from cell to
        cell. `fields` are fields of POST /v1/sessions, such as `limits`, `keep_states` and `idle_s`."""
        return self._opened().session(fields)

    async def ready(self) -> bool:
        """Return whether an endpoint accepts calls now. Sends one request to each."""
        return await self._opened().is_ready()

    def _opened(self) -> Transport:
        if not self._transport.is_open:
            raise RuntimeError(_NOT_OPEN.format(name="AsyncClient", keyword="async with", wait="await "))
        return self._transport


class Client:
    """`AsyncClient` for code without an event loop, used as `with Client(...) as client` or between `open` and `close`.

    It has the same arguments and methods, runs an event loop in a thread of its own, and may be used from many threads.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        queue_timeout_s: float | None = None,
        retries: int = RETRIES,
        batch_size: int = BATCH_CALLS,
        max_connections: int = MAX_CONNECTIONS,
        gather_s: float = 0.0,
    ) -> None:
        self._client = AsyncClient(
            endpoints,
            token=token,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            retries=retries,
            batch_size=batch_size,
            max_connections=max_connections,
            gather_s=gather_s,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event

    def open(self) -> Client:
        """Start the thread of the event loop and open the client. Does nothing if it is open."""
        if self._loop is not None:
            return self
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=[opened], name="sandbox-client", daemon=True)
        self._thread.start()
        opened.result()
        return self

    def close(self) -> None:
        """End unfinished calls with a `ServiceError`, close all connections and end the thread. Does nothing if it is
        closed."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not thread:
            thread.join()

    def __enter__(self) -> Client:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def execute(self, code: AnyCall, **fields: Any) -> Result:
        """Run one call: source with the fields of `Call`, or a call with some of its fields replaced."""
        return self._wait(lambda: self._client.execute(code, **fields))

    def submit(self, code: AnyCall, **fields: Any) -> Future[Result]:
        """Start one call and return the future of its result at once. `asyncio.wrap_future` waits for it in any event
        loop. Cancelling the future cancels the call."""
        return self._start(lambda: self._client.execute(code, **fields))

    def run_batch(self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None) -> list[Result]:
        """Run all `calls` and return their results in the same order. `defaults` sets fields that a call omits."""
        return self._wait(lambda: self._client.run_batch(calls, defaults))

    def stream(
        self, calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None = None
    ) -> Generator[tuple[int, Result], None, None]:
        """Run all `calls` and yield the index and result of each as it ends. Leaving the loop cancels the rest."""
        return self._stream(self._opened().stream(calls, defaults))

    def _stream(self, results: AsyncGenerator[tuple[int, T], None]) -> Generator[tuple[int, T], None, None]:
        async def get_next() -> tuple[int, T] | None:
            return await anext(results, None)

        try:
            while (item := self._wait(get_next)) is not None:
                yield item
        finally:  # this may run in any thread, when the generator is collected, so it must not wait for the loop
            with suppress(RuntimeError):  # the client is closed; closing it has ended `results` too
                self._start(results.aclose)

    def session(self, **fields: Any) -> Session:
        """Return a session to be opened by `with`. `fields` are those of `AsyncClient.session`."""

        async def make() -> AsyncSession:
            return self._client.session(**fields)

        return Session(self._wait(make), self)

    def verify(self, pairs: Sequence[Pair], **fields: Any) -> list[Verdict]:
        """Check each pair of the right answer and a given answer, and return the verdicts in the same order."""
        return self._wait(lambda: self._client.verify(pairs, **fields))

    def cancel(self, call_id: str) -> int:
        """Cancel all unfinished calls with this id, those of other clients too, and return their number."""
        return self._wait(lambda: self._client.cancel(call_id))

    def judge(self, programs: Sequence[RawProgram], defaults: Mapping[str, Any] | None = None) -> list[JudgedProgram]:
        """Run programs against their tests, and return the results in the same order."""
        return self._wait(lambda: self._client.judge(programs, defaults))

    def rewards(
        self, programs: Sequence[RawProgram], defaults: Mapping[str, Any] | None = None, *, partial: bool = False
    ) -> list[float | None]:
        """Judge programs and return the reward of each in the same order; None if a program is not scorable."""
        return self._wait(lambda: self._client.rewards(programs, defaults, partial=partial))

    def stream_judged(
        self, programs: Sequence[RawProgram], defaults: Mapping[str, Any] | None = None
    ) -> Generator[tuple[int, JudgedProgram], None, None]:
        """Run programs against their tests, and yield the index and result of each as it ends. Leaving the loop cancels
        the rest."""
        return self._stream(self._opened().stream_judged(programs, defaults))

    def ready(self) -> bool:
        """Return whether an endpoint accepts calls now. Sends one request to each."""
        return self._wait(self._client.ready)

    def _run(self, opened: Future[None]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._run_until_stopped(opened))
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _run_until_stopped(self, opened: Future[None]) -> None:
        self._stop = asyncio.Event()
        async with self._client:
            self._loop = asyncio.get_running_loop()
            opened.set_result(None)
            await self._stop.wait()
        self._loop = None

    def _opened(self) -> AsyncClient:
        if self._loop is None:
            raise RuntimeError(_NOT_OPEN.format(name="Client", keyword="with", wait=""))
        return self._client

    def _start(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        self._opened()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(start(), self._loop)

    def _wait(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback in the client's own thread would wait for itself; use submit in callbacks")
        future = self._start(start)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _urls(endpoints: str | Sequence[str]) -> list[str]:
    """Return the URLs without a slash at the end. Raises `TypeError` or `ValueError`."""
    if isinstance(endpoints, str):
        return [check_url(endpoints, "endpoints")]
    return [
        check_url(url, f"endpoints[{index}]") for index, url in enumerate(_as_list(endpoints, "endpoints", "a URL"))
    ]


def check_url(url: Any, where: str) -> str:
    """Return a URL without slashes at its end. Raises `TypeError` or `ValueError`."""
    if not isinstance(url, str):
        raise TypeError(f"{where}: expected a URL as text, got {type(url).__name__}")
    try:
        is_valid = re.fullmatch(r"https?://[^\s?#]+", url) and urlsplit(url).hostname and urlsplit(url).port != 0
    except ValueError:  # the port is no number, or the address is no IPv6 address
        is_valid = False
    if not is_valid:
        raise ValueError(f"{where}: expected a URL such as {DEFAULT_ENDPOINT}, got {url!r:.200}")
    return url.rstrip("/")


def _result_of(future: asyncio.Future[T]) -> T | None:
    """Return the result of a call, or None if it has none yet."""
    has_result = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if has_result else None


async def _converted(results: Awaitable[list[T]], convert: Callable[[T], U]) -> list[U]:
    """Return converted results. The results that a `ServiceError` has are converted too."""
    try:
        return [convert(result) for result in await results]
    except ServiceError as error:
        raise error.with_results([None if result is None else convert(result) for result in error.results]) from None


def _submission(call: Call, default_id: str) -> Submission[Result]:
    return Submission(CALL_ROUTE, call, call.id, call.id or default_id, call.size)


class Session:
    """`AsyncSession` for code without an event loop, used as `with client.session() as session`."""

    def __init__(self, session: AsyncSession, client: Client) -> None:
        self._session = session
        self._client = client

    @property
    def id(self) -> str:
        """The id of the session on the server; empty if it is not open."""
        return self._session.id

    @property
    def head(self) -> int:
        """Number of the state from which the next cell runs."""
        return self._session.head

    @property
    def states(self) -> tuple[int, ...]:
        """Numbers of the states that the server keeps."""
        return self._session.states

    def open(self) -> Session:
        """Open the session. Raises `ServiceError`."""
        self._client._wait(self._session.open)
        return self

    def close(self) -> None:
        """Close the session. Does nothing if it is not open."""
        self._client._wait(self._session.close)

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, code: str, **fields: Any) -> CellResult:
        """Run a cell, as `AsyncSession.run` does."""
        return self._client._wait(lambda: self._session.run(code, **fields))

    def rollback(self, state: int) -> None:
        """Make an earlier state the head. Raises `SessionGone` if it is no longer kept."""
        self._client._wait(lambda: self._session.rollback(state))


def _submissions(calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None) -> list[Submission[Result]]:
    """Return what is to be sent for some calls. Raises `TypeError` or `InvalidCall`."""
    return [_submission(call, str(index)) for index, call in enumerate(_decode_calls(calls, defaults))]


def _decode_calls(calls: Sequence[AnyCall], defaults: Mapping[str, Any] | None) -> list[Call]:
    """Return valid calls. Raises `TypeError` or `InvalidCall`."""
    base = None if defaults is None else Call.decode_defaults(_with_encoded_texts(defaults))
    decoded: list[Call] = []
    for index, call in enumerate(_as_list(calls, "calls", _EXPECTED_CALL)):
        if isinstance(call, Call) and base is None:
            decoded.append(call)
        else:
            where = f"calls[{index}]"
            decoded.append(Call.decode(_with_encoded_texts(_wire_fields(call, where)), base, where))
    return decoded


def _wire_fields(call: Any, where: str) -> Mapping[str, Any]:
    """Return `call` as a mapping of its fields. Raises `TypeError`."""
    if isinstance(call, str):
        return {"code": call}
    if isinstance(call, Call):
        return call.encode(binary=True)
    if isinstance(call, Mapping):
        return call
    raise TypeError(f"{where}: expected {_EXPECTED_CALL}, got {type(call).__name__}")


def _with_encoded_texts(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a mapping in which the files that are text are bytes."""
    has_files = isinstance(call, Mapping) and "files" in call
    return {**call, "files": with_encoded_texts(call["files"])} if has_files else call


def _decode_pair(pair: Any, where: str) -> tuple[str, str]:
    """Return gold and answer. Raises `TypeError` or `InvalidCall`."""
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        pair = {"gold": pair[0], "answer": pair[1]}
    elif not isinstance(pair, Mapping):
        size = f" of {len(pair)}" if isinstance(pair, (tuple, list)) else ""
        raise TypeError(f"{where}: expected {_EXPECTED_PAIR}, got {type(pair).__name__}{size}")
    return decode_pair(pair, where)


def _as_list(items: Any, where: str, expected_item: str) -> list[Any]:
    """Return `items` as a list. Raises `TypeError` if it is a single item."""
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise TypeError(f"{where}: expected a list, each item {expected_item}; got {type(items).__name__}")
    return list(items)
